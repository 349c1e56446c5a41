"""Where in a schedule a call is made: read off pipelines of every kind, told, or unknown."""

from __future__ import annotations

import asyncio
import copy
import threading
import types
from collections.abc import Iterator
from types import SimpleNamespace

import diffusers
import pytest
import torch
from models.diffusers_pipelines import (
    tiny_flux_pipeline,
    tiny_sdxl_pipeline,
    tiny_wan_pipeline,
)

from sagepatch import schedule
from sagepatch.errors import InvalidArgument
from sagepatch.schedule import Place, Schedule, fraction, running_step


class Pipeline:
    """A loop as diffusers writes them."""

    def __init__(self, timesteps: torch.Tensor, seen: list) -> None:
        self.scheduler = SimpleNamespace(timesteps=timesteps)
        self.seen = seen

    def denoise(self) -> None:
        """What a denoiser's layers do, a few calls further down."""
        self.seen.append(running_step())

    def __call__(self, first: int = 0, copied: bool = False) -> list:
        timesteps = self.scheduler.timesteps[first:]
        if copied:
            timesteps = timesteps.clone()
        self.denoise()
        for _, t in enumerate(timesteps):
            t.expand(2)
            self.denoise()
        return self.seen


def test_a_fraction_is_0_in_the_first_step_and_1_in_the_last() -> None:
    assert [Place(step, 3).at for step in range(3)] == [0, 0.5, 1]
    assert fraction(0, 1) == 0


