"""Which kernels calibration tries on a call. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE, SDPA
from sagepatch.backends.selfcheck import failure
from sagepatch.calibration.readying import make_ready
from sagepatch.dispatch import Request, candidates, wide_stays_exact
from sagepatch.layer import PatchedLayer
from sagepatch.numerics.recipe import TIERS
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# What calibration tries unless told otherwise: 8-bit recipes of the fast tier and those of the safe
# one. 4-bit recipes cost accuracy without being faster on most GPUs. Of each tier the catalogue's
# first on a GPU goes first; the others as the catalogue has them where their tests have passed on
# it, so that their times are known, else in this order.
CANDIDATE_RECIPES = (
    *("sage2_8b_k128", "sage2_8", "sage2pp_8_d4", "sage2pp_8", "sage1_vb"),
    *("sage2_8_bf16", "sage1_b", "sage1_b_f32"),
)
# At most this many of a tier are tried on a call: the first that serve it.
MOST_OF_TIER = {"fast": 4, "safe": 2}
# Emulations are slow: two of each tier are tried, and one of each (EMULATED_FEW) in a schedule of
# fewer than FEW_STEPS steps, whose own time pays for no more. Only what has a kernel for the dtype
# of a call is emulated.
EMULATED_RECIPES = ("sage2pp_8", "sage2_8", "sage1_b", "sage2_8_bf16", "sage1_b_f32")
EMULATED_FEW, FEW_STEPS = ("sage2pp_8", "sage1_b"), 6


def candidate_variants(
    spec: AttnSpec,
    layer: PatchedLayer,
    recipes: Collection[str] | None = None,
    call: Call | None = None,
) -> list[Variant]:
    """The kernels that calibration tries on a call of this layer, those that nothing speaks
    against and that know their answer; of `recipes` only, where they are given. Calls in FP32 have
    none unless recipes are asked for; the layer's record says so. With `call`, one of that kind,
    they are made ready side by side.
    """
    if spec.q_len <= 1:
        return []
    wide = wide_stays_exact(spec, layer.policy.emulate)
    if wide is not None and recipes is None:
        layer.record.note(wide)
        return []
    request = Request("auto", emulate=layer.policy.emulate)
    serving = [
        decision.variant
        for decision in candidates(spec, request, layer.unusable, CATALOGUE)
        if not decision.reasons and decision.variant is not SDPA
    ]
    if recipes is not None:
        asked = [variant for variant in serving if variant.recipe.name in recipes]
        if call is not None:
            make_ready(asked, call, guarded=layer.policy.guard == "auto")
        return [variant for variant in asked if _proven(variant, layer, spec)]
    if call is not None:
        few = _few(serving, spec, lambda variant: True)
        make_ready(few, call, guarded=layer.policy.guard == "auto")
    return _few(serving, spec, lambda variant: _proven(variant, layer, spec))


def refused_by(spec: AttnSpec, layer: PatchedLayer, tried: Sequence[Variant]) -> tuple[str, ...]:
    """The kernels that calibration tries on other calls of this device which cannot serve such a
    call, or must not; `tried` can.
    """
    request = Request("auto", emulate=layer.policy.emulate)
    wide = wide_stays_exact(spec, layer.policy.emulate) is not None
    return tuple(
        decision.variant.name
        for decision in candidates(spec, request, layer.unusable, CATALOGUE)
        if (decision.reasons or wide)
        and decision.variant not in tried
        and _runs_here(decision.variant, spec, layer)
        and decision.variant.recipe.name in _listed(decision.variant)
    )


def _runs_here(variant: Variant, spec: AttnSpec, layer: PatchedLayer) -> bool:
    """Whether a kernel serves any call on the device of this one."""
    if variant.toolchain == "emulated" and not layer.policy.emulate:
        return False
    right = spec.device in variant.devices and (
        variant.archs is None or spec.device != "cuda" or spec.arch in variant.archs
    )
    return right and variant.withheld is None and layer.unusable(variant) is None


def _listed(variant: Variant) -> tuple[str, ...]:
    return EMULATED_RECIPES if variant.toolchain == "emulated" else CANDIDATE_RECIPES


def _few(
    serving: Sequence[Variant], spec: AttnSpec, proven: Callable[[Variant], bool]
) -> list[Variant]:
    """The first `MOST_OF_TIER` of each tier that calibration tries and that are `proven`; `serving`
    is in the catalogue's order on this GPU.
    """
    listed = [
        variant
        for variant in serving
        if variant.recipe.name in _listed(variant) and _has_kernel(variant, spec.dtype)
    ]
    firsts: dict[tuple[bool, str], Variant] = {}
    for variant in listed:
        firsts.setdefault(_place(variant), variant)
    taken: Counter[tuple[bool, str]] = Counter()
    chosen = []

    def preference(variant: Variant) -> tuple[int, bool, int]:
        later = firsts[_place(variant)] is not variant
        return TIERS.index(variant.tier), later, _preference(variant, spec.arch)

    for variant in sorted(listed, key=preference):
        if taken[_place(variant)] < MOST_OF_TIER[variant.tier] and proven(variant):
            taken[_place(variant)] += 1
            chosen.append(variant)
    return chosen


def _place(variant: Variant) -> tuple[bool, str]:
    """What competes for the same places among the candidates."""
    return variant.toolchain == "emulated", variant.tier


def _has_kernel(variant: Variant, dtype: str) -> bool:
    """Whether an emulation says something of a kernel: one of its recipe takes this dtype, FP64 as
    FP32. Any other kernel is one itself.
    """
    if variant.toolchain != "emulated":
        return True
    taken = "fp32" if dtype == "fp64" else dtype
    return any(
        taken in one.dtypes
        for one in BY_NAME.values()
        if one.recipe is variant.recipe and one is not variant
    )


def _proven(variant: Variant, layer: PatchedLayer, spec: AttnSpec) -> bool:
    """Whether a kernel passes its known-answer check on the GPU of a call, made at its first use;
    else the layer's record says why it is not tried.
    """
    why = failure(variant, spec.gpu)
    if why is not None:
        layer.record.note(f"{variant.name} is not tried: {why}")
    return why is None


def _preference(variant: Variant, arch: int | None) -> int:
    """Lower is earlier; equal where the catalogue's order is one of times on this GPU."""
    measured = arch in variant.ran_on
    return -1 if measured else _listed(variant).index(variant.recipe.name)
