"""Plans that differ over the denoising schedule, in force: every step runs what its plan says."""

from __future__ import annotations

import threading
from dataclasses import replace

import diffusers
import pytest
import torch
from models.diffusers_pipelines import tiny_flux_pipeline
from models.layers import layer
from models.stacks import stack, tokens
from torch._dynamo.testing import CompileCounter

import sagepatch
from sagepatch import layer as layers
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.dispatch import Request
from sagepatch.layer import GRAPHED, UNPLACED
from sagepatch.plan import Plan, PlanEntry, PlanRange
from sagepatch.spec import AttnSpec

FAST, SAFE = "emulated.sage2_8", "emulated.sage1_b"
PICTURE = {"height": 16, "width": 16, "output_type": "latent", "max_sequence_length": 8}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def parts(*pairs: tuple[float, str]) -> tuple[PlanRange, ...]:
    starts = (0.0, *(end for end, _ in pairs))
    return tuple(
        PlanRange(start, end, name, BY_NAME[name].numerics_version, "asked for")
        for start, (end, name) in zip(starts, pairs, strict=False)
    )


def stepwise(patch, *pairs: tuple[float, str], safest: str = SDPA.name) -> Plan:
    """A plan of these ranges for every layer of a patch."""
    plan = patch.plan()
    entries = tuple(
        replace(
            PlanEntry(entry.site, entry.kind, safest, BY_NAME[safest].numerics_version, "test"),
            ranges=parts(*pairs),
        )
        for entry in plan.entries
    )
    return replace(plan, entries=entries)


def followed(model, *pairs, **changes):
    """A model that follows such a plan."""
    with sagepatch.apply(model, variant="exact") as patch:
        plan = stepwise(patch, *pairs, **changes)
    return sagepatch.apply(model, plan=plan, emulate=True)


FIRST_AND_LAST = ((1 / 32, SDPA.name), (31 / 32, FAST), (1.0, SAFE))


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_a_pipeline_runs_each_step_as_planned(steps: int) -> None:
    pipe = tiny_flux_pipeline()
    patch = followed(pipe, *FIRST_AND_LAST)
    pipe("a cat", num_inference_steps=steps, **PICTURE)
    want = {SDPA.name: 1, SAFE: min(1, steps - 1), FAST: max(0, steps - 2)}
    for one in patch.layers:
        assert dict(one.record.by_variant) == {name: n for name, n in want.items() if n}
        assert one.unplaced == 0
        assert one.record.notes == []
    assert patch.report().warnings == ()


def test_what_a_layer_runs_is_what_served_it_most() -> None:
    pipe = tiny_flux_pipeline()
    patch = followed(pipe, *FIRST_AND_LAST)
    assert {one.runs for one in patch.layers} == {SDPA.name}
    pipe("a cat", num_inference_steps=6, **PICTURE)
    assert {one.runs for one in patch.layers} == {FAST}


def test_without_a_schedule_the_most_accurate_kernel_runs_and_the_report_says_so() -> None:
    model, x = stack(), tokens()
    patch = followed(model, (0.5, SAFE), (1.0, FAST), safest=SAFE)
    model(x)
    model(x)
    for one in patch.layers:
        assert dict(one.record.by_variant) == {SAFE: 2}
        assert one.record.notes == [UNPLACED]
    (told,) = patch.report().warnings
    assert told.startswith(f"8 calls of 4 layers: {UNPLACED[:40]}")


def test_a_loop_of_one_s_own_tells_its_steps() -> None:
    model, x = stack(), tokens()
    patch = followed(model, *FIRST_AND_LAST)
    for step in range(5):
        with patch.at(step, 5):
            model(x)
    assert dict(patch.layers[0].record.by_variant) == {SDPA.name: 1, FAST: 3, SAFE: 1}
    assert patch.report().warnings == ()


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_model_follows_the_steps_without_another_graph(backend: str) -> None:
    pipe = tiny_flux_pipeline()
    patch = followed(pipe, *FIRST_AND_LAST)
    pipe("a cat", num_inference_steps=5, **PICTURE)
    want = [dict(one.record.by_variant) for one in patch.layers]
    torch._dynamo.reset()
    counter = CompileCounter() if backend == "eager" else backend
    whole = pipe.transformer
    pipe.transformer = torch.compile(whole, backend=counter)
    for one in patch.layers:
        one.record = layers.Record()
    pipe("a cat", num_inference_steps=5, **PICTURE)
    assert [dict(one.record.by_variant) for one in patch.layers] == want
    if backend == "eager":
        assert counter.frame_count == 1
    torch._dynamo.reset()


