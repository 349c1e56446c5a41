"""First calls of kernels, several compiled at once, and what their answers are worth: the known
answer, and the emulator on a shape. Keeps no result on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from sagepatch.backends import load
from sagepatch.backends.selfcheck import known_call, verdict
from sagepatch.bench.clock import Budget
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call
from sagepatch.variant import Variant

# Kernels that are compiled side by side.
WORKERS = 8
NO_TIME = "left out: no time"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a kernel gave on its first call, or why it gave nothing."""

    out: Tensor | None
    lse: Tensor | None
    seconds: float | None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A kernel beside its emulator on the known call, worst head. `state` is "passed", "failed",
    "left out" or "refused"; `why` says it where it did not pass. `first_call_s` is mostly
    compiling.
    """

    kernel: str
    tier: str
    state: str
    why: str | None = None
    cosine: float | None = None
    rel_l1: float | None = None
    lse_abs: float | None = None
    first_call_s: float | None = None


def first_calls(variants: Sequence[Variant], call: Call, budget: Budget) -> dict[str, Answer]:
    """The answer of each kernel to `call`, by name, compiled side by side while time is left.

    What a kernel raises is its answer; nothing is raised for it.
    """
    device = call.q.device

    def first(variant: Variant) -> Answer:
        if budget.left <= 0:
            return Answer(None, None, None, NO_TIME)
        began = time.monotonic()
        try:
            with _current(device), torch.inference_mode():
                out, lse = load(variant.entry)(call, variant.recipe)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises
            return Answer(None, None, None, said(error))
        return Answer(out, lse, time.monotonic() - began)

    answers = {}
    with ThreadPoolExecutor(max_workers=WORKERS if device.type == "cuda" else 1) as pool:
        running: dict[Future[Answer], str] = {pool.submit(first, v): v.name for v in variants}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            answers.update({running.pop(future): future.result() for future in done})
    return {variant.name: answers[variant.name] for variant in variants}


def known_answers(
    variants: Sequence[Variant], device: torch.device, budget: Budget
) -> Iterator[Check]:
    """Put the known call of `backends.selfcheck` to each kernel; what is on disk does not count."""
    call = known_call(device)
    answers = first_calls(variants, call, budget)
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    for variant in variants:
        answer = answers[variant.name]
        facts = (variant.name, variant.tier)
        if answer.out is None:
            state = "left out" if answer.fault == NO_TIME else "failed"
            yield Check(*facts, state, answer.fault)
            continue
        recipe = variant.recipe
        out, lse = expected.setdefault(recipe.name, emulate(call, recipe))
        why = verdict(variant, call, answer.out, answer.lse)
        worst = compare(answer.out.float(), out).worst
        yield Check(
            *facts,
            "passed" if why is None else "failed",
            why,
            worst.cosine,
            worst.rel_l1,
            None if answer.lse is None else float((answer.lse - lse).abs().max()),
            answer.seconds,
        )


def off_emulator(variant: Variant, out: Tensor, expected: Tensor) -> str | None:
    """How a kernel misses its emulator beyond its own tolerance, None where it does not."""
    worst = compare(out.float(), expected).worst
    limit = variant.tolerance
    if worst.finite and worst.cosine >= limit.cosine and worst.rel_l1 <= limit.rel_l1:
        return None
    return (
        f"off its emulator: cosine {worst.cosine:.5f} (needs {limit.cosine:g}), "
        f"relative L1 {worst.rel_l1:.4f} (at most {limit.rel_l1:g})"
    )


def emulated_by_recipe(call: Call) -> Callable[[Recipe], Tensor]:
    """`emulate` on one call, each recipe once."""
    found: dict[str, Tensor] = {}

    def answer(recipe: Recipe) -> Tensor:
        if recipe.name not in found:
            found[recipe.name] = emulate(call, recipe)[0]
        return found[recipe.name]

    return answer


def said(error: Exception) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _current(device: torch.device) -> torch.cuda.device:
    """The context in which `device` is the current one; a CPU changes nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
