"""A remembered call: the same launches, every pointer anew. Compiled kernels are stand-ins that
note their arguments.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from sagepatch.backends.triton.launching import ALIGNMENT, Recording, replay_of

CPU = torch.device("cpu")


class Compiled:
    """What Triton returns of a launch: indexed by a grid, it runs."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.name, grid, args))


@pytest.fixture
def recorded():
    """Two launches: the first writes codes and scales, the second reads both and the output."""
    log: list = []
    q, out = torch.zeros(4), torch.zeros(4)
    codes, scales = torch.zeros(1120, dtype=torch.int8), torch.zeros(7)
    view = codes.view(10, 112)
    described = TensorDescriptor(view, [10, 112], [112, 1], [1, 16])
    recording = Recording(
        [
            (Compiled("prepass", log), 3, [q, codes, scales, 5, 0.5, None]),
            (Compiled("attention", log), 8, [described, scales, out, None, "constant"]),
        ]
    )
    replay = replay_of(recording, {"q": q, "out": out, "lse": None})
    assert replay is not None
    return replay, log, (q, out, codes, scales)


def test_pointers_are_new_and_everything_else_is_as_it_was(recorded):
    replay, log, (q, out, codes, scales) = recorded
    new_q, new_out = torch.ones(4), torch.ones(4)
    replay.run(CPU, {"q": new_q, "out": new_out, "lse": None})
    (name, grid, first), (other, other_grid, second) = log
    assert (name, grid, other, other_grid) == ("prepass", (3, 1, 1), "attention", (8, 1, 1))
    assert first[0] is new_q
    assert first[3:] == (5, 0.5, None)
    assert second[2] is new_out
    assert second[3:] == (None, "constant")
    # The second launch reads where the first wrote, in memory of this call's own.
    assert second[0].base.data_ptr() == first[1]
    assert second[0].base.dtype == torch.int8
    assert (second[0].shape, second[0].strides) == ([10, 112], [112, 1])
    assert second[1] == first[2]
    assert first[1] not in {t.data_ptr() for t in (q, out, codes, scales)}


def test_scratch_tensors_do_not_overlap(recorded):
    replay, log, _ = recorded
    replay.run(CPU, {"q": torch.ones(4), "out": torch.ones(4), "lse": None})
    codes, scales = log[0][2][1:3]
    assert abs(codes - scales) >= 1120
    assert (codes - scales) % ALIGNMENT == 0
    assert replay.scratch_bytes == 3 * ALIGNMENT + ALIGNMENT


def test_two_replays_share_nothing(recorded):
    replay, log, _ = recorded
    kept = [replay.run(CPU, {"q": torch.ones(4), "out": torch.ones(4), "lse": None})]
    first = log[1][2][0]
    replay.run(CPU, {"q": torch.ones(4), "out": torch.ones(4), "lse": None})
    assert log[3][2][0] is not first
    assert first.base is not log[3][2][0].base
    assert kept == [None]


def test_an_interpreted_call_is_not_remembered():
    assert replay_of(Recording(), {"q": torch.zeros(1)}) is None
