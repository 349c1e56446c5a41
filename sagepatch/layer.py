"""The state of one patched layer and how the op finds it: by the number in the layer's 0-dim CPU
tensor.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sagepatch.backends.catalogue import SDPA
from sagepatch.backends.guard import DeviceGuard, Verdict, available
from sagepatch.backends.prepared import Prepared
from sagepatch.backends.selfcheck import failure
from sagepatch.bounded import Bounded
from sagepatch.dispatch import Request, Unusable, select
from sagepatch.errors import StrictFallback, VariantRefused
from sagepatch.ledger import MOST_SPECS, Record
from sagepatch.schedule import Schedule
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

logger = logging.getLogger("sagepatch")

SiteKind = Literal["self", "cross", "joint"]
Guard = Literal["auto", "sync", "off"]
# Sees one call of an unlocked layer and returns its exact output: (layer, call) -> (out, lse or
# None), or None where it has settled the layer, which then serves the call.
Observer = Callable[["PatchedLayer", Call], tuple[Tensor, Tensor | None] | None]

UNPLACED = (
    "its plan differs over the denoising schedule, and nobody told where a call belongs: it ran "
    "the most accurate kernel of its plan (in a loop of your own use patch.at(step, steps))"
)
GRAPHED = (
    "its plan differs over the denoising schedule, and a CUDA graph runs one kernel in every "
    "replay: the most accurate one of its plan was captured"
)
SHORT = "short: a single query is bound by memory, not by tensor cores"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a patched layer behaves where it cannot run its kernel; the same for every layer of one
    `apply`.
    """

    strict: bool = False
    guard: Guard = "auto"
    emulate: bool = False


class Way(NamedTuple):
    """How a layer serves calls of one kind, as it served one before: by launches that are known, or
    by exact attention, and then `fallback` is why where that is not what it was told.
    """

    spec: AttnSpec
    runs: str
    prepared: Prepared | None
    guard: DeviceGuard | None
    fallback: str | None


