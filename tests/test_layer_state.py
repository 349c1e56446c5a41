"""What a patched layer remembers and what it must not: its account, choices made while a graph is
captured, guards, handles of other processes.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from models.layers import call, layer

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.backends.guard import DeviceGuard
from sagepatch.dispatch import Request
from sagepatch.errors import (
    VariantRefused,
)
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ops import chosen_for, run_layer

FAST = "emulated.sage2_8"


def test_a_handle_of_another_process_finds_no_layer() -> None:
    # Numbers that start at 1 everywhere let an exported graph run another model's layers.
    code = "from sagepatch.layer import _numbers; print(next(_numbers))"
    command = [sys.executable, "-c", code]
    numbers = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(numbers) == 2


@pytest.mark.parametrize("term", ["attn_mask", "sinks"])
def test_a_nan_in_a_mask_or_sink_is_no_fault_of_the_kernel(term: str) -> None:
    extra = torch.zeros(2) if term == "sinks" else torch.zeros(1, 1, 1, 47)
    extra[..., 0] = math.nan
    one, given = layer(), call(**{term: extra})
    one.run_with(Request(FAST), "asked")
    run_layer(one, given)
    assert one.demoted is None
    assert one.record.notes == ["inputs of this layer were not finite"]


def test_a_call_that_is_recomputed_counts_once_and_as_exact(monkeypatch) -> None:
    import sagepatch.backends.emulated as emulated

    one, given = layer(), call()
    one.run_with(Request(FAST), "asked")
    wrong = torch.full_like(given.q, math.nan)
    monkeypatch.setattr(emulated, "emulate", lambda seen, recipe: (wrong, None))
    run_layer(one, given)
    assert one.record.calls == 1
    assert one.record.by_variant == {SDPA.name: 1}
    assert list(one.record.fallbacks.values()) == [1]


def test_a_choice_made_while_a_graph_is_captured_is_not_kept(monkeypatch) -> None:
    # Nothing can be checked during a capture: an unchecked kernel must not serve for good.
    spec = replace(call().spec(), device="cuda", arch=90, dtype="bf16", v_dtype="bf16")
    wanted = BY_NAME["triton.sage2_8"]
    monkeypatch.setattr("sagepatch.ops.unusable", lambda variant: None)
    one = PatchedLayer("x", "self", Policy(), Request("exact"), lambda variant: None)
    one.run_with(Request(wanted.name), "asked")
    for module in ("layer", "ops"):
        monkeypatch.setattr(f"sagepatch.{module}.failure", lambda variant, gpu, **graphs: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert one.choose(spec)[0] is wanted
    assert chosen_for(spec, wanted.name) is wanted
    for module in ("layer", "ops"):
        monkeypatch.setattr(f"sagepatch.{module}.failure", lambda variant, gpu, **graphs: "it lies")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert one.choose(spec)[0] is SDPA
    with pytest.raises(VariantRefused, match="it lies"):
        chosen_for(spec, wanted.name)


def test_no_guard_is_made_inside_a_graph(monkeypatch) -> None:
    one = layer()
    monkeypatch.setattr("sagepatch.layer.available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert one.guard(torch.device("cuda", 0)) is None
    assert "no guard" in one.record.notes[0]


def test_threads_may_ask_one_guard(monkeypatch) -> None:
    guard = DeviceGuard(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Event:
        def query(self) -> bool:
            guard._event = None  # another thread was faster
            return True

    guard._event, guard._copy = Event(), torch.zeros(2, dtype=torch.int32)
    assert guard.verdict() is None
