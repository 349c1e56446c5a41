"""Patches that follow a plan: given, kept from an earlier run, of another machine, stale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.layers import machine
from models.stacks import Block, stack, tokens
from torch import nn

import sagepatch
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import capture
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.capture import SAMPLED_CALLS
from sagepatch.env import Machine
from sagepatch.errors import PlanError

FAST = "emulated.sage2_8"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def calibrated(model: nn.Module, x: torch.Tensor) -> sagepatch.Patch:
    patch = sagepatch.apply(model, emulate=True)
    for _ in range(SAMPLED_CALLS[-1]):
        model(x)
    return patch


@pytest.fixture
def plan() -> sagepatch.Plan:
    return calibrated(stack(), tokens()).plan()


def test_save_load_and_follow(tmp_path: Path) -> None:
    model, x = stack(), tokens()
    patch = calibrated(model, x)
    out = model(x)
    patch.plan().save(tmp_path / "plan.json")
    patch.restore()
    again = sagepatch.apply(model, plan=tmp_path / "plan.json", emulate=True)
    assert again.locked
    assert torch.equal(model(x), out)
    assert again.plan() == patch.plan()


def test_the_plan_of_a_patch_names_what_its_layers_run(plan) -> None:
    model, x = stack(), tokens()
    patch = sagepatch.apply(model, variant="sage1_b", emulate=True)
    model(x)
    assert {e.variant for e in patch.plan().entries} == {"emulated.sage1_b"}
    patch.layers[1].demote("a test says so")
    assert patch.plan().entries[1].variant == SDPA.name
    assert "a test says so" in patch.plan().entries[1].reason
    strict = replace(plan, threshold=0.9)
    assert sagepatch.apply(model, plan=strict).plan().threshold == 0.9


def test_entries_carry_what_decided(plan) -> None:
    for entry in plan.entries:
        assert entry.samples == 4
        assert entry.shapes == ("2x2x70x70x32 fp32",)
        assert entry.worst_call in SAMPLED_CALLS
        assert entry.cosine <= entry.cosine_mean
        assert entry.max_abs_v > 0
        assert set(entry.alternatives) <= set(BY_NAME) - {entry.variant}


# case 60
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: stack(3), "that this model has not: 3"),
        (lambda: nn.Sequential(Block(64), Block(64)), "names 2 layers that this model has not"),
        (lambda: stack(5), "another model"),
        (lambda: nn.Sequential(nn.Identity(), *stack(3)), "that this model has not: 0"),
    ],
    ids=["fewer", "two", "more", "moved"],
)
def test_another_model_is_refused_and_left_untouched(plan, other, said: str) -> None:
    model = other()
    before = [set(m.__dict__) for m in model.modules()]
    with pytest.raises(PlanError, match=said):
        sagepatch.apply(model, plan=plan)
    assert [set(m.__dict__) for m in model.modules()] == before


def test_a_refused_plan_leaves_the_earlier_patch_in_force(plan) -> None:
    model, x = stack(3), tokens()
    first = sagepatch.apply(model, variant=FAST)
    want = model(x)
    with pytest.raises(PlanError):
        sagepatch.apply(model, plan=plan)
    assert not first.restored
    assert torch.equal(model(x), want)
    assert first.layers[0].record.by_variant == {FAST: 2}
    first.restore()
    assert not torch.equal(model(x), want)


def test_stale_entries_are_named_and_ignored(plan) -> None:
    model, x = stack(), tokens()
    entries = (replace(plan.entries[0], numerics_version=99), *plan.entries[1:])
    patch = sagepatch.apply(model, plan=replace(plan, entries=entries))
    model(x)
    rows = patch.report().layers
    assert (rows[0].tier, rows[1].tier) == ("exact", "fast")
    assert "numerics version 99" in rows[0].reason
    assert any(w.startswith("0: plan entry ignored") for w in patch.report().warnings)


def test_layers_that_a_plan_does_not_name_stay_exact(plan) -> None:
    patch = sagepatch.apply(stack(), plan=replace(plan, entries=plan.entries[1:]))
    rows = patch.report().layers
    assert (rows[0].variant, rows[0].reason) == (SDPA.name, "the plan does not name this layer")
    assert rows[1].tier == "fast"


# case 60
@pytest.mark.parametrize(
    ("x", "said"),
    [
        (tokens(560), "measured on 2x2x70x70x32 fp32, has also run 2x2x560x560x32 fp32"),
        (tokens().double(), "has also run 2x2x70x70x32 fp64"),
    ],
    ids=["shape", "dtype"],
)
def test_another_shape_or_dtype_is_used_and_warned_about_once(plan, x, said: str) -> None:
    model = stack().to(x.dtype)
    patch = sagepatch.apply(model, plan=plan)
    model(x)
    warnings = patch.report().warnings
    assert len(warnings) == 1
    assert said in warnings[0]
    assert "(and 3 more layers so)" in warnings[0]
    assert all(row.quantised_calls == 1 for row in patch.report().layers)


def test_another_batch_or_a_single_query_is_no_reason_to_warn(plan) -> None:
    model = stack()
    patch = sagepatch.apply(model, plan=plan)
    model(tokens(batch=5))
    model(tokens(1))
    assert patch.report().warnings == ()


def on_gpu(monkeypatch, name: str = "Fake GPU") -> None:
    fake = machine(name)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: fake))


class TestAnotherGpu:
    """A plan timed elsewhere keeps its accuracy and is timed again. The GPU is a CPU with a clock,
    its kernels are emulations under a Triton name.
    """

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch) -> None:
        on_gpu(monkeypatch)
        self.speeds = {"exact": 100.0, "quantised": 50.0}

        def us(watch, variant, given, spec, again=True, layer="") -> float:
            return self.speeds["exact" if variant is SDPA else "quantised"]

        monkeypatch.setattr(measuring.Stopwatch, "us", us)

        def tried(spec, layer, recipes=None, call=None):
            emulated = [v for v in BY_NAME.values() if v.toolchain == "emulated"]
            return [v for v in emulated if v.recipe.name in recipes]

        monkeypatch.setattr("sagepatch.calibration.reuse.candidate_variants", tried)

    def test_layers_are_timed_at_their_first_call(self, plan) -> None:
        model, x = stack(), tokens()
        patch = sagepatch.apply(model, plan=replace(plan, gpu="NVIDIA H200", emulated=False))
        assert not patch.locked
        assert any("timed on NVIDIA H200, this is Fake GPU" in w for w in patch.report().warnings)
        model(x)
        assert patch.locked
        for layer in patch.layers:
            assert layer.runs.startswith("emulated.")
            assert layer.record.by_variant == {layer.runs: 1}
        assert all(e.us_chosen == 50.0 and e.us_exact == 100.0 for e in patch.plan().entries)
        assert patch.plan().gpu == "Fake GPU"

    def test_where_quantising_is_slower_here_layers_stay_exact(self, plan) -> None:
        self.speeds["quantised"] = 101.0
        model, x = stack(), tokens()
        want = model(x)
        patch = sagepatch.apply(model, plan=replace(plan, gpu="NVIDIA H200", emulated=False))
        assert torch.equal(model(x), want)
        assert {layer.runs for layer in patch.layers} == {SDPA.name}

    def test_lock_takes_the_plan_as_it_is(self, plan) -> None:
        patch = sagepatch.apply(stack(), plan=replace(plan, gpu="NVIDIA H200", emulated=False))
        patch.lock()
        assert patch.locked

    def test_a_laptop_s_plan_is_no_emulation_on_a_gpu(self, plan) -> None:
        patch = sagepatch.apply(stack(), plan=replace(plan, gpu="CPU"))
        assert "the plan was emulated on CPU, this is Fake GPU" in patch.report().warnings[0]
        patch.lock()
        assert {BY_NAME[layer.runs].toolchain for layer in patch.layers} <= {
            "sdpa",
            "triton",
            "cuda",
        }

    def test_exact_layers_need_no_clock(self, plan) -> None:
        exact = [replace(e, variant=SDPA.name, alternatives={}) for e in plan.entries]
        there = replace(plan, gpu="NVIDIA H200", emulated=False, entries=tuple(exact))
        assert sagepatch.apply(stack(), plan=there).locked


def test_a_gpu_s_plan_can_be_rehearsed_on_a_laptop(plan) -> None:
    model, x = stack(), tokens()
    entries = tuple(
        replace(e, variant=f"triton.{e.variant.partition('.')[2]}") for e in plan.entries
    )
    there = replace(plan, gpu="NVIDIA H200", emulated=False, entries=entries)
    patch = sagepatch.apply(model, plan=there, emulate=True)
    model(x)
    assert all(layer.runs.startswith("emulated.") for layer in patch.layers)
    assert all(layer.record.by_variant == {layer.runs: 1} for layer in patch.layers)
    plain = sagepatch.apply(model, plan=there)
    want = stack()(x)
    assert torch.equal(model(x), want)
    assert all("device is cpu" in " ".join(layer.record.fallbacks) for layer in plain.layers)


class TestKept:
    """Plans kept between runs. The GPU is a CPU with a clock and emulations for kernels."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch) -> None:
        on_gpu(monkeypatch)

        def us(watch, variant, given, spec, again=True, layer="") -> float:
            return 100.0 if variant is SDPA else 50.0

        monkeypatch.setattr(measuring.Stopwatch, "us", us)
        monkeypatch.setattr(capture, "candidate_variants", lambda *given, **more: [BY_NAME[FAST]])

    def run(self, model, x, calls: int = SAMPLED_CALLS[-1], **options) -> sagepatch.Patch:
        patch = sagepatch.apply(model, **options)
        for _ in range(calls):
            model(x)
        return patch

    def files(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "cache" / "plans").glob("*.json"))

    def test_the_second_run_starts_from_the_first(self, tmp_path: Path) -> None:
        x = tokens().bfloat16()
        first = self.run(stack().bfloat16(), x)
        assert len(self.files(tmp_path)) == 1
        model = stack().bfloat16()
        second = sagepatch.apply(model)
        assert not second.locked
        model(x)
        assert second.locked
        assert all(layer.record.by_variant == {FAST: 1} for layer in second.layers)
        assert second.plan().entries == first.plan().entries
        assert all(row.reason.startswith("kept from") for row in second.report().layers)

    def test_unlike_calls_are_measured_anew(self, tmp_path: Path) -> None:
        self.run(stack().bfloat16(), tokens(70).bfloat16())
        model, x = stack().bfloat16(), tokens(300).bfloat16()
        want = model(x)
        second = sagepatch.apply(model)
        assert torch.equal(model(x), want)
        assert not second.locked
        for _ in range(SAMPLED_CALLS[-1] - 1):
            assert torch.equal(model(x), want)
        assert second.locked
        assert second.plan().entries[0].shapes == ("2x2x300x300x32 bf16",)

    def test_too_few_samples_are_not_kept(self, tmp_path: Path) -> None:
        patch = self.run(stack().bfloat16(), tokens().bfloat16(), calls=1)
        patch.lock()
        assert self.files(tmp_path) == []

    def test_layers_that_were_not_called_are_measured_when_they_are(self, tmp_path: Path) -> None:
        model, x = stack().bfloat16(), tokens().bfloat16()
        patch = sagepatch.apply(model)
        for _ in range(SAMPLED_CALLS[-1]):
            model[:3](x)
        assert not patch.locked
        assert len(self.files(tmp_path)) == 1
        again = stack().bfloat16()
        second = sagepatch.apply(again)
        again(x)
        assert [layer.runs for layer in second.layers] == [FAST] * 3 + [SDPA.name]
        assert second.layers[3].observer is not None

    @pytest.mark.parametrize("options", [{"threshold": 0.99}, {"emulate": True}], ids=str)
    def test_another_threshold_or_emulation_starts_afresh(self, options) -> None:
        self.run(stack().bfloat16(), tokens().bfloat16())
        model = stack().bfloat16()
        second = sagepatch.apply(model, **options)
        model(tokens().bfloat16())
        assert not second.locked

    def test_another_gpu_or_model_starts_afresh(self, monkeypatch) -> None:
        self.run(stack().bfloat16(), tokens().bfloat16())
        model = stack(3).bfloat16()
        second = sagepatch.apply(model)
        model(tokens().bfloat16())
        assert not second.locked
        on_gpu(monkeypatch, "Another GPU")
        model = stack().bfloat16()
        third = sagepatch.apply(model)
        model(tokens().bfloat16())
        assert not third.locked

    def test_keeping_can_be_switched_off(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("SAGEPATCH_CACHE_DIR", "")
        self.run(stack().bfloat16(), tokens().bfloat16())
        assert self.files(tmp_path) == []

    # Nothing about the cache may stop a run.
    @pytest.mark.parametrize("fault", ["damaged", "unwritable", "of others"])
    def test_a_faulty_cache_costs_the_plan_only(self, tmp_path, monkeypatch, caplog, fault) -> None:
        self.run(stack().bfloat16(), tokens().bfloat16())
        (kept,) = self.files(tmp_path)
        if fault == "damaged":
            kept.write_text("{")
        elif fault == "unwritable":
            blocked = tmp_path / "file"
            blocked.write_text("")
            monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(blocked / "cache"))
        else:
            monkeypatch.setattr("os.getuid", lambda: 123456789)
        model = stack().bfloat16()
        second = self.run(model, tokens().bfloat16())
        assert second.locked
        assert second.layers[0].record.by_variant == {SDPA.name: SAMPLED_CALLS[-1]}
        said = "\n".join(record.getMessage() for record in caplog.records)
        assert "a kept plan is not used" in said

    @pytest.mark.parametrize(
        "changes",
        [
            {"gpu": "NVIDIA H200"},
            {"threshold": 0.5},
            {"emulated": True},
            {"fingerprint": "f00d"},
            {"versions": {"torch": "2.11.0"}},
        ],
        ids=str,
    )
    def test_a_file_made_under_other_conditions_is_not_used(self, tmp_path, changes) -> None:
        self.run(stack().bfloat16(), tokens().bfloat16())
        (kept,) = self.files(tmp_path)
        kept.write_text(json.dumps({**json.loads(kept.read_text()), **changes}))
        second = self.run(stack().bfloat16(), tokens().bfloat16(), calls=1)
        assert [layer.observer is None for layer in second.layers] == [False] * 4

    def test_a_stale_entry_is_measured_again(self, tmp_path: Path) -> None:
        self.run(stack().bfloat16(), tokens().bfloat16())
        (kept,) = self.files(tmp_path)
        data = json.loads(kept.read_text())
        data["entries"][1]["numerics_version"] = 9
        kept.write_text(json.dumps(data))
        model = stack().bfloat16()
        second = sagepatch.apply(model)
        model(tokens().bfloat16())
        assert [layer.observer is None for layer in second.layers] == [True, False, True, True]


def test_on_a_cpu_nothing_is_kept(tmp_path: Path) -> None:
    model, x = stack(), tokens()
    sagepatch.apply(model)
    for _ in range(SAMPLED_CALLS[-1]):
        model(x)
    calibrated(model, x)
    assert not (tmp_path / "cache").exists()


# case 14
def test_a_single_query_is_exact_unless_a_kernel_was_named(plan) -> None:
    model = stack()
    want = model(tokens(1))
    patch = calibrated(model, tokens())
    assert torch.equal(model(tokens(1)), want)
    assert all(sum(layer.record.fallbacks.values()) == 1 for layer in patch.layers)
    sagepatch.apply(model, plan=plan, emulate=True, strict=True)
    assert torch.equal(model(tokens(1)), want)
    sagepatch.apply(model, variant=FAST)
    assert not torch.equal(model(tokens(1)), want)