@dataclass(eq=False)
class PatchedLayer:
    """One attention layer of one patched model.

    `request` is what the layer was told to run: "exact" until a plan or a calibration decides,
    which sets `planned`. `parts` says what it runs up to which fraction of the denoising schedule,
    in order, the last one to its end; `request` then serves calls whose place in it is unknown,
    which `unplaced` counts. `observer` is set until the layer is settled. The op writes `record`;
    `demoted` is why the layer runs exact from now on.
    """

    name: str
    kind: SiteKind
    policy: Policy
    request: Request
    unusable: Unusable
    schedule: Schedule = field(default_factory=Schedule, repr=False)
    observer: Observer | None = None
    reason: str = ""
    planned: bool = False
    parts: tuple[tuple[float, Request], ...] = ()
    unplaced: int = 0
    demoted: str | None = None
    record: Record = field(default_factory=Record)
    handle: Tensor = field(init=False)
    # What it was installed on, for a patcher that sees only the handle in a call.
    module: Callable[[], nn.Module | None] = field(default=lambda: None, repr=False)
    _guards: dict[torch.device, DeviceGuard] = field(default_factory=dict, repr=False)
    # By spec and request, the kernel that was chosen, and why it is exact attention where that was
    # not asked for. Bounded as the account is: a language model makes a new spec with each token.
    _chosen: Bounded[tuple[AttnSpec, str], tuple[Variant, str | None]] = field(
        default_factory=lambda: Bounded(MOST_SPECS), repr=False
    )

    # How calls were served, by their kind. Empty for a layer with `parts`, where the place in the
    # schedule decides too.
    ways: Bounded[tuple[Any, ...], Way] = field(
        default_factory=lambda: Bounded(MOST_SPECS), repr=False
    )

    # For a layer that runs exact attention. Forms of SDPA calls (`patchers.passing.form_of`) that
    # were served before: the next call of such a form is counted as one of that spec and goes to
    # torch unchanged.
    passes: Bounded[tuple[Any, ...], AttnSpec] = field(
        default_factory=lambda: Bounded(MOST_SPECS), repr=False
    )

    # The same one level up. Forms of calls of the method that attends, for instance a processor's
    # `__call__`, and the SDPA calls that one of them made.
    passes_whole: Bounded[tuple[Any, ...], tuple[AttnSpec, ...]] = field(
        default_factory=lambda: Bounded(MOST_SPECS), repr=False
    )

    def __post_init__(self) -> None:
        number = next(_numbers)
        # A number in a tensor is read inside the op, so layers can differ in it without a recompile
        # for each. The tensor is real and on the CPU, whatever mode or default device is on just
        # now: reading it must not wait for a GPU.
        with _disable_current_modes():
            self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        _LAYERS[number] = self

    def run_with(
        self,
        request: Request,
        reason: str,
        *,
        planned: bool = False,
        parts: tuple[tuple[float, Request], ...] = (),
    ) -> None:
        """Settle what this layer runs from now on, and why; `planned` where measurements of longer
        calls chose it, not the user. `parts`: what runs before which fraction of the schedule.
        """
        self.request = request
        self.parts = parts
        self.reason = reason
        self.planned = planned
        self.observer = None
        self._forget()

    def _forget(self) -> None:
        # New dictionaries, not cleared ones: another thread may still write into the old ones what
        # it chose before.
        self._chosen, self.ways = Bounded(MOST_SPECS), Bounded(MOST_SPECS)
        self.passes, self.passes_whole = Bounded(MOST_SPECS), Bounded(MOST_SPECS)

    @property
    def passing(self) -> bool:
        """Whether all that this layer does with a call is to count it: settled on exact attention
        throughout the schedule.
        """
        exact = self.request.variant in ("exact", SDPA.name)
        return exact and self.observer is None and not self.parts and self.demoted is None

    @property
    def runs(self) -> str:
        """The full name of the kernel that this layer runs: for a tier or a recipe, the one that
        has served it most.
        """
        if self.demoted is not None or self.observer is not None:
            return SDPA.name
        if self.request.by_full_name and not self.parts:
            return self.request.variant
        counts = self.record.by_variant.copy()
        del counts[SDPA.name]
        return counts.most_common(1)[0][0] if counts else SDPA.name

    def demote(self, reason: str) -> None:
        """Run exact attention from now on; warn once."""
        self.demoted = reason
        self._forget()
        if self.record.note(f"demoted to exact attention: {reason}"):
            logger.warning(
                "sagepatch: layer %s runs exact attention from now on: %s", self.name, reason
            )

    def guard(self, device: torch.device) -> DeviceGuard | None:
        """What guards this layer's kernels on a GPU without the host; None where nothing does, or
        the host checks each call itself.
        """
        if self.policy.guard != "auto" or device.type != "cuda" or not available():
            return None
        found = self._guards.get(device)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                # Flags made inside a graph would be garbage until its replay, and zeroed by each.
                self.record.note("captured in a CUDA graph before its first call: no guard there")
                return None
            found = self._guards.setdefault(device, DeviceGuard(device))
        return found

    def heed(self, verdict: Verdict | None, runs: str) -> None:
        """Act on what a guard found of the kernel named `runs`: its output was not finite, and was
        recomputed exactly.
        """
        if verdict == "kernel":
            self.demote(f"{runs} gave a non-finite output on finite inputs")
        elif verdict == "inputs":
            self.record.note("inputs of this layer were not finite")

    def ask_guards(self) -> None:
        """Wait for the GPUs and act on what their guards have found."""
        for guard in list(self._guards.values()):
            self.heed(guard.settle(), self.runs)

    def choose(self, spec: AttnSpec) -> tuple[Variant, str | None]:
        """The kernel for a call of this layer, and why it is exact where the layer's own kernel
        cannot serve.

        Raises `StrictFallback` under `strict=True` instead of falling back.
        """
        request = self._request_of(spec) if self.parts else self.request
        known = self._chosen.get((spec, request.variant))
        if known is None:
            known = self._decide(spec, request)
            # Nothing could be checked during a capture: ask again at the next call.
            if not capturing(spec):
                self._chosen[spec, request.variant] = known
        return known

    def _request_of(self, spec: AttnSpec) -> Request:
        """What the plan says for the call's place in the schedule."""
        if capturing(spec):
            self.record.note(GRAPHED)
            return self.request
        place = self.schedule.place()
        if place is None:
            self.unplaced += 1
            self.record.note(UNPLACED)
            return self.request
        parts = self.parts
        at = place.at
        return next((request for end, request in parts if at < end), parts[-1][1])

    def _decide(self, spec: AttnSpec, request: Request) -> tuple[Variant, str | None]:
        if self.demoted is not None:
            if self.policy.strict and request.variant not in ("exact", SDPA.name):
                raise StrictFallback(self.name, request.variant, (f"demoted: {self.demoted}",))
            return SDPA, f"demoted: {self.demoted}"
        if request.variant == "exact":
            return SDPA, None
        if spec.q_len == 1 and (self.planned or not request.by_full_name):
            return SDPA, SHORT
        try:
            return select(
                spec, request, self.unusable, prove=lambda variant: failure(variant, spec.gpu)
            ).variant, None
        except VariantRefused as refused:
            if self.policy.strict:
                raise StrictFallback(
                    self.name, request.variant, refused.reasons, refused.told
                ) from None
            return SDPA, "; ".join(refused.reasons)


# From a random start: a handle that was exported or saved in another process finds no layer here.
_numbers = itertools.count(secrets.randbits(62))
_LAYERS: WeakValueDictionary[int, PatchedLayer] = WeakValueDictionary()


def capturing(spec: AttnSpec) -> bool:
    """Whether a call on a GPU is being captured in a CUDA graph."""
    return spec.device == "cuda" and torch.cuda.is_current_stream_capturing()


def find_layer(handle: Tensor) -> PatchedLayer | None:
    """The layer whose handle this is; None for a handle that outlived its patch or came from
    another process.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        # A mode that fakes or records what torch runs: the number is no part of that.
        with _disable_current_modes():
            return _LAYERS.get(int(handle.item()))
    return _LAYERS.get(int(handle.item()))
