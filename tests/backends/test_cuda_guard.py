"""The guard of the Hopper kernels on a GPU: the kernel raises the flag, the exact kernel behind it
overwrites the output, in the first call of a kind and in those after it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")

from cuda_support import DEVICE, make, needs_hopper

from sagepatch.backends import prepared
from sagepatch.backends.cuda import attention
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES

pytestmark = needs_hopper
SHAPE = (2, 4, 2, 130, 257, 64)


def mask() -> torch.Tensor:
    seen = torch.ones(2, 1, 1, 257, dtype=torch.bool, device=DEVICE)
    seen[0, :, :, 100:] = False
    return seen


KINDS = {
    "plain": {},
    "causal window, lse": {"causal_offset": 127, "window": 60, "return_lse": True},
    "layout": {"bshd_out": True},
    "mask": {"mask": True},
}


FAST, SAFE = "sage2pp_8_d4", "sage1_b_f32"
every_kind = pytest.mark.parametrize(
    ("name", "kind"), [*((FAST, kind) for kind in KINDS), (SAFE, "plain")]
)


@pytest.fixture
def flags(monkeypatch):
    monkeypatch.setattr(prepared, "_PREPARED", {})
    return torch.zeros(2, dtype=torch.int32, device=DEVICE)


def call(kind: str, seed: int):
    options = dict(KINDS[kind])
    if options.pop("mask", False):
        options["attn_mask"] = mask()
    return make(SHAPE, seed=seed, **options)


@every_kind
def test_finite_outputs_are_left_as_they_are(name, kind, flags):
    for seed in range(3):
        one = call(kind, seed)
        out, lse = attention.run_guarded(one, RECIPES[name], flags)
        expected, expected_lse = attention.run(one, RECIPES[name])
        assert torch.equal(out, expected)
        assert lse is None or torch.equal(lse, expected_lse)
    assert flags.tolist() == [0, 0]
    assert len(prepared._PREPARED) == 2


@every_kind
def test_a_raised_flag_makes_the_output_exact(name, kind, flags):
    flags[0] = 1
    for seed in range(3):
        one = call(kind, seed)
        out, lse = attention.run_guarded(one, RECIPES[name], flags)
        right, right_lse = exact(one)
        assert compare(out.float(), right).worst.rel_l1 < 1e-2
        assert out.stride() == one.empty_out().stride()
        assert lse is None or torch.allclose(lse, right_lse, atol=1e-3)
    assert flags.tolist() == [1, 0]


@pytest.mark.parametrize("name", [FAST, SAFE])
@pytest.mark.parametrize("at", [0, 1])
def test_the_kernel_raises_the_flag_where_its_output_is_not_finite(name, at, flags):
    for seed in range(at + 1):
        assert flags.tolist() == [0, 0]
        one = call("plain", seed)
        if seed == at:
            one.v[1, 1, 256, 63] = float("inf")
        out, _ = attention.run_guarded(one, RECIPES[name], flags)
    # The exact output is not finite either: the inputs are to blame.
    assert flags.tolist() == [1, 1]
    assert not bool(out.isfinite().all())
