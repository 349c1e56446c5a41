"""One generation: a pipeline draws pictures or frames, a language model writes; as plain values."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sagepatch.cli.console import Step
from sagepatch.cli.loading import LanguageModel
from sagepatch.errors import InvalidArgument, ModelError
from sagepatch.report.pictures import Frame, frame

NEW_TOKENS = 64
DEFAULT_FPS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. `options` are arguments of the pipeline's call, those of the preset under
    those that the user gave; `tokens`, None for the usual number, is for language models.
    """

    prompt: str
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None

    def shortened(self) -> Job:
        """The same job with the fewest steps that still call every layer."""
        return replace(self, options={**self.options, "num_inference_steps": 1}, tokens=2)


@dataclass(frozen=True, slots=True)
class Made:
    """What one generation gave: frames of pictures or a video, or text, and how long it took."""

    frames: tuple[Frame, ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()
    is_video: bool = False
    seconds: float = 0.0


def patched_part(loaded: Any) -> Any:
    """What sagepatch patches: the pipeline, or the model without its tokenizer."""
    return loaded.model if isinstance(loaded, LanguageModel) else loaded


def check(loaded: Any, job: Job) -> None:
    """Refuse options that this pipeline's call does not take, before anything runs."""
    if isinstance(loaded, LanguageModel):
        odd = sorted(set(job.options))
        if odd:
            raise InvalidArgument(f"a language model takes no {', '.join(odd)}; see --tokens")
        return
    if job.tokens is not None:
        raise InvalidArgument(no_tokens(type(loaded).__name__))
    taken = _parameters(loaded)
    if "prompt" not in taken:
        raise ModelError(f"{type(loaded).__name__} takes no prompt: use it from Python")
    odd = [name for name in job.options if name not in taken]
    if odd:
        raise InvalidArgument(f"{type(loaded).__name__} takes no {', '.join(odd)}")


def no_tokens(name: str) -> str:
    """Why a pipeline does not take --tokens."""
    return f"{name} writes no text: --tokens is for language models"


def prepare(loaded: Any, job: Job) -> None:
    """Let a language model read the first half of the prompt, so that its layers, which see each
    prompt in one call, can be measured on two different calls. Pipelines repeat their calls anyway.
    """
    if not isinstance(loaded, LanguageModel):
        return
    ids = _encode(loaded, job.prompt)["input_ids"]
    with torch.no_grad():
        loaded.model(input_ids=ids[:, : max(1, ids.shape[1] // 2)])


def generate(loaded: Any, job: Job, step: Step) -> Made:
    """Run one generation from the job's seed; the same job gives the same result."""
    started = time.perf_counter()
    write_or_draw = _write if isinstance(loaded, LanguageModel) else _draw
    made = write_or_draw(loaded, job, step)
    return replace(made, seconds=time.perf_counter() - started)


def _parameters(pipeline: Any) -> set[str]:
    return set(inspect.signature(type(pipeline).__call__).parameters)


def _draw(pipeline: Any, job: Job, step: Step) -> Made:
    taken = _parameters(pipeline)
    options = dict(job.options)

    def report(pipe: Any, index: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        step(index + 1, int(pipe.num_timesteps))
        return values

    if "callback_on_step_end" in taken:
        options["callback_on_step_end"] = report
    if "generator" in taken:
        options["generator"] = torch.Generator("cpu").manual_seed(job.seed)
    if "output_type" in taken:
        options["output_type"] = "pil"
    made = pipeline(prompt=job.prompt, **options)
    video = getattr(made, "frames", None)
    if video is not None:
        return Made(frames=tuple(frame(one) for one in video[0]), is_video=True)
    images = getattr(made, "images", None)
    if images is None:
        raise ModelError(f"{type(pipeline).__name__} gave no pictures and no frames")
    return Made(frames=tuple(frame(one) for one in images))


def _encode(loaded: LanguageModel, prompt: str) -> Any:
    inputs = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise InvalidArgument("the prompt holds no token")
    return inputs


def _write(loaded: LanguageModel, job: Job, step: Step) -> Made:
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = _encode(loaded, job.prompt)
    given = inputs["input_ids"].shape[1]
    wanted_tokens = NEW_TOKENS if job.tokens is None else job.tokens

    def after_each_token(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        step(ids.shape[1] - given, wanted_tokens)
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    from transformers import StoppingCriteriaList

    torch.manual_seed(job.seed)
    wanted = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    out = model.generate(
        **wanted,
        max_new_tokens=wanted_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([after_each_token]),
    )
    new = out[0, given:]
    return Made(text=tokenizer.decode(new, skip_special_tokens=True), tokens=tuple(new.tolist()))
