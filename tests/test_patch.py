"""A patch in force: its one line, patches over patches, pipelines, switches, interrupts."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from models.diffusers_pipelines import tiny_sdxl_pipeline
from models.stacks import stack, tokens

import sagepatch
from sagepatch.backends import unusable
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.capture import SAMPLED_CALLS
from sagepatch.dispatch import Request
from sagepatch.errors import InvalidArgument, MachineError, NothingPatched
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ledger import MOST_SPECS
from sagepatch.spec import AttnSpec

FAST, SAFE = "emulated.sage2_8", "emulated.sage1_b"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_a_patch_in_one_line() -> None:
    model, x = stack(), tokens()
    patch = sagepatch.apply(model, emulate=True)
    assert repr(patch) == "<Patch of Sequential: 4 layers, 0 quantised, calibrating>"
    for _ in range(SAMPLED_CALLS[-1]):
        model(x)
    assert repr(patch) == "<Patch of Sequential: 4 layers, 4 quantised, locked>"
    patch.restore()
    assert repr(patch) == "<Patch of Sequential: 4 layers, 4 quantised, restored>"
    assert not patch.report().in_force
    with patch:
        assert patch.report().in_force
    assert "taken back" in str(patch.report()).splitlines()[0]


# case 33
@pytest.mark.parametrize("inner_first", [True, False])
def test_a_patch_on_a_part_and_one_on_the_whole_replace_each_other(inner_first: bool) -> None:
    model, x = stack(), tokens()
    want = model(x)
    targets = [model[1], model] if inner_first else [model, model[1]]
    first = sagepatch.apply(targets[0], variant=FAST)
    second = sagepatch.apply(targets[1], variant=SAFE)
    assert first.restored
    model(x)
    ran = [dict(layer.record.by_variant) for layer in second.layers]
    assert ran == [{SAFE: 1}] * len(second.layers)
    assert not any(layer.record.calls for layer in first.layers)
    sagepatch.restore(model)
    assert second.restored
    assert torch.equal(model(x), want)


def test_restoring_an_old_patch_leaves_the_new_one(caplog) -> None:
    model, x = stack(), tokens()
    first = sagepatch.apply(model, variant=FAST)
    second = sagepatch.apply(model, variant=SAFE)
    first.restore()
    assert not second.restored
    model(x)
    assert second.layers[0].record.by_variant == {SAFE: 1}


def test_a_failed_apply_changes_nothing(monkeypatch) -> None:
    model, x = stack(), tokens()
    want = model(x)
    attributes = [set(m.__dict__) for m in model.modules()]
    from sagepatch import api

    original = api.search

    def with_a_broken_site(parts):
        from dataclasses import replace

        def refuse(layer):
            raise RuntimeError("this site cannot be installed")

        found = original(parts)
        sites = (*found.sites[:-1], replace(found.sites[-1], install=refuse))
        return replace(found, sites=sites)

    monkeypatch.setattr(api, "search", with_a_broken_site)
    with pytest.raises(RuntimeError, match="cannot be installed"):
        sagepatch.apply(model, variant=FAST)
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert torch.equal(model(x), want)


def test_a_patch_lives_as_long_as_its_model_and_no_longer() -> None:
    model = stack()
    patch = weakref.ref(sagepatch.apply(model, variant=FAST))
    gc.collect()
    assert patch() is not None
    del model
    gc.collect()
    assert patch() is None


def test_a_copy_of_a_patched_model_is_nobody_s() -> None:
    model = stack()
    patch = sagepatch.apply(model, variant=FAST)
    twin = copy.deepcopy(model)
    sagepatch.restore(twin)
    assert not patch.restored
    mine = sagepatch.apply(twin, variant=SAFE)
    assert not patch.restored
    mine.restore()


def test_reinstalling_keeps_what_layers_have_learnt() -> None:
    model, x = stack(), tokens()
    patch = sagepatch.apply(model, emulate=True)
    for _ in range(SAMPLED_CALLS[-1]):
        model(x)
    want = model(x)
    patch.restore()
    assert not torch.equal(model(x), want)
    patch.install()
    patch.install()
    assert torch.equal(model(x), want)
    patch.restore()
    assert not torch.equal(model(x), want)


# case 36
def test_a_forward_of_someone_else_s_over_ours_is_reported_and_repaired() -> None:
    model, x = stack(), tokens()
    patch = sagepatch.apply(model, variant=FAST)
    original = type(model[1]).forward

    def plain(x):
        return original(model[1], x)

    model[1].forward = plain
    assert set(patch.replaced()) == {"1"}
    assert "no longer patched" in patch.report().headline()
    again = sagepatch.apply(model, variant=FAST)
    model(x)
    assert again.replaced() == {}
    assert [layer.record.calls for layer in again.layers] == [1] * 4
    again.restore()
    assert again.replaced() == {}
    assert model[1].forward is plain


class TestPipelines:
    """Which parts of a pipeline are patched."""

    def test_denoisers_by_default_others_by_name(self) -> None:
        pipe = tiny_sdxl_pipeline()
        first = sagepatch.apply(pipe, variant=FAST)
        assert {layer.name.partition(".")[0] for layer in first.layers} == {"unet"}
        text = sagepatch.apply(pipe, variant=FAST, components=["text_encoder"])
        assert {layer.name.partition(".")[0] for layer in text.layers} == {"text_encoder"}
        assert not first.restored
        sagepatch.restore(pipe)
        assert first.restored
        assert text.restored

    def test_unknown_parts_are_named_with_those_there_are(self) -> None:
        pipe = tiny_sdxl_pipeline()
        with pytest.raises(InvalidArgument, match=r"no component transformer; it has .*unet"):
            sagepatch.apply(pipe, components=["transformer"])
        with pytest.raises(InvalidArgument, match="pass a list"):
            sagepatch.apply(pipe, components="unet")
        with pytest.raises(NothingPatched, match="looked at nothing"):
            sagepatch.apply(pipe, components=[])

    def test_a_patched_part_used_elsewhere_is_still_one_patch(self) -> None:
        pipe = tiny_sdxl_pipeline()
        other = type(pipe)(**pipe.components)
        first = sagepatch.apply(pipe, variant=FAST)
        second = sagepatch.apply(other.unet, variant=SAFE)
        assert first.restored
        sagepatch.restore(pipe)
        assert second.restored

    def test_what_is_neither_pipeline_nor_module_is_refused(self) -> None:
        with pytest.raises(sagepatch.SagepatchError, match="cannot patch int"):
            sagepatch.apply(3)


class TestSwitchedOff:
    """SAGEPATCH_DISABLE."""

    @pytest.fixture(autouse=True)
    def off(self, monkeypatch) -> None:
        monkeypatch.setenv("SAGEPATCH_DISABLE", "1")

    def test_apply_does_nothing_and_says_so(self, caplog) -> None:
        model, x = stack(), tokens()
        want = model(x)
        with sagepatch.apply(model, variant=FAST) as patch:
            assert torch.equal(model(x), want)
            assert patch.lock().locked
            assert patch.plan().entries == ()
            assert patch.calibration().layers == ()
            report = patch.report()
        assert "SAGEPATCH_DISABLE is set: nothing is patched" in report.warnings
        assert "SAGEPATCH_DISABLE" in str(report)
        assert "SAGEPATCH_DISABLE" in caplog.text
        assert "off" in repr(patch)

    def test_calibrate_cannot_and_says_so(self) -> None:
        with pytest.raises(MachineError, match="unset it"):
            sagepatch.calibrate(stack(), run=lambda: None)


class TestCalibrate:
    """Measuring a whole run."""

    def test_late_calls_are_measured_too(self) -> None:
        model, x = stack(), tokens()
        table = sagepatch.calibrate(model, run=lambda: [model(x) for _ in range(20)], emulate=True)
        assert {layer.samples for layer in table.layers} == {5}
        assert table.plan(0.5).entries[0].samples == 5

    # case 31
    def test_the_step_that_decided_is_named(self) -> None:
        model, x = stack(2), tokens(200)
        rough = x.clone()
        rough[..., ::9] *= 300

        def steps() -> None:
            for number in range(1, 9):
                model(rough if number == 4 else x)

        table = sagepatch.calibrate(model, run=steps, emulate=True)
        fast = table.layers[0].candidates[FAST]
        assert fast.worst_call == 4
        assert fast.cosine < fast.cosine_mean
        assert "call 4" in table.plan(0.9999999).entries[0].reason

    # case 58
    def test_interrupted_it_keeps_what_was_measured(self, caplog) -> None:
        model, x = stack(), tokens()
        want = model(x)

        def run() -> None:
            for _ in range(3):
                model(x)
            raise KeyboardInterrupt

        table = sagepatch.calibrate(model, run=run, emulate=True)
        assert {layer.samples for layer in table.layers} == {2}
        assert "what was measured so far is kept" in caplog.text
        assert torch.equal(model(x), want)

    def test_interrupted_before_anything_was_measured_it_ends(self) -> None:
        def run() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sagepatch.calibrate(stack(), run=run)

    def test_prompts_are_drawn_by_the_pipeline(self) -> None:
        drawn = []

        class Pipeline:
            def __init__(self) -> None:
                self.components = {"unet": stack(1)}
                self.components["unet"].attn_processors = {}

            def __call__(self, prompt: str) -> None:
                drawn.append(prompt)
                self.components["unet"](tokens())

        table = sagepatch.calibrate(Pipeline(), prompts=["one", "two"], emulate=True)
        assert drawn == ["one", "two"]
        assert table.layers[0].samples == 2

    def test_wrong_arguments_are_sentences(self) -> None:
        model = stack()
        with pytest.raises(InvalidArgument, match="one of them"):
            sagepatch.calibrate(model, run=lambda: None, prompts=["a"])
        with pytest.raises(InvalidArgument, match="pass a list"):
            sagepatch.calibrate(model, prompts="a cat")
        with pytest.raises(InvalidArgument, match="prompts are for pipelines"):
            sagepatch.calibrate(model, prompts=["a cat"])
        with pytest.raises(NothingPatched):
            sagepatch.calibrate(torch.nn.Linear(2, 2), run=lambda: None)

    def test_it_takes_an_earlier_patch_back(self) -> None:
        model, x = stack(), tokens()
        first = sagepatch.apply(model, variant=FAST)
        sagepatch.calibrate(model, run=lambda: [model(x) for _ in range(2)], emulate=True)
        assert first.restored
        assert model(x).isfinite().all()
        assert first.layers[0].record.calls == 0


@pytest.mark.parametrize("threshold", [float("nan"), "0.99", None])
def test_a_threshold_that_is_no_number_is_refused(threshold) -> None:
    with pytest.raises(InvalidArgument, match="threshold is"):
        sagepatch.apply(stack(), threshold=threshold)


# case 48
def test_a_patched_model_follows_its_dtype_and_device() -> None:
    model, x = stack(), tokens()
    patch = sagepatch.apply(model, variant=FAST)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        out = model.to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        assert out.isfinite().all()
    assert [layer.record.by_variant[FAST] for layer in patch.layers] == [3] * 4
    assert model.to("meta")(x.to("meta")).device.type == "meta"


def test_settling_is_told_to_those_who_ask(caplog) -> None:
    model, x = stack(1), tokens()
    with caplog.at_level("INFO", logger="sagepatch"):
        patch = sagepatch.apply(model, emulate=True)
        for _ in range(SAMPLED_CALLS[-1]):
            model(x)
    assert f"layer 0 runs {patch.layers[0].runs}: cosine" in caplog.text
    assert patch.layers[0].runs != SDPA.name


def test_a_restore_that_failed_halfway_can_be_taken_up_again() -> None:
    model, x = stack(), tokens()
    want = model(x)
    patch = sagepatch.apply(model, variant=FAST)
    whole = patch._swaps[1]
    tries = []

    def fail_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not now")
        whole.undo()

    patch._swaps[1] = replace(whole, undo=fail_once)
    with pytest.raises(RuntimeError, match="not now"):
        patch.restore()
    patch.restore()
    assert patch.restored
    assert torch.equal(model(x), want)
    assert all("_sagepatch_patch" not in module.__dict__ for module in model.modules())


def test_switching_off_takes_an_earlier_patch_back(monkeypatch) -> None:
    model, x = stack(), tokens()
    want = model(x)
    earlier = sagepatch.apply(model, variant=FAST)
    monkeypatch.setenv("SAGEPATCH_DISABLE", "1")
    sagepatch.apply(model, variant=FAST)
    assert earlier.restored
    assert torch.equal(model(x), want)


def test_a_kernel_on_a_gpu_that_no_test_ran_on_is_told_in_the_report() -> None:
    patch = sagepatch.apply(stack(), variant="exact")
    call = AttnSpec(1, 8, 8, 512, 512, 64, 64, "fp16", "fp16", "cuda", 89)
    assert not patch.report().warnings
    for layer in patch.layers:
        layer.record.ran(call, SDPA.name)
        layer.record.ran(call, "cuda_mma.sage2pp_8")
    said = "cuda_mma.sage2pp_8: compiled, arithmetic checked on sm_90, not yet run on sm_89"
    assert patch.report().warnings == (said,)


def test_a_threshold_has_to_be_a_finite_number() -> None:
    for threshold in (float("inf"), float("nan"), "high"):
        with pytest.raises(InvalidArgument, match="threshold"):
            sagepatch.apply(stack(), threshold=threshold)  # type: ignore[arg-type]


# A language model's cache makes every call of another length.
def test_an_account_of_calls_of_ever_new_lengths_stays_small() -> None:
    layer = PatchedLayer("l", "self", Policy(), Request("exact"), unusable)
    spec = AttnSpec(1, 2, 2, 1, 1, 8, 8, "fp32", "fp32", "cpu")
    for length in range(3 * MOST_SPECS):
        one = replace(spec, kv_len=length)
        layer.choose(one)
        layer.record.ran(one, "sdpa.exact")
    assert layer.record.calls == 3 * MOST_SPECS
    assert len(layer.record.specs) == MOST_SPECS
    assert len(layer._chosen) <= MOST_SPECS
