"""Patches that come and go: put in force again, entered again, made inside a calibration, over a
derivative; and what a kernel that fails its check may not do to one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models.stacks import stack, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagepatch
from sagepatch.errors import (
    InvalidArgument,
    NothingPatched,
)

FAST = "emulated.sage2_8"


def forward(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens())


def test_a_patch_put_in_force_again_takes_the_newer_one_back() -> None:
    model = stack()
    plain = forward(model)
    older = sagepatch.apply(model, variant=FAST)
    fast = forward(model)
    newer = sagepatch.apply(model, variant="exact")
    older.install()
    assert newer.restored
    assert torch.equal(forward(model), fast)
    newer.restore()
    sagepatch.restore(model)
    assert older.restored
    assert torch.equal(forward(model), plain)


def test_a_patch_may_be_entered_again() -> None:
    model = stack()
    plain = forward(model)
    with sagepatch.apply(model, variant=FAST) as patch:
        fast = forward(model)
    with patch:
        assert torch.equal(forward(model), fast)
    assert torch.equal(forward(model), plain)
    assert patch.report().layers[0].by_variant == {FAST: 2}


def test_calibrate_leaves_no_patch_that_its_run_made() -> None:
    model = stack()
    plain = forward(model)
    sagepatch.calibrate(model, run=lambda: sagepatch.apply(model, variant=FAST), emulate=True)
    assert torch.equal(forward(model), plain)
    assert "forward" not in vars(model[0])


def test_a_model_without_attention_was_looked_at_as_a_whole() -> None:
    with pytest.raises(NothingPatched, match=r"no attention layer found in Linear \(.* all of it"):
        sagepatch.apply(torch.nn.Linear(2, 2))


def test_a_threshold_beside_a_plan_of_another_is_refused() -> None:
    model = stack()
    plan = sagepatch.apply(model, emulate=True).lock().plan()
    sagepatch.restore(model)
    for threshold in (0.998, plan.threshold):
        sagepatch.apply(model, plan=plan, threshold=threshold, emulate=True).restore()
    with pytest.raises(InvalidArgument, match=r"solved for a threshold of 0\.998, not 0\.9"):
        sagepatch.apply(model, plan=plan, threshold=0.9, emulate=True)
    assert not forward(model).requires_grad


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_a_plan_for_no_threshold_is_refused(threshold: float) -> None:
    model = stack()
    calibration = sagepatch.calibrate(model, run=lambda: forward(model), emulate=True)
    with pytest.raises(InvalidArgument, match="threshold is"):
        calibration.plan(threshold)


def test_forward_mode_derivatives_of_a_patched_model_are_the_originals() -> None:
    model, x = stack().requires_grad_(False), tokens()
    tangent = torch.ones_like(x)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.jvp(model, (x,), (tangent,))[1]
        with sagepatch.apply(model, variant=FAST) as patch:
            found = torch.func.jvp(model, (x,), (tangent,))[1]
            reasons = patch.report().layers[0].fallbacks
    assert torch.equal(found, expected)
    assert any("training" in reason for reason in reasons)


def test_a_kernel_that_fails_its_check_is_not_measured(monkeypatch) -> None:
    # Before, calibration ran it on live tensors, unchecked.
    lies = {"emulated.sage2pp_8": "known-answer check: cosine 0.5"}
    monkeypatch.setattr(
        "sagepatch.calibration.candidates.failure", lambda one, gpu: lies.get(one.name)
    )
    model = stack()
    patch = sagepatch.apply(model, emulate=True, threshold=0.9)
    forward(model)
    tried = set(patch.calibration().layers[0].candidates)
    assert "emulated.sage2pp_8" not in tried
    assert FAST in tried
    assert any("cosine 0.5" in note for note in patch.report().layers[0].notes)
    assert torch.equal(forward(model), forward(stack()))
    patch.restore()


def test_a_module_taken_out_of_the_model_is_reported(caplog) -> None:
    # As diffusers' FreeNoise does, which puts blocks of its own in the places of the model's.
    model = stack()
    patch = sagepatch.apply(model, variant=FAST)
    model[1] = torch.nn.Sequential(model[1])  # under another name, and patched as before
    model[2] = stack(1)[0]
    del model[3]
    forward(model)
    assert patch.replaced() == {"2": "Block", "3": "nothing, it is gone"}
    assert [layer.record.calls for layer in patch.layers] == [1, 1, 0, 0]
    assert "2 no longer patched" in patch.report().headline()
    again = sagepatch.apply(model, variant=FAST)
    forward(model)
    assert [layer.record.calls for layer in again.layers] == [1, 1, 1]
    assert not again.replaced()
    assert not caplog.text


class Pipeline:
    def __init__(self) -> None:
        self.transformer, self.vae = stack(2), torch.nn.Linear(2, 2)

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "vae": self.vae}


def test_a_model_put_in_a_pipeline_after_the_patch_is_reported() -> None:
    pipe = Pipeline()
    patch = sagepatch.apply(pipe, variant=FAST)
    older = pipe.transformer
    pipe.transformer = torch.compile(older)
    assert not patch.replaced()
    pipe.transformer = None
    assert not patch.replaced()
    pipe.transformer = stack(1)
    assert patch.replaced() == {"transformer.0": "Block", "transformer.1": "nothing, it is gone"}
    assert "2 no longer patched" in patch.report().headline()
    pipe.transformer = older
    assert not patch.replaced()


class Slotted:
    __slots__ = ("transformer",)

    def __init__(self) -> None:
        self.transformer = stack()

    @property
    def components(self) -> dict[str, torch.nn.Module]:
        return {"transformer": self.transformer}


def test_a_pipeline_that_has_no_weak_references_is_patched() -> None:
    pipe = Slotted()
    with sagepatch.apply(pipe, variant=FAST) as patch:
        pipe.transformer = stack(1)
        assert not patch.replaced()
    assert sagepatch.apply(pipe, variant=FAST).report().layers


def test_a_patch_on_a_part_says_what_it_leaves_unpatched(caplog) -> None:
    model = stack()
    older = sagepatch.apply(model, variant=FAST)
    sagepatch.apply(model, variant=FAST)
    assert not caplog.text
    sagepatch.apply(model[1], variant=FAST)
    assert older.bare() == ["0", "2", "3"]
    assert "which has fewer layers: 3 run unpatched now, 0 among them" in caplog.text
