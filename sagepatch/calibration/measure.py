"""Candidate kernels against the exact output of the same live call, and how long kernels take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import SDPA
from sagepatch.backends.guard import Verdict
from sagepatch.calibration.pieces import rows_of, spans, taken
from sagepatch.calibration.sample import HeadErrors
from sagepatch.calibration.timing import CallTime, call_time
from sagepatch.dispatch import Request
from sagepatch.errors import KernelUnavailable
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.numerics.metrics import Metrics, compare
from sagepatch.ops import run_layer, run_variant
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# Errors are taken over at most COMPARED_ROWS query rows, evenly spaced: enough to find the worst
# head. At most COMPARED_NUMBERS numbers are compared at once, so that their copies in double
# precision are smaller than the layer's own tensors.
COMPARED_ROWS = 512
COMPARED_NUMBERS = 1 << 22
# An emulation is measured on EMULATED_RUNS stretches of EMULATED_ROWS query rows of a call.
EMULATED_RUNS = 3
EMULATED_ROWS = 128
# A kernel is timed ROUNDS times for each kind of call, and the lower time counts. After the first
# round only exact attention and kernels within a factor CLOSE of the fastest are timed again.
ROUNDS = 2
CLOSE = 1.25

# A call, the device that it runs on, and whether to time it thoroughly.
Timer = Callable[[Callable[[], object], torch.device, bool], CallTime]


class Rows(NamedTuple):
    """The compared rows of a kernel's output and the exact ones, [B, H, rows, Dv] each."""

    out: Tensor
    exact: Tensor


