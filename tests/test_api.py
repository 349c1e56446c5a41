"""`apply` and what it promises: exactly undone, nothing else touched, calibrated, planned, guarded,
threaded.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models.stacks import stack, tokens
from torch import nn

import sagepatch
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.capture import SAMPLED_CALLS
from sagepatch.errors import (
    InvalidArgument,
    NothingPatched,
    StrictFallback,
    VariantRefused,
)

EMULATED = "emulated.sage2_8"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def calibrated(model: nn.Module, x: torch.Tensor, **options) -> sagepatch.Patch:
    patch = sagepatch.apply(model, emulate=True, **options)
    for _ in range(SAMPLED_CALLS[-1]):
        model(x)
    assert patch.locked
    return patch


def test_calibration_is_exact_until_it_locks_and_quantised_after() -> None:
    model, x = stack(), tokens()
    want = model(x)
    patch = sagepatch.apply(model, emulate=True)
    for call in range(1, SAMPLED_CALLS[-1] + 1):
        assert not patch.locked
        assert torch.equal(model(x), want), f"call {call} was not exact"
    assert patch.locked
    before = [layer.record.by_variant[SDPA.name] for layer in patch.layers]
    out = model(x)
    assert not torch.equal(out, want)
    assert (out - want).norm() / want.norm() < 0.01
    for layer, exact_calls in zip(patch.layers, before, strict=True):
        assert layer.request.variant != "exact"
        assert layer.record.by_variant[SDPA.name] == exact_calls
        assert layer.record.by_variant[layer.request.variant] == 1


def test_too_few_samples_stay_exact_and_say_so() -> None:
    model, x = stack(), tokens()
    patch = sagepatch.apply(model, emulate=True)
    model(x)
    patch.lock()
    assert all(layer.request.variant == "exact" for layer in patch.layers)
    assert all("only 1 of 2 samples" in row.reason for row in patch.report().layers)


def test_without_a_gpu_and_without_emulation_everything_is_exact_and_says_so() -> None:
    model, x = stack(), tokens()
    want = model(x)
    patch = sagepatch.apply(model)
    for _ in range(9):
        assert torch.equal(model(x), want)
    report = patch.report()
    assert all(row.tier == "exact" for row in report.layers)
    assert all("no quantised kernel serves this layer here" in r.reason for r in report.layers)


# case 31
def test_a_fragile_layer_is_found_by_its_worst_sample() -> None:
    model = stack()
    with torch.no_grad():
        model[1].qkv.weight[:128] *= 20
        model[1].qkv.bias[64:128] += 40
    patch = calibrated(model, tokens(200))
    rows = {row.name: row for row in patch.report().layers}
    assert rows["1"].tier != "fast"
    assert rows["0"].tier == "fast"
    assert "refused" in rows["1"].reason or "accurate" in rows["1"].reason


# case 60
def test_the_threshold_moves_the_plan_monotonically() -> None:
    model, x = stack(), tokens()
    table = sagepatch.calibrate(model, run=lambda: [model(x) for _ in range(3)], emulate=True)
    order = ["fast", "safe", "exact"]
    previous = [0] * 4
    for threshold in (0.0, 0.9, 0.99, 0.998, 0.9995, 0.99995, 0.999999, 1.01):
        tiers = [BY_NAME[e.variant].tier for e in table.plan(threshold).entries]
        ranks = [order.index(tier) for tier in tiers]
        assert all(a <= b for a, b in zip(previous, ranks, strict=True))
        previous = ranks
    assert [e.variant for e in table.plan(1.01).entries] == [SDPA.name] * 4
    assert [BY_NAME[e.variant].tier for e in table.plan(0).entries] == ["fast"] * 4


def test_calibrate_leaves_the_model_unpatched_even_when_the_run_fails() -> None:
    model, x = stack(), tokens()
    want = model(x)

    def fail() -> None:
        model(x)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        sagepatch.calibrate(model, run=fail, emulate=True)
    assert torch.equal(model(x), want)
    assert "forward" not in model[0].__dict__
    with pytest.raises(InvalidArgument, match="one of them"):
        sagepatch.calibrate(model)


# case 33
def test_restore_is_exact_and_leaves_nothing() -> None:
    model, x = stack(), tokens()
    want = model(x)
    attributes = [set(m.__dict__) for m in model.modules()]
    keys = list(model.state_dict())
    for _ in range(30):
        patch = sagepatch.apply(model, variant=EMULATED)
        assert not torch.equal(model(x), want)
        assert list(model.state_dict()) == keys
        patch.restore()
        patch.restore()
    sagepatch.restore(model)
    assert torch.equal(model(x), want)
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_apply_twice_restore_once() -> None:
    model, x = stack(), tokens()
    want = model(x)
    first = sagepatch.apply(model, variant=EMULATED)
    second = sagepatch.apply(model, variant="emulated.sage1_b")
    assert first.restored
    model(x)
    assert second.layers[0].record.by_variant == {"emulated.sage1_b": 1}
    sagepatch.restore(model)
    assert torch.equal(model(x), want)


def test_the_context_manager_restores_after_an_error() -> None:
    model, x = stack(), tokens()
    want = model(x)

    def fail(*_: object) -> None:
        raise RuntimeError("hook")

    handle = model[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="hook"), sagepatch.apply(model, variant=EMULATED):
        model(x)
    handle.remove()
    assert torch.equal(model(x), want)


def test_patches_do_not_pile_up() -> None:
    model = stack()
    sagepatch.apply(model, variant=EMULATED).restore()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        sagepatch.apply(model, variant=EMULATED).restore()
    gc.collect()
    assert len(gc.get_objects()) - before < 500


# cases 32, 34
def test_nothing_else_is_touched() -> None:
    function = F.scaled_dot_product_attention
    model, other, x = stack(), stack(), tokens()
    want = other(x)
    patch = sagepatch.apply(model, variant=EMULATED)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(torch.equal(other(x), want)))
    model(x)
    assert calls == [True]
    assert F.scaled_dot_product_attention is function
    assert torch.equal(stack()(x), want)
    assert [layer.record.calls for layer in patch.layers] == [1] * 4


# case 37
def test_nothing_to_patch_is_an_error_that_says_what_was_there() -> None:
    with pytest.raises(NothingPatched, match="no attention layer found in Sequential"):
        sagepatch.apply(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(NothingPatched, match="fused path"):
        sagepatch.apply(nn.Sequential(nn.MultiheadAttention(8, 2)))
    with pytest.raises(InvalidArgument, match="components"):
        sagepatch.apply(stack(), components=["vae"])


# case 40
def test_copies_are_independent() -> None:
    model, x = stack(), tokens()
    want = model(x)
    patch = sagepatch.apply(model, variant=EMULATED)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    counts = [layer.record.calls for layer in patch.layers]
    for twin in (copied, pickled):
        assert torch.equal(twin(x), want)
        with torch.no_grad():
            twin[0].out.weight.zero_()
    assert [layer.record.calls for layer in patch.layers] == counts
    patch.restore()
    assert torch.equal(model(x), want)


# case 46
def test_training_takes_the_original_path() -> None:
    model, x = stack(), tokens()
    with torch.enable_grad():
        model(x).square().mean().backward()
        want = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        patch = sagepatch.apply(model, variant=EMULATED)
        model(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all("training" in " ".join(layer.record.fallbacks) for layer in patch.layers)


# case 47
def test_a_kernel_that_raises_is_named_and_not_hidden(monkeypatch) -> None:
    import sagepatch.backends.emulated as emulated

    model, x = stack(), tokens()
    sagepatch.apply(model, variant=EMULATED)

    def explode(call, recipe):
        raise RuntimeError("boom")

    monkeypatch.setattr(emulated, "emulate", explode)
    with pytest.raises(RuntimeError, match="boom") as caught:
        model(x)
    assert any("emulated.sage2_8 in layer 0" in note for note in caught.value.__notes__)


# case 47
@pytest.mark.parametrize("guard", ["auto", "sync"])
def test_a_non_finite_output_is_recomputed(monkeypatch, guard, caplog) -> None:
    import sagepatch.backends.emulated as emulated

    model, x = stack(), tokens()
    want = model(x)
    patch = sagepatch.apply(model, variant=EMULATED, guard=guard)
    original = emulated.emulate

    def poisoned(call, recipe):
        out, lse = original(call, recipe)
        return torch.full_like(out, math.nan), lse

    monkeypatch.setattr(emulated, "emulate", poisoned)
    for _ in range(3):
        assert torch.equal(model(x), want)
    rows = patch.report().layers
    assert all(row.tier == "exact" and "non-finite" in row.reason for row in rows)
    assert len([r for r in caplog.records if "layer 0 runs exact" in r.getMessage()]) == 1


def test_nan_inputs_are_not_blamed_on_the_kernel() -> None:
    model, x = stack(), tokens()
    x[0, 0, 0] = math.nan
    patch = sagepatch.apply(model, variant=EMULATED)
    assert model(x).isnan().any()
    assert all(layer.demoted is None for layer in patch.layers)


# case 66
def test_prefer_or_force() -> None:
    model, x = stack(), tokens()
    want = model(x)
    patch = sagepatch.apply(model, variant="sage1_b")
    assert torch.equal(model(x), want)
    assert all("emulation" in " ".join(layer.record.fallbacks) for layer in patch.layers)
    sagepatch.apply(model, variant="sage1_b", strict=True)
    with pytest.raises(StrictFallback, match="layer '0'"):
        model(x)
    # A tier has dozens of kernels: they are counted by reason.
    sagepatch.apply(model, variant="fast", strict=True)
    with pytest.raises(StrictFallback, match=r"layer '0': \d+ cuda kernels: ") as refused:
        model(x)
    assert str(refused.value).count("layer '0'") == 1
    assert len(str(refused.value)) < 1500
    assert len(refused.value.reasons) > 30
    with pytest.raises(VariantRefused, match="no such name"):
        sagepatch.apply(model, variant="sage9")


def test_disabled_by_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("SAGEPATCH_DISABLE", "1")
    model = stack()
    patch = sagepatch.apply(model, variant=EMULATED)
    assert "SAGEPATCH_DISABLE" in repr(patch)
    assert "forward" not in model[0].__dict__


# case 50
def test_threads() -> None:
    model = stack(2)
    other = stack(2)
    sagepatch.apply(model, variant=EMULATED)
    inputs = [tokens(20 + index) for index in range(8)]
    serial = [model(x) for x in inputs]
    wrong = []

    def serve(index: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(model(inputs[index]), serial[index], atol=1e-5):
                    wrong.append(index)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sagepatch.apply(other, variant=EMULATED).restore()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calibration_under_threads_stays_exact() -> None:
    model, x = stack(2), tokens()
    want = model(x)
    patch = sagepatch.apply(model, emulate=True)
    wrong = []

    def serve() -> None:
        with torch.no_grad():
            for _ in range(3):
                out = model(x)
                if not patch.locked and not torch.allclose(out, want, atol=1e-5):
                    wrong.append(out)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_report_is_json_and_html_and_text(tmp_path: Path) -> None:
    model, x = stack(), tokens()
    patch = calibrated(model, x)
    model(x)
    report = patch.report()
    data = json.loads(report.to_json(tmp_path / "r.json"))
    wanted = {"name", "kind", "variant", "cosine", "rel_l1", "calls", "reason"}
    assert all(wanted <= set(layer) for layer in data["layers"])
    assert data["layers"][0]["cosine"] > 0.998
    assert "4 attention layers found, 4 patched" in str(report)
    assert "accuracy, not speed" in str(report)
    assert "Content-Security-Policy" in report.to_html(tmp_path / "r.html")


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidArgument, match="guard"):
        sagepatch.apply(stack(), guard="maybe")  # type: ignore[arg-type]
    plan = calibrated(stack(), tokens()).plan()
    with pytest.raises(InvalidArgument, match="exclude each other"):
        sagepatch.apply(stack(), plan=plan, variant="fast")
    with pytest.raises(TypeError):
        sagepatch.apply(stack(), nonsense=1)  # type: ignore[call-arg]