# Once wrong: the outer loop was looked up in the inner one's timesteps, by value.
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loop_goes_on_where_it_was_after_one_that_set_its_scheduler_anew(named, mode) -> None:
    seen: list = []

    class Nesting:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(timesteps=None)

        def __call__(self, steps: int, inner: int) -> None:
            self.scheduler.timesteps = torch.linspace(1000, 0, steps)
            if named:
                timesteps = self.scheduler.timesteps
                for t in timesteps:
                    self.step(int(t), inner)
            else:
                for t in self.scheduler.timesteps:
                    self.step(int(t), inner)

        def step(self, at: int, inner: int) -> None:
            if at == 500 and inner:
                self(inner, 0)
            seen.append(running_step())

    with mode():
        Nesting()(5, 9)
    outer = [seen[at] for at in (0, 1, 11, 12, 13)]
    known = [Place(step, 5) for step in range(5)]
    if named or mode is torch.no_grad:
        assert outer == known
    else:
        # Nothing tells whose element the timestep is: unknown, not another loop's.
        assert outer == [*known[:2], None, None, None]
    assert seen[2:11] == [Place(step, 9) for step in range(9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_step_of_a_loop(dtype) -> None:
    # A schedule may name a timestep twice (PNDM does).
    timesteps = torch.tensor([999, 500, 500, 1]).to(dtype)
    seen = Pipeline(timesteps, [])()
    assert seen == [None, Place(0, 4), Place(1, 4), Place(2, 4), Place(3, 4)]
    assert running_step() is None


def test_a_loop_that_starts_late_is_where_its_noise_is() -> None:
    seen = Pipeline(torch.linspace(1, 0, 10), [])(first=6)
    assert seen[1:] == [Place(step, 10) for step in range(6, 10)]


def test_a_loop_over_a_copy_is_found_too() -> None:
    assert Pipeline(torch.linspace(1, 0, 3), [])(copied=True)[1:] == [
        Place(step, 3) for step in range(3)
    ]


def test_numbers_are_found_by_their_value() -> None:
    class Numbers(Pipeline):
        def __call__(self) -> list:
            for t in [*self.scheduler.timesteps.tolist(), 12345.0]:
                assert t is not None
                self.denoise()
            return self.seen

    seen = Numbers(torch.tensor([3.0, 2.0, 1.0]), [])()
    assert seen == [Place(0, 3), Place(1, 3), Place(2, 3), None]


def test_modular_blocks_hold_their_scheduler_in_components() -> None:
    class Block:
        def __call__(self, components, timesteps, seen) -> None:
            for t in timesteps:
                assert t is not None
                seen.append(running_step())

    timesteps, seen = torch.tensor([2.0, 1.0]), []
    held = SimpleNamespace(scheduler=SimpleNamespace(timesteps=timesteps))
    Block()(held, timesteps, seen)
    assert seen == [Place(0, 2), Place(1, 2)]


def test_what_only_looks_like_a_loop_is_none() -> None:
    class Module:
        scheduler = None

        def __call__(self):
            t = 3
            assert t
            return running_step()

    assert Module()() is None
    with_one = Module()
    for timesteps in (None, 5, torch.zeros(2, 2)):
        with_one.scheduler = SimpleNamespace(timesteps=timesteps)
        assert with_one() is None


def test_the_innermost_loop_counts() -> None:
    inner = Pipeline(torch.tensor([2.0, 1.0]), [])

    class Outer(Pipeline):
        def denoise(self) -> None:
            self.seen += inner()[-2:]

    seen = Outer(torch.arange(5.0), [])()
    assert seen[-2:] == [Place(0, 2), Place(1, 2)]


# case 50
def test_threads_do_not_see_each_other() -> None:
    shared: dict[int, list] = {}
    together = threading.Barrier(4)

    def run(number: int) -> None:
        together.wait()
        shared[number] = Pipeline(torch.arange(6.0), [])(first=number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, seen in shared.items():
        assert seen[1:] == [Place(step, 6) for step in range(number, 6)]


def test_a_step_can_be_told_to_one_thread() -> None:
    one, elsewhere = Schedule(), []
    assert one.place() is None
    with one.at(2, 8):
        assert one.place() == Place(2, 8)
        thread = threading.Thread(target=lambda: elsewhere.append(one.place()))
        thread.start()
        thread.join()
        with one.at(3, 8):
            assert one.place() == Place(3, 8)
        assert one.place() == Place(2, 8)
        assert Schedule().place() is None
    assert one.place() is None
    assert elsewhere == [None]
    with pytest.raises(ZeroDivisionError), one.at(0, 1):
        1 / 0  # noqa: B018
    assert one.place() is None


@pytest.mark.parametrize(("step", "steps"), [(-1, 5), (5, 5), (0, 0)])
def test_a_step_outside_its_schedule_is_refused(step: int, steps: int) -> None:
    with (
        pytest.raises(InvalidArgument, match=f"step {step} of {steps}"),
        Schedule().at(step, steps),
    ):
        pass


def test_what_is_remembered_of_code_stays_small(monkeypatch) -> None:
    monkeypatch.setattr(schedule, "_MOST_CODES", 4)
    for number in range(20):
        scope: dict = {}
        exec(f"def f{number}(): return running_step()", {"running_step": running_step}, scope)
        assert scope[f"f{number}"]() is None
    assert len(schedule._CODES) <= 4 + 1


def steps_of(pipe, parts: list[str], run) -> list[tuple[str, int, int]]:
    """The part, step and step count of every call of these parts of a pipeline."""
    seen: list = []

    def look(part: str):
        def hook(*_) -> None:
            place = running_step()
            seen.append(None if place is None else (part, place.step, place.steps))

        return getattr(pipe, part).register_forward_pre_hook(hook)

    hooks = [look(part) for part in parts]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return seen


SCHEDULERS = {
    "EulerDiscreteScheduler": 4,
    "EulerAncestralDiscreteScheduler": 4,
    "DPMSolverMultistepScheduler": 4,
    "UniPCMultistepScheduler": 4,
    "DDIMScheduler": 4,
    "DDPMScheduler": 4,
    "LCMScheduler": 4,
    # Two model calls a step, each an entry of its schedule.
    "HeunDiscreteScheduler": 7,
    # Repeats its second step.
    "PNDMScheduler": 5,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_kind_of_scheduler_and_guidance_in_one_batch(name: str) -> None:
    pipe = tiny_sdxl_pipeline()
    options = {"skip_prk_steps": True} if name == "PNDMScheduler" else {}
    pipe.scheduler = getattr(diffusers, name)(**options)
    picture = {"height": 32, "width": 32, "output_type": "latent", "guidance_scale": 5.0}
    for _ in range(2):
        seen = steps_of(pipe, ["unet"], lambda: pipe("a cat", num_inference_steps=4, **picture))
        count = SCHEDULERS[name]
        assert seen == [("unet", step, count) for step in range(count)]


def test_a_picture_to_start_from_and_a_pipeline_that_shares_the_model() -> None:
    pipe = tiny_sdxl_pipeline()
    other = diffusers.StableDiffusionXLImg2ImgPipeline(
        **{**pipe.components, "scheduler": diffusers.DDIMScheduler()}
    )
    other.set_progress_bar_config(disable=True)
    start = torch.zeros(1, 3, 32, 32)
    seen = steps_of(
        pipe,
        ["unet"],
        lambda: other(
            "a cat", image=start, strength=0.5, num_inference_steps=8, output_type="latent"
        ),
    )
    assert seen == [("unet", step, 8) for step in range(4, 8)]


# Guidance in two calls a step, and one expert for the noisy steps, another for the rest.
def test_two_experts_share_one_schedule() -> None:
    pipe = tiny_wan_pipeline()
    both = {
        **pipe.components,
        "transformer_2": copy.deepcopy(pipe.transformer),
        "boundary_ratio": 0.9,
    }
    two = diffusers.WanPipeline(**both)
    two.set_progress_bar_config(disable=True)
    seen = steps_of(
        two,
        ["transformer", "transformer_2"],
        lambda: two(
            *("a cat", "nothing"),
            **{"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 4},
            output_type="latent",
        ),
    )
    assert [(step, count) for _, step, count in seen] == [(n // 2, 4) for n in range(8)]
    parts = [part for part, _, _ in seen]
    assert parts == sorted(parts)
    assert set(parts) == {"transformer", "transformer_2"}


# case 50
def test_two_threads_of_one_model_are_each_at_their_own_step() -> None:
    pipe = tiny_flux_pipeline()
    found: dict[int, list] = {}
    seen = threading.local()

    def hook(*_) -> None:
        seen.places.append(running_step())

    handle = pipe.transformer.register_forward_pre_hook(hook)

    def run(steps: int) -> None:
        seen.places = []
        mine = diffusers.FluxPipeline(
            **{**pipe.components, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
        )
        mine.set_progress_bar_config(disable=True)
        picture = {"height": 16, "width": 16, "output_type": "latent", "max_sequence_length": 8}
        with torch.no_grad():
            mine("a cat", num_inference_steps=steps, **picture)
        found[steps] = seen.places

    threads = [threading.Thread(target=run, args=(steps,)) for steps in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    assert found == {n: [Place(step, n) for step in range(n)] for n in (3, 5, 7)}


def test_tasks_and_generators_that_take_turns_do_not_mix() -> None:
    schedule = Schedule()
    seen = []

    async def task(steps: int) -> None:
        for step in range(2):
            with schedule.at(step, steps):
                await asyncio.sleep(0)
                seen.append((steps, schedule.place()))

    async def both() -> None:
        await asyncio.gather(task(2), task(3))

    asyncio.run(both())
    assert all(place is not None and place.steps == steps for steps, place in seen)

    def loop(steps: int) -> Iterator[None]:
        with schedule.at(0, steps):
            yield

    first, second = loop(2), loop(3)
    next(first)
    next(second)
    list(first)  # the one that came first leaves first
    assert schedule.place() == Place(0, 3)
    list(second)
    assert schedule.place() is None


def test_a_schedule_spread_over_one_number_is_no_error() -> None:
    class Owner:
        def __init__(self) -> None:
            self.scheduler = types.SimpleNamespace(timesteps=torch.tensor(9.0).expand(3))

        def run(self) -> Place | None:
            for t in self.scheduler.timesteps:
                return running_step() if t is not None else None
            return None

    assert Owner().run() == Place(0, 3)