def measured_rows(variant: Variant, call: Call, exact: Tensor) -> Rows:
    """Run `variant` on `call`, whose exact output is `exact` [B, Hq, Sq, Dv], and keep a sample of
    rows; the rest of the output is free again.

    An emulation, which is slow, runs on some of the query rows of a long call only.
    """
    kernel = load(variant.entry)
    if variant.toolchain == "emulated" and not call.packed:
        parts = spans(call.q.shape[2], EMULATED_RUNS, EMULATED_ROWS)
        out, wanted = kernel(rows_of(call, parts), variant.recipe)[0], taken(exact, parts)
    else:
        out, wanted = kernel(call, variant.recipe)[0], exact
    step = max(1, -(-out.shape[2] // COMPARED_ROWS))
    if step == 1:
        return Rows(out, wanted)
    return Rows(out[:, :, ::step].contiguous(), wanted[:, :, ::step])


def errors_of(measured: dict[str, Rows]) -> dict[str, HeadErrors]:
    """The errors of every head of some kernels' rows, by name; kernels with rows of the same size
    are compared together, a few heads at a time.
    """
    sizes: dict[torch.Size, list[str]] = {}
    for name, rows in measured.items():
        sizes.setdefault(rows.out.shape, []).append(name)
    found: dict[str, HeadErrors] = {}
    for size, names in sizes.items():
        outs = torch.cat([measured[name].out for name in names], 1)
        exacts = [measured[name].exact for name in names]
        heads = _by_heads(outs, exacts)
        for at, name in enumerate(names):
            found[name] = _errors(heads[at * size[1] : (at + 1) * size[1]])
    return {name: found[name] for name in measured}


def measure(variant: Variant, call: Call, exact: Tensor) -> HeadErrors:
    """Run `variant` on `call` and compare with `exact` [B, Hq, Sq, Dv]; nothing is timed."""
    return errors_of({variant.name: measured_rows(variant, call, exact)})[variant.name]


def head_errors(out: Tensor, exact: Tensor) -> HeadErrors:
    """The errors of each head of `out` against `exact`, both [B, Hq, Sq, Dv]."""
    return errors_of({"": Rows(out, exact)})[""]


def all_finite(out: Tensor) -> Tensor:
    """Whether every number of an output is finite, as a 0-dim flag on its device: on a GPU that is
    queued, and only reading the flag waits for it. Of no empty output.
    """
    return torch.isfinite(torch.stack(torch.aminmax(out.detach()))).all()


def _errors(heads: tuple[Metrics, ...]) -> HeadErrors:
    return HeadErrors(
        all(head.finite for head in heads),
        tuple(head.cosine for head in heads),
        tuple(head.rel_l1 for head in heads),
        tuple(head.rmse for head in heads),
        tuple(head.norm_ratio for head in heads),
    )


def _by_heads(outs: Tensor, exacts: list[Tensor]) -> tuple[Metrics, ...]:
    """The metrics of each head of outs [B, K * H, S, D] by `compare`, those of `exacts` (K times
    [B, H, S, D]) one after the other, a few heads at a time.
    """
    B, many, S, D = outs.shape
    H = exacts[0].shape[1]
    group = max(1, COMPARED_NUMBERS // max(1, B * S * D))
    found: tuple[Metrics, ...] = ()
    for at in range(0, many, group):
        end = min(at + group, many)
        parts = [
            exacts[k][:, max(0, at - k * H) : min(H, end - k * H)]
            for k in range(at // H, (end - 1) // H + 1)
        ]
        wanted = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        found += compare(outs[:, at:end], wanted).heads
    return found


# Where times mean anything. An emulation's time says nothing about a kernel's.
TIMERS: dict[str, Timer] = {"cuda": call_time}


class _Timed(PatchedLayer):
    """A layer that runs a kernel to be timed. A guard's finding does not demote it, as a patched
    layer's would: it only spoils the time.
    """

    spoiled = False

    def heed(self, verdict: Verdict | None, runs: str) -> None:
        """Remember that an output was not finite, and so was computed twice."""
        self.spoiled = self.spoiled or verdict is not None


class Failed(NamedTuple):
    """How a kernel could not serve: not at all here, or for want of memory; and what was said."""

    unavailable: bool
    why: str


def _recalled(apart: CallTime | Failed) -> float:
    """What was remembered of one layer alone: its time, or the error again."""
    if isinstance(apart, CallTime):
        return apart.us
    raise (KernelUnavailable if apart.unavailable else torch.OutOfMemoryError)(apart.why)


class Stopwatch:
    """Times of kernels by kind of call, shared by the layers of one patch. Thread-safe.

    A kernel takes as long whatever the numbers in its tensors, so a time taken at one layer holds
    for all layers with such calls: timing costs a few calls a kernel, not a few a layer. A kernel
    is timed as a patched layer with this policy runs it, guard and all; exact attention, which such
    layers leave to torch, without one.

    What says nothing of other layers is remembered for the one that asked, which does not try
    again: a kernel that could not serve, and one that the guard had to do over, as its output was
    not finite.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._times: dict[AttnSpec, dict[str, list[CallTime]]] = {}
        # By kind of call, kernel and layer.
        self._apart: dict[tuple[AttnSpec, str, str], CallTime | Failed] = {}
        self._policy = policy or Policy()
        self._layer: _Timed | None = None
        self._lock = threading.Lock()

    def us(
        self,
        variant: Variant,
        call: Call,
        spec: AttnSpec,
        again: bool = True,
        *,
        layer: str = "",
    ) -> float | None:
        """Microseconds of `variant` on calls like `call`, of the GPU or of the host, whichever
        takes longer; None where nothing can be timed. A second time, and more carefully, where it
        may be the fastest, unless `again` is false; exact attention, which all are compared with,
        always with care. `layer` names who asks.

        Raises `KernelUnavailable` or `torch.OutOfMemoryError` where the kernel cannot serve.
        """
        timer = TIMERS.get(spec.device)
        if timer is None:
            return None
        with self._lock:
            times = self._times.setdefault(spec, {})
            taken = times.setdefault(variant.name, [])
            if not taken or (again and len(taken) < ROUNDS and self._close(times, variant.name)):
                who = spec, variant.name, layer
                if who not in self._apart:
                    taken += self._timed(variant, call, who, timer, bool(taken))
                if not taken:
                    return _recalled(self._apart[who])
            return min(one.us for one in taken)

    def _timed(
        self, variant: Variant, call: Call, who: tuple[AttnSpec, str, str], timer: Timer, care: bool
    ) -> list[CallTime]:
        """A new time; none where it says nothing of other layers: that is remembered apart."""
        try:
            layer = self._serving(variant, call)
            run = partial(run_variant, SDPA, call)
            if layer is not None:
                run = partial(run_layer, layer, call)
            found = timer(run, call.q.device, layer is None or care)
        except (KernelUnavailable, torch.OutOfMemoryError) as error:
            # Not the exception itself, whose frames hold the tensors of the call.
            self._apart[who] = Failed(isinstance(error, KernelUnavailable), str(error))
            raise
        if layer is not None:
            layer.ask_guards()
            if layer.spoiled:
                self._apart[who] = found
                return []
        return [found]

    def host_us(self, variant: Variant, spec: AttnSpec) -> float | None:
        """Microseconds of the host alone for such a call, None where it was not timed."""
        taken = self._times.get(spec, {}).get(variant.name, [])
        return min((one.host_us for one in taken), default=None)

    def _serving(self, variant: Variant, call: Call) -> _Timed | None:
        """A layer that is settled on a kernel, None for exact attention."""
        if variant is SDPA:
            return None
        # Directly first: a kernel that cannot serve raises here, where a layer would run exact
        # attention, which would be timed in its place.
        run_variant(variant, call)
        if self._layer is None:
            policy = replace(self._policy, strict=True)
            self._layer = _Timed("", "self", policy, Request("exact"), unusable)
        self._layer.spoiled = False
        self._layer.run_with(Request(variant.name), "timed")
        return self._layer

    @staticmethod
    def _close(times: dict[str, list[CallTime]], name: str) -> bool:
        """Whether another round may change which kernel is chosen."""
        best = {other: min(one.us for one in taken) for other, taken in times.items() if taken}
        return name == SDPA.name or best[name] <= CLOSE * min(best.values())