# case 50
def test_threads_are_each_at_their_own_step() -> None:
    pipe = tiny_flux_pipeline()
    patch = followed(pipe, (0.5, SAFE), (1.0, FAST), safest=SAFE)
    wants, gots = {}, {}
    # Tokenizers keep state between calls: they are not for several threads.
    text, pooled, _ = pipe.encode_prompt("a cat", "a cat", max_sequence_length=8)

    def draw(steps: int):
        mine = diffusers.FluxPipeline(
            **{**pipe.components, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
        )
        mine.set_progress_bar_config(disable=True)
        with torch.no_grad():
            return mine(
                prompt_embeds=text,
                pooled_prompt_embeds=pooled,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(0),
                **PICTURE,
            ).images

    counts = (2, 3, 4)
    for steps in counts:
        wants[steps] = draw(steps)
    threads = [threading.Thread(target=lambda n=n: gots.__setitem__(n, draw(n))) for n in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(gots[n], wants[n]) for n in counts)
    assert {one.unplaced for one in patch.layers} == {0}


def test_a_captured_graph_holds_the_most_accurate_kernel(monkeypatch) -> None:
    one = layer()
    one.unusable = lambda variant: None
    names = ("triton.sage2_8", "triton.sage1_b")
    split = ((0.5, Request(names[0])), (1.0, Request(names[1])))
    one.run_with(Request(names[1]), "test", planned=True, parts=split)
    monkeypatch.setattr(layers, "failure", lambda variant, gpu: None)
    spec = AttnSpec(1, 24, 24, 4608, 4608, 128, 128, "bf16", "bf16", "cuda", 90)
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with one.schedule.at(0, 8):
        assert one.choose(spec)[0].name == names[1]
        assert one.record.notes == [GRAPHED]
        capturing = False
        assert one.choose(spec)[0].name == names[0]
    with one.schedule.at(7, 8):
        assert one.choose(spec)[0].name == names[1]
    assert one.unplaced == 0


def test_a_demoted_layer_is_exact_in_every_step() -> None:
    model, x = stack(1), tokens()
    patch = followed(model, *FIRST_AND_LAST)
    patch.layers[0].demote("test")
    for step in range(4):
        with patch.at(step, 4):
            model(x)
    assert dict(patch.layers[0].record.by_variant) == {SDPA.name: 4}


def test_single_queries_stay_exact_in_every_step() -> None:
    model = stack(1)
    patch = followed(model, *FIRST_AND_LAST)
    with patch.at(2, 5):
        model(tokens(length=1))
    assert dict(patch.layers[0].record.by_variant) == {SDPA.name: 1}
    assert patch.layers[0].record.fallbacks == {layers.SHORT: 1}


def test_a_gpu_s_stepwise_plan_is_emulated_on_a_laptop(monkeypatch) -> None:
    model, x = stack(1), tokens()
    with sagepatch.apply(model, variant="exact") as patch:
        plan = stepwise(patch, (0.5, "triton.sage1_b"), (1.0, "triton.sage2_8"))
    plan = replace(plan, gpu="NVIDIA H200")
    patch = sagepatch.apply(model, plan=plan, emulate=True)
    for step in range(4):
        with patch.at(step, 4):
            model(x)
    assert dict(patch.layers[0].record.by_variant) == {SAFE: 2, FAST: 2}


def test_an_entry_with_one_outdated_range_is_not_followed() -> None:
    model = stack(1)
    with sagepatch.apply(model, variant="exact") as patch:
        plan = stepwise(patch, *FIRST_AND_LAST)
    (entry,) = plan.entries
    old = (*entry.ranges[:2], replace(entry.ranges[2], numerics_version=99))
    plan = replace(plan, entries=(replace(entry, ranges=old),))
    patch = sagepatch.apply(model, plan=plan, emulate=True)
    assert patch.layers[0].parts == ()
    assert patch.layers[0].request == Request("exact")
    assert any("numerics version 99" in warning for warning in patch.report().warnings)


def test_the_plan_of_a_patch_that_follows_one_is_that_plan() -> None:
    model = stack(2)
    with sagepatch.apply(model, variant="exact") as patch:
        plan = stepwise(patch, *FIRST_AND_LAST)
    patch = sagepatch.apply(model, plan=plan, emulate=True)
    assert patch.plan().entries == plan.entries
