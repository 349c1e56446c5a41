"""Random attention calls as plain values, for fuzzing GPU kernels. A `Lane` holds what kernels are
compiled for, so that thousands of calls share few programs; a `Spec` is one call. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from sagepatch.spec import Call

# Options that a family turns on: masks of keys or whole ones, positions, packing, terms of a score.
CAUSAL_FAMILIES = ("causal", "window", "keys+causal", "keys+window", "packed+causal")
FAMILIES = ("", "keys", "packed", "packed+window", *CAUSAL_FAMILIES)
EVERY_FAMILY = (
    *FAMILIES,
    *("bool", "bias", "bool+causal", "bias+window", "softcap", "sinks+causal", "packed+sinks"),
    *("keys+softcap+sinks",),
)
HEAD_SIZES = ((64, 64), (128, 128), (40, 40), (80, 80), (64, 128), (96, 33), (192, 128), (256, 256))
MEMBERS = 5
# Lengths on both sides of what kernels cut at.
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 384, 385)
Inner = Literal["channels", "tokens"]


@dataclass(frozen=True, slots=True)
class Lane:
    """What stays the same in one lane. `family`: names of options joined by "+". `aligned`: strides
    and addresses are multiples of 16 elements, else odd. `inner`: the axis that lies dense in
    memory. `steady`: lengths are odd, or multiples of 16 where `even`, positions neither 1 nor such
    multiples, and there is one order of the output, for compilers that make code of its own for
    each kind of number.
    """

    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    family: str = ""
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    aligned: bool = True
    inner: Inner = "channels"
    steady: bool = False
    even: bool = False
    q_len: tuple[int, int] = (1, 900)
    kv_len: tuple[int, int] = (1, 1500)

    @property
    def options(self) -> frozenset[str]:
        return frozenset(self.family.split("+")) - {""}


@dataclass(frozen=True, slots=True)
class Spec:
    """One call, without its tensors. `orders` are the outer axes of q, k and v in memory; `keep`
    says which keys a mask leaves, and `cuts` where members end, both as fractions.
    """

    lane: Lane
    q_len: int
    kv_len: int
    seed: int
    orders: tuple[tuple[int, ...], ...]
    expand: str = ""
    offset: float = 0.0  # of every channel of k
    scale: float = 1.0  # of the usual one
    causal_offset: int = 0
    window: int = 1
    keep: tuple[str, float] = ("random", 0.9)
    mask_batch: bool = True
    mask_heads: bool = False
    softcap: float = 5.0
    cuts: tuple[tuple[float, float], ...] = ()
    bshd_out: bool = False
    poison: float = float("nan")

    def call(self, device: torch.device) -> Call:
        """The call on `device`. Memory around its tensors and keys that a mask hides from every
        query hold `poison`.
        """
        lane, options = self.lane, self.lane.options
        B = 1 if "packed" in options else lane.batch
        Hkv, Hq = lane.kv_heads, lane.kv_heads * lane.group
        gen = torch.Generator(device).manual_seed(self.seed)
        shapes = (
            (B, Hq, self.q_len, lane.head_dim),
            (B, Hkv, self.kv_len, lane.head_dim),
            (B, Hkv, self.kv_len, lane.v_head_dim),
        )
        q, k, v = (
            self._tensor(gen, shape, order, name)
            for shape, order, name in zip(shapes, self.orders, "qkv", strict=True)
        )
        causal = bool(options & {"causal", "window"})
        call = Call(
            q,
            k,
            v,
            self.scale * lane.head_dim**-0.5,
            causal_offset=self.causal_offset if causal else None,
            window=self.window if "window" in options else None,
            bshd_out=self.bshd_out,
        )
        if "packed" in options:
            call = replace(call, **self._members(device))
        if "softcap" in options:
            call = replace(call, softcap=self.softcap)
        if "sinks" in options:
            call = replace(call, sinks=torch.randn(Hq, generator=gen, device=device))
        return self._masked(call, gen) if options & {"keys", "bool", "bias"} else call

    def _tensor(
        self, gen: torch.Generator, shape: tuple[int, ...], order: tuple[int, ...], name: str
    ) -> Tensor:
        sizes = list(shape)
        if name != "q" and self.expand:
            sizes[("batch", "heads").index(self.expand)] = 1
        inside = self._memory(sizes, order, self.lane.dtype, gen.device)
        offset = self.offset if name == "k" else 0.0
        inside.copy_(torch.randn(sizes, generator=gen, device=gen.device) + offset)
        return inside.expand(shape)

    def _memory(
        self, sizes: list[int], order: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor inside a larger one that holds poison (True in a mask)."""
        room = [sizes[axis] + 3 for axis in order]
        if self.lane.aligned:
            room[-1] = -(-room[-1] // 16) * 16
        else:
            room = [size | 1 for size in room]
        memory = torch.full(room, True if dtype == torch.bool else self.poison, device=device)
        whole = memory.to(dtype).permute([order.index(axis) for axis in range(4)])
        # Inside: where aligned not along the dense axis, else by an odd number of elements.
        dense = order[-1] if self.lane.aligned else 0
        starts = [int(axis != dense) for axis in range(4)]
        return whole[tuple(slice(at, at + n) for at, n in zip(starts, sizes, strict=True))]

    def _members(self, device: torch.device) -> dict[str, Any]:
        def ends(total: int, which: int) -> Tensor:
            inner = sorted(round(cut[which] * total) for cut in self.cuts)
            return torch.tensor([0, *inner, total], dtype=torch.int32, device=device)

        return {"cu_seqlens_q": ends(self.q_len, 0), "cu_seqlens_kv": ends(self.kv_len, 1)}

    def _masked(self, call: Call, gen: torch.Generator) -> Call:
        B, Hq, Sq, _ = call.q.shape
        Skv = call.k.shape[2]
        per_key = "keys" in self.lane.options
        sizes = [
            B if self.mask_batch else 1,
            Hq if self.mask_heads and not per_key else 1,
            1 if per_key else Sq,
            Skv,
        ]
        mask = self._memory(sizes, (0, 1, 2, 3), torch.bool, call.q.device)
        mask.copy_(self._kept(sizes, gen))
        hidden = ~mask.any(2).any(1).expand(B, Skv)[:, None, :, None]
        if not self.expand:
            call.k.masked_fill_(hidden, self.poison)
            call.v.masked_fill_(hidden, self.poison)
        if "bias" not in self.lane.options:
            return replace(call, attn_mask=mask)
        wide = torch.float32 if self.seed % 2 else call.q.dtype
        bias = self._memory(sizes, (0, 1, 2, 3), wide, call.q.device)
        bias.copy_(torch.randn(sizes, generator=gen, device=gen.device))
        return replace(call, attn_mask=bias.masked_fill_(~mask, float("-inf")))

    def _kept(self, sizes: list[int], gen: torch.Generator) -> Tensor:
        kind, share = self.keep
        length = sizes[-1]
        keys = torch.arange(length, device=gen.device)
        if kind == "random":
            kept = torch.rand(sizes, generator=gen, device=gen.device) < share
        else:
            kept = (keys < round(share * length)) == (kind == "prefix")
            kept = kept.expand(sizes).clone()
        # A gap, so that whole tiles are hidden; another one in every member of the batch.
        for member in range(sizes[0]):
            first = (member * 173 + self.seed) % (2 * length)
            kept[member, ..., first : first + length // 3] = False
        return kept


def lane_of(number: int, families: tuple[str, ...], dtypes: list[torch.dtype]) -> Lane:
    """Lane `number` of many: all of its properties go round, each in a cycle of its own."""
    head_dim, v_head_dim = HEAD_SIZES[number % len(HEAD_SIZES)]
    return Lane(
        head_dim,
        v_head_dim,
        dtypes[number // 3 % len(dtypes)],
        families[number % len(families)],
        batch=1 + number // 2 % 3,
        kv_heads=1 + number // 5 % 3,
        group=1 + number // 3 % 3,
        aligned=number // 7 % 3 != 1,
        inner="tokens" if number % 7 == 5 else "channels",
    )


def steady(lane: Lane, number: int) -> Lane:
    """`lane` for a compiler that makes code of its own for 1, for multiples of 16 and for each
    number of parts that a sum has. Every third lane has calls of one key.
    """
    return replace(
        lane,
        steady=True,
        even=number % 4 == 3,
        q_len=((3, 61), (131, 901))[number // 2 % 2],
        kv_len=((1, 121), (523, 639), (131, 255))[number % 3],
    )


@st.composite
def specs(draw: st.DrawFn, lane: Lane) -> Spec:
    """Calls of one lane."""

    def number(low: int, high: int) -> int:
        n = draw(st.integers(low, high))
        if not lane.steady:
            return n
        return n + 2 if n % 16 == 0 or n == 1 else n

    def length(low: int, high: int) -> int:
        if lane.steady:
            n = draw(st.integers(low, high))
            return max(16, n // 16 * 16) if lane.even else n - 1 + n % 2
        edges = [n for n in (low, *EDGES, high) if low <= n <= high]
        return draw(st.one_of(st.sampled_from(edges), st.integers(low, high)))

    options = lane.options
    q_len, kv_len = length(*lane.q_len), length(*lane.kv_len)
    outer = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)]
    last = (3,)
    if lane.inner == "tokens":
        outer, last = [(0, 1, 3), (0, 3, 1), (1, 0, 3), (3, 1, 0)], (2,)
    masked = bool(options & {"keys", "bool", "bias"})
    plain = lane.aligned and not masked and "packed" not in options
    share = st.sampled_from([0.02, 0.5, 0.9, 1.0])
    cut = st.tuples(*(st.sampled_from([0.0, 0.01, 0.3, 0.31, 0.5, 0.77, 1.0]) for _ in range(2)))
    return Spec(
        lane,
        q_len,
        kv_len,
        draw(st.integers(0, 1 << 30)),
        tuple(draw(st.sampled_from(outer)) + last for _ in range(3)),
        expand=draw(st.sampled_from(["", "", "batch", "heads"])) if plain else "",
        offset=draw(st.sampled_from([0.0, 3.0])),
        scale=draw(st.sampled_from([1.0, 1.0, 1.0, 0.3, 0.0, -1.0])),
        causal_offset=number(-40, max(40, kv_len - q_len + 20)),
        window=number(1, 300),
        keep=draw(st.tuples(st.sampled_from(["random", "prefix", "suffix"]), share)),
        mask_batch=draw(st.booleans()) or lane.steady,
        mask_heads=draw(st.booleans()) and not lane.steady,
        softcap=draw(st.sampled_from([1.0, 5.0, 50.0])),
        cuts=tuple(draw(cut) for _ in range(MEMBERS - 1)),
        bshd_out=lane.even if lane.steady else draw(st.booleans()),
        poison=draw(st.sampled_from([float("nan"), float("inf")])),
    )
