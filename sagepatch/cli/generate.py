"""One generation of a loaded model: pictures, video frames or text, from one seed, with a progress
bar.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress

from sagepatch.cli.console import err
from sagepatch.cli.loading import Loaded
from sagepatch.errors import ModelError

TEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What to generate; None leaves the model's own default."""

    prompt: str
    seed: int = 0
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    guidance: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """Frames of a picture (one) or a video (many), or a text."""

    frames: tuple[Any, ...] = ()
    text: str | None = None


def settings_for(
    loaded: Loaded,
    prompt: str,
    *,
    seed: int,
    steps: int | None,
    height: int | None,
    width: int | None,
    frames: int | None,
) -> Settings:
    """The user's wishes over the preset's (or the demo's) defaults."""
    preset = loaded.preset
    if loaded.name == "demo":
        from sagepatch.demo import DEFAULTS

        return Settings(
            prompt,
            seed,
            steps or DEFAULTS.num_inference_steps,
            height or DEFAULTS.height,
            width or DEFAULTS.width,
            None,
            DEFAULTS.guidance_scale,
            {"max_sequence_length": DEFAULTS.max_sequence_length},
        )
    if preset is None:
        return Settings(prompt, seed, steps, height, width, frames)
    return Settings(
        prompt,
        seed,
        steps or preset.steps,
        height or preset.height,
        width or preset.width,
        frames or preset.frames,
        preset.guidance,
    )


def generate(loaded: Loaded, settings: Settings, title: str) -> Result:
    """Run the model once; the same settings give the same result."""
    if loaded.is_text:
        return _text(loaded, settings)
    pipe = loaded.model
    takes = inspect.signature(pipe.__call__).parameters
    wishes = {
        "prompt": settings.prompt,
        "num_inference_steps": settings.steps,
        "height": settings.height,
        "width": settings.width,
        "num_frames": settings.frames,
        "guidance_scale": settings.guidance,
        "generator": torch.Generator("cpu").manual_seed(settings.seed),
        **settings.extra,
    }
    arguments = {name: value for name, value in wishes.items() if value is not None}
    unknown = [name for name in arguments if name not in takes]
    if "prompt" in unknown:
        raise ModelError(f"{type(pipe).__name__} takes no prompt; use sagepatch.apply in a script")
    for name in unknown:
        del arguments[name]
    with Progress(console=err(), transient=True) as progress:
        bar = progress.add_task(title, total=settings.steps)
        if "callback_on_step_end" in takes:
            pipe.set_progress_bar_config(disable=True)

            def step(_pipe: Any, _index: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
                progress.advance(bar)
                return values

            arguments["callback_on_step_end"] = step
        output = pipe(**arguments)
    return Result(_frames(output, type(pipe).__name__))


def _frames(output: Any, name: str) -> tuple[Any, ...]:
    images = getattr(output, "images", None)
    if images is not None:
        return (images[0],)
    frames = getattr(output, "frames", None)
    if frames is not None:
        return tuple(frames[0])
    raise ModelError(f"{name} returns neither images nor frames; use sagepatch.apply in a script")


def _text(loaded: Loaded, settings: Settings) -> Result:
    tokens = loaded.tokenizer(settings.prompt, return_tensors="pt").to(loaded.model.device)
    with torch.inference_mode():
        ids = loaded.model.generate(
            **tokens, max_new_tokens=settings.steps or TEXT_TOKENS, do_sample=False
        )
    return Result(text=loaded.tokenizer.decode(ids[0], skip_special_tokens=True))
