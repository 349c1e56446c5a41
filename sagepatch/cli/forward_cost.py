"""What one forward of a model costs, counted on shapes alone: attention by layer, and the rest. And
how much faster it can become, by Amdahl's law from measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from sagepatch.patchers.site import Site


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one attention call. `mask`: it was given one; `causal`: top-left."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    v_head_dim: int
    mask: bool
    causal: bool

    @property
    def operations(self) -> int:
        """Floating-point operations of both products, half of them where causal."""
        scores = self.batch * self.heads * self.queries * self.keys
        whole = 2 * scores * (self.head_dim + self.v_head_dim)
        return whole // 2 if self.causal else whole

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = f"{self.head_dim}"
        if self.head_dim != self.v_head_dim:
            dims += f"/{self.v_head_dim}"
        options = " causal" * self.causal + " mask" * self.mask
        return f"{self.batch}x{heads}x{self.queries}x{self.keys}x{dims}{options}"


@dataclass(frozen=True, slots=True)
class Cost:
    """One forward: the attention calls of each layer by name ("" for calls outside of all layers),
    and the floating-point operations of everything else.
    """

    calls: Mapping[str, tuple[Shape, ...]]
    rest: int

    @property
    def attention(self) -> int:
        """Operations in attention."""
        return sum(shape.operations for shapes in self.calls.values() for shape in shapes)

    @property
    def total(self) -> int:
        return self.attention + self.rest

    def share(self, names: Sequence[str] | None = None) -> float:
        """The part of all operations that is attention, of some layers or all, 0 to 1."""
        chosen = self.calls if names is None else [name for name in names if name in self.calls]
        found = sum(shape.operations for name in chosen for shape in self.calls[name])
        return found / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one attention call of a shape: exact attention, and the fastest quantised
    kernel of a tier; None where none serves it.
    """

    exact: float
    fast: float | None
    safe: float | None


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast one forward is where every layer that would be patched runs the
    fastest kernel of a tier that serves it, exact attention where that is faster.

    `share` is the part of the time that is attention now, 0 to 1.
    """

    share: float
    fast: float
    safe: float


def cost(model: nn.Module, sites: Sequence[Site], run: Callable[[], object]) -> Cost:
    """Count one forward: `run()` calls `model`, whose tensors hold no numbers (device meta)."""
    counter = _Attention()
    rest = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad(), counter.layers(sites), rest, counter:
        run()
    found = {name: tuple(shapes) for name, shapes in counter.calls.items()}
    return Cost(found, rest.get_total_flops())


def gain(
    counted: Cost,
    patched: Sequence[str],
    times: Mapping[Shape, Times],
    operations_per_us: float,
) -> Gain:
    """Amdahl's law: attention by measured times, everything else at the measured rate of matrix
    products. The rest cannot be faster than that, so gains are upper bounds.
    """
    rest = counted.rest / operations_per_us
    exact = fast = safe = 0.0
    reached = set(patched)
    for name, shapes in counted.calls.items():
        for shape in shapes:
            took = times[shape]
            exact += took.exact
            quick, careful = (took.fast, took.safe) if name in reached else (None, None)
            fast += min(one for one in (took.exact, quick, careful) if one is not None)
            safe += min(one for one in (took.exact, careful) if one is not None)
    whole = rest + exact
    return Gain(exact / whole, whole / (rest + fast), whole / (rest + safe))


class _Attention(TorchFunctionMode):
    """Counts calls of SDPA instead of making them, by the layer that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Shape]] = {}
        self._inside: list[str] = []

    @contextmanager
    def layers(self, sites: Sequence[Site]) -> Iterator[None]:
        """Know, meanwhile, which layer is running."""
        hooks = []
        for site in sites:
            hooks += [
                site.module.register_forward_pre_hook(self._entering(site.name)),
                site.module.register_forward_hook(self._leaving),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leaving(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._count(*args, **kwargs)

    def _count(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        *batch, heads, queries, size = query.shape
        keys, width = value.shape[-2:]
        samples = 1
        for extent in batch:
            samples *= extent
        name = self._inside[-1] if self._inside else ""
        shape = Shape(
            *(samples, heads, key.shape[-3], queries, keys, size, width),
            mask=attn_mask is not None,
            causal=bool(is_causal),
        )
        self.calls.setdefault(name, []).append(shape)
        return query.new_empty(*query.shape[:-1], width)
