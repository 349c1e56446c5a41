"""Self-calibration of one layer: looks at a few live calls, returns their exact output, keeps only
numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sagepatch.backends.catalogue import CATALOGUE, SDPA
from sagepatch.calibration.choose import Summary
from sagepatch.calibration.measure import Measurement, measure, time_us
from sagepatch.dispatch import Request, candidates
from sagepatch.errors import MachineError
from sagepatch.layer import PatchedLayer
from sagepatch.ops import run_exact
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# The calls of a layer that are measured; the calls between them run exact. After the last the layer
# locks.
SAMPLED_CALLS = (1, 2, 4, 8)
# What calibration tries unless told otherwise: one or two of each tier, best first. 4-bit recipes
# cost
# accuracy without being faster on most GPUs, and an emulation of everything would take minutes.
CANDIDATE_RECIPES = ("sage2pp_8", "sage2_8", "sage2_8b", "sage1_b", "sage1_b_f32")
EMULATED_RECIPES = ("sage2pp_8", "sage2_8", "sage1_b")


@dataclass(eq=False)
class LayerCalibration:
    """The measurements of one layer; its `observe` is the observer of a `PatchedLayer`.

    `done(layer)` is called once, after the last sampled call.
    """

    done: Callable[[PatchedLayer], None] | None = None
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    exact_us: list[float] = field(default_factory=list)
    spec: AttnSpec | None = None
    calls: int = 0
    samples: int = 0
    max_abs_v: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def observe(self, layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
        """Run one call exactly; measure the candidates on it if it is one of the sampled calls."""
        if call.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise MachineError(
                f"layer {layer.name} still calibrates and cannot be captured in a CUDA graph: "
                "run a few calls and patch.lock() first"
            )
        out, lse = run_exact(call)
        # A layer runs a single query exactly whatever its plan says: such a call shows nothing.
        if call.q.shape[2] == 1:
            return out, lse
        # One thread measures at a time; the others get their exact output and go on.
        if self._lock.acquire(blocking=False):
            try:
                self.calls += 1
                if self.calls in SAMPLED_CALLS:
                    self._sample(layer, call, out)
                finished = self.calls == SAMPLED_CALLS[-1]
            finally:
                self._lock.release()
            if finished and self.done is not None:
                self.done(layer)
        return out, lse

    def summaries(self) -> dict[str, Summary]:
        """Each candidate over all samples; a candidate that could not serve every sample is left
        out.
        """
        return {
            name: Summary.of(rows)
            for name, rows in self.measurements.items()
            if len(rows) == self.samples
        }

    @property
    def us_exact(self) -> float | None:
        """Median time of exact attention in microseconds, None where nothing was timed."""
        times = sorted(self.exact_us)
        return times[len(times) // 2] if times else None

    def _sample(self, layer: PatchedLayer, call: Call, exact: Tensor) -> None:
        spec = call.spec()
        timed = spec.device == "cuda"
        self.spec = spec
        self.samples += 1
        if call.v.numel():
            self.max_abs_v = max(self.max_abs_v, float(call.v.abs().amax()))
        tried = candidate_variants(spec, layer)
        if timed and tried:
            self.exact_us.append(time_us(lambda: run_exact(call)))
        for variant in tried:
            row = measure(variant, call, exact, timed=timed)
            self.measurements.setdefault(variant.name, []).append(row)


def candidate_variants(spec: AttnSpec, layer: PatchedLayer) -> list[Variant]:
    """The kernels that calibration tries on a call of this layer, those that nothing speaks
    against.
    """
    if spec.q_len == 1:
        return []
    request = Request("auto", emulate=layer.policy.emulate)
    return [
        decision.variant
        for decision in candidates(spec, request, layer.unusable, CATALOGUE)
        if not decision.reasons
        and decision.variant is not SDPA
        and decision.variant.recipe.name in _recipes_of(decision.variant)
    ]


def _recipes_of(variant: Variant) -> tuple[str, ...]:
    return EMULATED_RECIPES if variant.toolchain == "emulated" else CANDIDATE_RECIPES
