"""A kernel as a record: what it computes, where its code is, and which calls it serves; no tensors,
no machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from sagepatch.numerics.recipe import Recipe, Tier
from sagepatch.spec import AttnSpec, MaskKind

Toolchain = Literal["sdpa", "emulated", "triton", "cuda", "cuda_mma"]
ALL_MASKS = frozenset(MaskKind)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a kernel may be from its emulator (its own faults), worst head: not the price of the
    recipe.
    """

    cosine: float
    rel_l1: float
    lse_abs: float = 2e-2


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel of one toolchain for one recipe, `<toolchain>.<recipe>`.

    `entry` is "module:function", imported on first use; the function has the signature of
    `backends.Kernel`. `archs` None means any device of `devices`; `tested_on` are architectures
    where it runs, slowly, for its tests, and serves by full name only; `first_on` those where it is
    preferred to every kernel before it in the catalogue; `ran_on` those where its tests have
    passed. `numerics_version` rises when the same inputs give other numbers.
    """

    toolchain: Toolchain
    recipe: Recipe
    entry: str
    devices: frozenset[str]
    archs: frozenset[int] | None
    # Smallest and largest that is served; a kernel that needs other sizes pads by itself.
    head_dims: tuple[int, int]
    dtypes: frozenset[str]
    tolerance: Tolerance
    k_dtypes: frozenset[str] = frozenset({"fp16", "bf16", "fp32"})  # where k differs from q
    masks: frozenset[MaskKind] = ALL_MASKS
    causal: bool = True
    window: bool = True
    softcap: bool = True
    sinks: bool = True
    packed: bool = True
    gqa: bool = True
    own_v_head_dim: bool = True  # Dv may differ from D
    lse: bool = True
    needs: tuple[str, ...] = ()  # importable packages that the code wants
    tested_on: frozenset[int] = field(default_factory=frozenset)
    first_on: frozenset[int] = field(default_factory=frozenset)
    ran_on: frozenset[int] = field(default_factory=frozenset)
    numerics_version: int = 1
    withheld: str | None = None  # why only a request by full name reaches this kernel
    note: str | None = None  # what its name does not say

    @property
    def name(self) -> str:
        return f"{self.toolchain}.{self.recipe.name}"

    @property
    def tier(self) -> Tier:
        return self.recipe.tier

    def untried(self, arch: int) -> str | None:
        """What has to be said of this kernel on a GPU of `arch` where its tests have not run."""
        if self.archs is None or arch in self.ran_on:
            return None
        arithmetic = f"arithmetic checked on {_archs(self.ran_on)}, " if self.ran_on else ""
        return f"compiled, {arithmetic}not yet run on sm_{arch}"

    def rejects(self, spec: AttnSpec, by_full_name: bool = False) -> tuple[str, ...]:
        """All reasons why this kernel cannot serve `spec`, each with the value found and the one
        needed. `by_full_name`: the request names this kernel and no other.
        """
        low, high = self.head_dims
        archs = self.archs
        if archs is not None and by_full_name:
            archs = archs | self.tested_on
        only_tested = spec.arch in self.tested_on and not by_full_name
        checks = (
            (
                spec.device not in self.devices,
                f"device is {spec.device}, needs {_either(self.devices)}",
            ),
            (
                spec.device == "cuda" and archs is not None and spec.arch not in archs,
                f"GPU is sm_{spec.arch}, needs {_archs(archs or frozenset())}"
                + (" (here by full name only, for tests)" if only_tested else ""),
            ),
            (spec.dtype not in self.dtypes, f"dtype is {spec.dtype}, needs {_either(self.dtypes)}"),
            (
                spec.v_dtype not in self.dtypes,
                f"dtype of v is {spec.v_dtype}, needs {_either(self.dtypes)}",
            ),
            (
                spec.k_dtype is not None and spec.k_dtype not in self.k_dtypes,
                f"dtype of k is {spec.k_dtype}, needs {_either(self.k_dtypes)}",
            ),
            (
                not low <= spec.head_dim <= high,
                f"head_dim is {spec.head_dim}, needs {low} to {high}",
            ),
            (
                not low <= spec.v_head_dim <= high,
                f"head_dim of v is {spec.v_head_dim}, needs {low} to {high}",
            ),
            (
                spec.v_head_dim != spec.head_dim and not self.own_v_head_dim,
                f"head_dim of v is {spec.v_head_dim}, needs {spec.head_dim} as q",
            ),
            (
                spec.mask not in self.masks,
                f"mask is {spec.mask.value}, needs {_either(mask.value for mask in self.masks)}",
            ),
            (spec.causal and not self.causal, "call is causal, this kernel is not"),
            (spec.window is not None and not self.window, f"window is {spec.window}, needs none"),
            (spec.softcap and not self.softcap, "call has a soft cap, needs none"),
            (spec.sinks and not self.sinks, "call has sinks, needs none"),
            (spec.packed and not self.packed, "call is packed, needs one length a batch"),
            (
                spec.q_heads != spec.kv_heads and not self.gqa,
                f"{spec.q_heads} query heads share {spec.kv_heads} key heads, needs equal counts",
            ),
            (spec.lse and not self.lse, "call wants the log-sum-exp, this kernel has none"),
        )
        return tuple(reason for failed, reason in checks if failed)


def _archs(archs: frozenset[int]) -> str:
    return " or ".join(f"sm_{arch}" for arch in sorted(archs))


def _either(values: Iterable[object]) -> str:
    return " or ".join(sorted(str(value) for value in values))
