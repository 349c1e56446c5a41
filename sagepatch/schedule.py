"""Where in a denoising schedule a call is made: read off the running pipeline, or told by its user.

Nothing of a pipeline or scheduler is changed. The pipeline that made a call is on the stack of the
calling thread, so threads, pipelines that share a model, a scheduler put in later and compiled
models are told apart by themselves; no GPU is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from sagepatch.errors import InvalidArgument

# What the loops of diffusers call the timestep of the step, and who holds the scheduler there.
_TIMESTEP = "t"
_OWNERS = ("self", "components")


@dataclass(frozen=True, slots=True)
class Place:
    """Step number `step`, from 0, of a schedule of `steps`."""

    step: int
    steps: int

    @property
    def at(self) -> float:
        """The fraction of the schedule: 0 in the first step, 1 in the last one."""
        return fraction(self.step, self.steps)


def fraction(step: int, steps: int) -> float:
    """The place of step number `step` (from 0) of `steps`: 0 in the first, 1 in the last one.

    >>> fraction(0, 50), fraction(49, 50), fraction(0, 1)
    (0.0, 1.0, 0.0)
    """
    return step / (steps - 1) if steps > 1 else 0.0


# What `Schedule.at` has been told in this thread or task and not yet left, the innermost last.
_TOLD: ContextVar[tuple[tuple[Schedule, Place], ...]] = ContextVar("told", default=())


class Schedule:
    """The place in the schedule of the calls of each thread and asyncio task, for the layers of one
    patch.
    """

    def place(self) -> Place | None:
        """The place of a call made now, None where nobody knows."""
        told = next((place for owner, place in reversed(_TOLD.get()) if owner is self), None)
        return running_step() if told is None else told

    @contextmanager
    def at(self, step: int, steps: int) -> Iterator[None]:
        """Calls of this thread or task meanwhile belong to step `step` (from 0) of `steps`: for
        loops of one's own. Around a pipeline it wins over the pipeline's own loop.
        """
        for name, value in (("step", step), ("steps", steps)):
            if isinstance(value, str) or not hasattr(value, "__float__"):
                raise InvalidArgument(f"{name} is {value!r}, needs a whole number")
        if not 0 <= step < steps:
            raise InvalidArgument(f"step {step} of {steps}: needs a step from 0 to {steps - 1}")
        mine = self, Place(step, steps)
        _TOLD.set((*_TOLD.get(), mine))
        try:
            yield
        finally:
            # This one, wherever it stands: generators that take turns leave in another order than
            # they entered.
            _TOLD.set(tuple(one for one in _TOLD.get() if one is not mine))


def running_step() -> Place | None:
    """The step of the innermost denoising loop on this thread's stack, None without one.

    A loop is a frame with a local `t`, the timestep, whose `self` or `components` has a `scheduler`
    with `timesteps`, as in diffusers' pipelines.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _may_loop(frame.f_code):
            place = _place(frame.f_locals)
            if place is not None:
                return place
        frame = frame.f_back
    return None


# By the code's id, with the code itself, so that no other code can take that id.
_CODES: dict[int, tuple[CodeType, bool]] = {}
_MOST_CODES = 4096


def _may_loop(code: CodeType) -> bool:
    """Whether a function has the locals of a denoising loop."""
    known = _CODES.get(id(code))
    if known is None:
        names = code.co_varnames
        known = code, _TIMESTEP in names and any(owner in names for owner in _OWNERS)
        if len(_CODES) >= _MOST_CODES:
            _CODES.clear()
        _CODES[id(code)] = known
    return known[1]


def _place(found: Any) -> Place | None:
    """The step of a frame with these locals, None where it is no denoising loop."""
    t = found.get(_TIMESTEP)
    if t is None:
        return None
    for owner in _OWNERS:
        scheduler = getattr(found.get(owner), "scheduler", None)
        schedule = getattr(scheduler, "timesteps", None)
        if isinstance(schedule, Tensor):
            # A loop may run over a copy of the scheduler's timesteps, or over those that it had
            # before somebody set others.
            known = [schedule, found.get("timesteps")]
            found_in = [one for one in known if isinstance(one, Tensor) and one.dim() == 1]
            return _in_any(t, found_in)
    return None


def _in_any(t: Any, schedules: Sequence[Tensor]) -> Place | None:
    """The step of timestep `t` in the first of some schedules [steps] that it is of.

    An element of a schedule is found by its address, no GPU is waited for; other numbers by their
    value where that costs no waiting either.
    """
    if isinstance(t, Tensor):
        if t.dim() != 0:
            return None
        for schedule in schedules:
            if t.device == schedule.device and schedule.stride(0) and _same_storage(t, schedule):
                return _apart(t, schedule)
        base = t._base
        if base is not None and base.dim() == 1 and base.shape[0] > 1 and base.stride(0):
            # An element of a row that neither the scheduler nor the loop holds any more.
            return _apart(t, base)
        if t.device.type != "cpu":
            return None
        # A number that lies among others in memory was taken from a row of as many: only a schedule
        # of that length can be meant.
        many = t.untyped_storage().nbytes() // t.element_size()
        schedules = [one for one in schedules if many in (1, one.shape[0])]
    elif not isinstance(t, int | float):
        return None
    for schedule in schedules:
        if schedule.device.type == "cpu":
            hits = torch.nonzero(schedule == t)
            if len(hits):
                return Place(int(hits[0]), schedule.shape[0])
    return None


def _apart(t: Tensor, schedule: Tensor) -> Place | None:
    """The step of an element of `schedule` [steps] by its address, None where it is none."""
    apart = int(t.storage_offset()) - int(schedule.storage_offset())
    step, rest = divmod(apart, int(schedule.stride(0)))
    return Place(step, schedule.shape[0]) if rest == 0 and 0 <= step < schedule.shape[0] else None


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
