"""Cases of practice: bad layers and steps, and what a calibration costs, on tiny models."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from models.diffusers_pipelines import tiny_flux_pipeline, tiny_wan_pipeline
from models.stacks import stack, tokens

import sagepatch
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration import candidates, statistics
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.timing import CallTime
from sagepatch.plan import Plan

PICTURE = {"height": 16, "width": 16, "output_type": "latent", "max_sequence_length": 8}
FILM = {"height": 64, "width": 64, "num_frames": 5, "output_type": "latent"}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _every_step(monkeypatch):
    """Tiny models take no time that could pay for measuring."""
    from sagepatch.calibration import pace
    from sagepatch.calibration.sections import sampled_steps

    monkeypatch.setattr(
        pace, "_admits", lambda walk, place, held: place.step in sampled_steps(place.steps)
    )


def spoil(attention, factor: float = 20.0) -> None:
    """Query and key weights `factor` times as large, keys with an offset: an ill layer."""
    for name in ("to_q", "to_k"):
        getattr(attention, name).weight.mul_(factor)
    if getattr(attention, "norm_q", None) is not None:
        attention.norm_q.weight.mul_(factor)
        attention.norm_k.weight.mul_(factor)
    generator = torch.Generator().manual_seed(5)
    bias = attention.to_k.bias
    attention.to_k.bias.add_(8.0 * torch.randn(bias.shape, generator=generator))


# case 31
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_bad_layer_goes_to_what_is_safe_and_the_others_stay_fast(family: str, tmp_path) -> None:
    if family == "flux":
        pipe = tiny_flux_pipeline()
        bad = pipe.transformer.transformer_blocks[1].attn
        run = lambda: pipe("a cat", num_inference_steps=8, **PICTURE)  # noqa: E731
    else:
        pipe = tiny_wan_pipeline()
        bad = pipe.transformer.blocks[1].attn1
        run = lambda: pipe("a cat", "bad", num_inference_steps=8, **FILM)  # noqa: E731
    name = next(
        f"transformer.{path}" for path, module in pipe.transformer.named_modules() if module is bad
    )
    spoil(bad, 20.0 if family == "flux" else 8.0)
    table = sagepatch.calibrate(pipe, run=run, emulate=True)
    layer = next(one for one in table.layers if one.site == name)
    plan = table.plan(0.999)
    entry = next(one for one in plan.entries if one.site == name)
    worst = min(layer.candidates["emulated.sage2_8"].cosine for layer in table.layers)
    assert layer.candidates["emulated.sage2_8"].cosine == worst
    assert entry.variant != "emulated.sage2_8"
    others = [one for one in plan.entries if one.site != name]
    assert sum(one.variant.startswith("emulated.sage2") for one in others) >= len(others) - 1
    # Which step decided, and why.
    assert "(step " in entry.reason
    assert entry.remedy is not None
    assert entry.q_outlier is not None
    plan.save(tmp_path / "plan.json")
    with sagepatch.apply(pipe, plan=Plan.load(tmp_path / "plan.json"), emulate=True) as patch:
        run()
    report = patch.report()
    row = next(one for one in report.layers if one.name == name)
    assert "refused" in row.reason or "accurate enough" in row.reason


class Loop:
    """A denoising loop as diffusers writes them, whose first step has inputs of another size."""

    def __init__(self, model) -> None:
        self.model = model
        self.scheduler = SimpleNamespace()

    def __call__(self, steps: int) -> None:
        self.scheduler.timesteps = torch.linspace(1, 0.1, steps)
        for i, t in enumerate(self.scheduler.timesteps):
            assert t > 0
            self.model(tokens() * (30.0 if i == 0 else 1.0))


# case 31
def test_a_bad_step_is_pinned_and_the_plan_fits_another_number_of_steps() -> None:
    model = stack(2)
    loop = Loop(model)
    table = sagepatch.calibrate(model, run=lambda: [loop(12), loop(12)], emulate=True)
    layer = table.layers[0]
    at = {row.step: row.errors["emulated.sage2_8"].worst.cosine for row in layer.rows}
    assert min(at, key=at.get) == 0
    others = min(cosine for step, cosine in at.items() if step != 0)
    threshold = (at[0] + others) / 2
    plan = table.plan(threshold)
    first, *rest = plan.entries[0].ranges
    assert first.end == 1 / 32
    assert first.variant != "emulated.sage2_8"
    assert "step 1 of 12" in first.reason
    assert table.plan(threshold, by_step=False).entries[0].ranges == ()
    for steps in (4, 20):
        with sagepatch.apply(model, plan=plan, emulate=True) as patch:
            loop(steps)
        counts = patch.layers[0].record.by_variant
        assert counts[first.variant] == 1
        assert counts[rest[0].variant] == steps - 1


# case 58
def test_a_calibration_holds_one_candidate_at_a_time_and_keeps_no_tensor(monkeypatch) -> None:
    alive: list[weakref.ref] = []
    most = 0
    original = measuring.load

    def watching(entry: str):
        kernel = original(entry)

        def run(call, recipe):
            nonlocal most
            out, lse = kernel(call, recipe)
            alive[:] = [ref for ref in alive if ref() is not None]
            alive.append(weakref.ref(out))
            most = max(most, len(alive))
            return out, lse

        return run

    monkeypatch.setattr(measuring, "load", watching)
    # Of each candidate only a sample of rows outlives it.
    monkeypatch.setattr(measuring, "COMPARED_ROWS", 16)
    model, x = stack(2), tokens()
    table = sagepatch.calibrate(model, run=lambda: [model(x) for _ in range(4)], emulate=True)
    assert most == 1
    assert all(ref() is None for ref in alive)
    assert {layer.samples for layer in table.layers} == {3}


# case 58
def test_what_looks_at_a_long_call_looks_at_a_part_of_it(monkeypatch) -> None:
    sizes: list[int] = []
    for module, name in ((measuring, "compare"), (statistics, "_row_entropies")):
        original = getattr(module, name)

        def spy(first, *rest, original=original):
            sizes.append((first if isinstance(first, torch.Tensor) else first.q).shape[2])
            return original(first, *rest)

        monkeypatch.setattr(module, name, spy)
    model, x = stack(1), tokens(length=3000, batch=1)
    table = sagepatch.calibrate(model, run=lambda: [model(x), model(x)], emulate=True)
    assert table.layers[0].samples == 2
    assert max(sizes) <= measuring.EMULATED_RUNS * measuring.EMULATED_ROWS


# case 67
def test_a_layer_whose_kernels_are_slower_than_exact_stays_exact_and_says_so(monkeypatch) -> None:
    from dataclasses import replace

    from sagepatch.backends.catalogue import BY_NAME

    # What a CPU makes of a GPU's kernel: it runs, and a clock times it.
    real = replace(BY_NAME["emulated.sage2_8"], toolchain="triton")
    monkeypatch.setattr(candidates, "CATALOGUE", (real,))
    monkeypatch.setattr(candidates, "wide_stays_exact", lambda *_: None)
    monkeypatch.setattr(candidates, "failure", lambda variant, gpu: None)
    times = iter([100.0, 150.0] * 100)
    monkeypatch.setitem(measuring.TIMERS, "cpu", lambda *_: CallTime(next(times), 0.0))
    model, x = stack(1), tokens()
    table = sagepatch.calibrate(model, run=lambda: [model(x), model(x)])
    (entry,) = table.plan(0.9).entries
    assert entry.variant == SDPA.name
    assert entry.reason.startswith("exact is fastest: 1")
