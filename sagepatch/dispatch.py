"""Which kernel serves a call: a pure function of the call's description, the request and what this
machine can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE, SDPA
from sagepatch.errors import UnknownVariant, VariantRefused
from sagepatch.numerics.recipe import RECIPES, TIERS
from sagepatch.spec import AttnSpec
from sagepatch.variant import Variant

# "auto" outside a calibrated layer quantises from this many keys and queries up: on an H200 our
# fastest kernel beat torch's default at 4096 and took twice as long at 1024 (benchmarks/
# h200_attention.csv). Calibrated layers are timed, whatever their length.
AUTO_MIN_LEN = 4096

# Why a variant cannot run on this machine at all, or None. Passed in, so that choices are testable
# anywhere.
Unusable = Callable[[Variant], str | None]


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller wants: "auto", a tier, a recipe or a full `<toolchain>.<recipe>`; `emulate`
    admits emulated ones.

    >>> Request("sage1_b").variant
    'sage1_b'
    """

    variant: str = "auto"
    emulate: bool = False

    def __post_init__(self) -> None:
        name = self.variant
        # What is no string may have no hash to be looked up by.
        if isinstance(name, str) and (
            name in ("auto", *TIERS) or name in RECIPES or name in BY_NAME
        ):
            return
        recipe = str(name).rpartition(".")[2]
        kernels = [known for known in BY_NAME if known.endswith(f".{recipe}")]
        needed = (
            f"a kernel of that recipe ({', '.join(kernels)})"
            if kernels
            else f"'auto', a tier ({', '.join(TIERS)}), a recipe ({', '.join(RECIPES)}) or "
            "<toolchain>.<recipe>"
        )
        raise UnknownVariant(name, [f"no such name; give {needed}"])

    @property
    def by_full_name(self) -> bool:
        return "." in self.variant

    def wants(self, variant: Variant) -> bool:
        """Whether `variant` is one that this request speaks of."""
        if self.variant == "auto":
            return True
        return self.variant in (variant.name, variant.recipe.name, variant.tier)


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one candidate: taken when `reasons` is empty, refused because of all of them
    otherwise.
    """

    variant: Variant
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen kernel and the trace of every candidate that was looked at, in order."""

    variant: Variant
    decisions: tuple[Decision, ...]


def candidates(
    spec: AttnSpec,
    request: Request,
    unusable: Unusable,
    catalogue: Sequence[Variant] = CATALOGUE,
) -> tuple[Decision, ...]:
    """Every variant that `request` speaks of, in the order of preference on this GPU, with all
    reasons against each.
    """
    return tuple(
        Decision(variant, _reasons(spec, request, variant, unusable))
        for variant in sorted(catalogue, key=lambda variant: spec.arch not in variant.first_on)
        if request.wants(variant)
    )


def select(
    spec: AttnSpec,
    request: Request,
    unusable: Unusable,
    catalogue: Sequence[Variant] = CATALOGUE,
    prove: Unusable = lambda variant: None,
) -> Selection:
    """Choose the first candidate that nothing speaks against; "auto" ends at exact attention.

    `prove` is asked of a candidate about to be chosen alone: it may compile and run the kernel.

    Raises `VariantRefused` with every reason where an explicit request cannot be met.
    """
    decisions = candidates(spec, request, unusable, catalogue)
    if request.variant == "auto":
        reason = auto_stays_exact(spec, request)
        if reason is not None:
            return Selection(
                SDPA,
                (
                    Decision(SDPA, ()),
                    *(Decision(d.variant, (reason,)) for d in decisions if d.variant is not SDPA),
                ),
            )
    looked: list[Decision] = []
    for place, decision in enumerate(decisions):
        if not decision.reasons:
            disproof = prove(decision.variant)
            if disproof is None:
                return Selection(decision.variant, (*looked, *decisions[place:]))
            decision = Decision(decision.variant, (disproof,))
        looked.append(decision)
    pairs = [(decision.variant, ", ".join(decision.reasons)) for decision in looked]
    reasons = [f"{variant.name}: {why}" for variant, why in pairs]
    raise VariantRefused(request.variant, reasons, "; ".join(by_kind(pairs)))


def by_kind(pairs: Iterable[tuple[Variant, str]]) -> list[str]:
    """What speaks against kernels: "kernel: why", those of one toolchain and reason counted."""
    found: dict[tuple[str, str], list[str]] = {}
    for variant, why in pairs:
        found.setdefault((variant.toolchain, why), []).append(variant.name)
    return [
        f"{names[0] if len(names) == 1 else f'{len(names)} {toolchain} kernels'}: {why}"
        for (toolchain, why), names in found.items()
    ]


def wide_stays_exact(spec: AttnSpec, emulate: bool) -> str | None:
    """Why a call in FP32 or FP64 should not be quantised unasked, or None."""
    if emulate or spec.dtype not in ("fp32", "fp64"):
        return None
    return f"{spec.dtype} stays exact unless a variant is asked for"


def auto_stays_exact(spec: AttnSpec, request: Request) -> str | None:
    """Why an uncalibrated "auto" call should not be quantised at all, or None."""
    if request.emulate:
        return None
    if (wide := wide_stays_exact(spec, request.emulate)) is not None:
        return wide
    if min(spec.q_len, spec.kv_len) < AUTO_MIN_LEN:
        return (
            f"short: {spec.q_len} queries and {spec.kv_len} keys, "
            f"quantising pays from {AUTO_MIN_LEN}"
        )
    return None


def _reasons(
    spec: AttnSpec, request: Request, variant: Variant, unusable: Unusable
) -> tuple[str, ...]:
    reasons = variant.rejects(spec, request.by_full_name)
    if variant.toolchain == "emulated" and not (request.emulate or request.by_full_name):
        emulation = "emulation is for accuracy, not speed: ask with emulate=True or by full name"
        reasons = (*reasons, emulation)
    if variant.withheld is not None and not request.by_full_name:
        reasons = (*reasons, f"withheld, by full name only: {variant.withheld}")
    here = unusable(variant)
    return reasons if here is None else (*reasons, here)
