"""One attention call: its tensors and options (`Call`) and its description without tensors
(`AttnSpec`). No policy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

import torch
from torch import Tensor

from sagepatch.bounded import Bounded
from sagepatch.errors import InvalidArgument

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class MaskKind(StrEnum):
    """The kinds of mask that kernels tell apart; found from shape and dtype alone, never from
    values.
    """

    NONE = "none"
    KEY_PADDING = "key_padding"  # bool, the same for every query and head: [B or 1, 1, 1, Skv]
    BOOL = "bool"  # bool, anything that broadcasts to [B, Hq, Sq, Skv]; True keeps
    ADDITIVE = "additive"  # floating point, added to the scaled scores


class _Hashed:
    """Room for a hash that is computed once, as a spec is looked up several times a call. It is a
    slot and no field, so that it is neither compared nor pickled.
    """

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class AttnSpec(_Hashed):
    """One attention call without its tensors; every decision of the library takes one of these.

    Sizes count elements. `arch` is the compute capability as an integer (90 for sm_90) or None off
    CUDA. `causal_offset` is None for a call that is not causal; n hides key j from query i where j
    > i + n. `window` keeps a token and the window - 1 before it. Packed calls carry `q_len` and
    `kv_len` totals. `gpu` is the kind of GPU, by its name: a kernel may fail on one of two kinds
    that have the same architecture.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: str
    v_dtype: str
    device: str
    arch: int | None = None
    mask: MaskKind = MaskKind.NONE
    causal_offset: int | None = None
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    packed: bool = False
    lse: bool = False
    gpu: str | None = None
    k_dtype: str | None = None  # None: that of q

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            made = hash(tuple(getattr(self, field.name) for field in fields(self)))
            object.__setattr__(self, "_hash", made)
            return made

    @property
    def causal(self) -> bool:
        return self.causal_offset is not None

    def __str__(self) -> str:
        heads = (
            f"{self.q_heads}"
            if self.q_heads == self.kv_heads
            else f"{self.q_heads}/{self.kv_heads}"
        )
        dims = (
            f"{self.head_dim}"
            if self.head_dim == self.v_head_dim
            else f"{self.head_dim}/{self.v_head_dim}"
        )
        text = f"{self.batch}x{heads}x{self.q_len}x{self.kv_len}x{dims} {self.dtype}"
        options = [
            f"mask {self.mask.value}" if self.mask is not MaskKind.NONE else "",
            f"causal {self.causal_offset:+d}" if self.causal_offset is not None else "",
            f"window {self.window}" if self.window is not None else "",
            "softcap" if self.softcap else "",
            "sinks" if self.sinks else "",
            "packed" if self.packed else "",
        ]
        return " ".join([text, *filter(None, options)])


# The specs of calls seen before, by all that a spec depends on: making one costs the host as much
# as a launch.
_SPECS: Bounded[tuple[object, ...], AttnSpec] = Bounded(4096)


def mask_kind(mask: Tensor | None) -> MaskKind:
    """Classify a mask by dtype and shape. Integer masks are refused: 0/1 integers have no agreed
    meaning.
    """
    if mask is None:
        return MaskKind.NONE
    if mask.dtype == torch.bool:
        per_key = mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == 1
        return MaskKind.KEY_PADDING if per_key else MaskKind.BOOL
    if mask.is_floating_point():
        return MaskKind.ADDITIVE
    raise InvalidArgument(
        f"attn_mask has dtype {mask.dtype}, which could mean keep or add; "
        "pass a bool mask (True keeps) or a floating-point one (added to the scores)"
    )


# Not frozen, since making a frozen one costs the host half as much as a launch; to be treated as if
# it were.
@dataclass(slots=True, eq=False)
class Call:
    """One attention call with its tensors, in the one layout that kernels know.

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], any strides. `scale` multiplies the
    scores. `attn_mask` broadcasts to [B, Hq, Sq, Skv]. `causal_offset` None: not causal. `sinks`
    [Hq]: one extra logit a head that takes weight and gives nothing. Packed calls hold B = 1 and
    cumulative lengths `cu_seqlens_*` [members + 1] int32. `bshd_out` asks for an output whose
    memory order is [B, Sq, Hq, Dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    attn_mask: Tensor | None = None
    causal_offset: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    bshd_out: bool = False
    return_lse: bool = False

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def empty_out(self) -> Tensor:
        """Unwritten output [B, Hq, Sq, Dv] in v's dtype and in the memory order that the caller
        asked for.
        """
        B, Hq, Sq, _ = self.q.shape
        Dv = self.v.shape[3]
        if self.bshd_out:
            return self.v.new_empty((B, Sq, Hq, Dv)).transpose(1, 2)
        return self.v.new_empty((B, Hq, Sq, Dv))

    def empty_lse(self) -> Tensor:
        """Unwritten natural log-sum-exp of the scores, [B, Hq, Sq] fp32."""
        return self.q.new_empty(self.q.shape[:3], dtype=torch.float32)

    def spec(self) -> AttnSpec:
        """Describe this call; raises `InvalidArgument` where the shapes do not form one attention
        call.
        """
        q, k, v, mask, sinks = self.q, self.k, self.v, self.attn_mask, self.sinks
        cu_q, cu_kv = self.cu_seqlens_q, self.cu_seqlens_kv
        key = (
            *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype),
            *(q.device, k.device, v.device),
            None if mask is None else (mask.shape, mask.dtype, mask.device),
            *(self.causal_offset, self.window, self.softcap is None, self.return_lse),
            None if sinks is None else sinks.device,
            None if cu_q is None else cu_q.device,
            None if cu_kv is None else cu_kv.device,
        )
        found = _SPECS.get(key)
        if found is None:
            found = _SPECS[key] = self._described()
        return found

    def _described(self) -> AttnSpec:
        q, k, v = self.q, self.k, self.v
        check_shapes(q, k, v)
        check_devices(
            q,
            attn_mask=self.attn_mask,
            sinks=self.sinks,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_kv=self.cu_seqlens_kv,
        )
        if self.attn_mask is not None:
            check_mask(self.attn_mask, q, k)
        device = q.device
        return AttnSpec(
            batch=q.shape[0],
            q_heads=q.shape[1],
            kv_heads=k.shape[1],
            q_len=q.shape[2],
            kv_len=k.shape[2],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            dtype=DTYPE_NAMES.get(q.dtype, str(q.dtype)),
            v_dtype=DTYPE_NAMES.get(v.dtype, str(v.dtype)),
            device=device.type,
            arch=arch_of(device),
            mask=mask_kind(self.attn_mask),
            causal_offset=self.causal_offset,
            window=self.window,
            softcap=self.softcap is not None,
            sinks=self.sinks is not None,
            packed=self.packed,
            lse=self.return_lse,
            gpu=gpu_of(device),
            k_dtype=None if k.dtype == q.dtype else DTYPE_NAMES.get(k.dtype, str(k.dtype)),
        )


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k, v that do not form one attention call."""
    check_devices(q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES.values())
            raise InvalidArgument(f"dtype of {name} is {tensor.dtype}, needs one of {known}")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise InvalidArgument(
            f"q, k and v must be 4-dimensional [batch, heads, tokens, head_dim]; "
            f"found {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise InvalidArgument(f"q and k differ in head size: {q.shape[3]} and {k.shape[3]}")
    if k.shape[:3] != v.shape[:3]:
        raise InvalidArgument(
            f"k and v must agree in batch, heads and tokens; "
            f"found {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0]:
        raise InvalidArgument(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidArgument(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads: "
            "the second must divide the first"
        )


def check_devices(q: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that are not on q's device."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise InvalidArgument(
                f"q is on {q.device} and {name} on {tensor.device}: move all tensors to one device"
            )


def check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Refuse a mask that does not broadcast to [B, Hq, Sq, Skv]; the size of each axis must be 1 or
    exact.
    """
    target = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    shape = tuple(mask.shape)
    fits = mask.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(shape), reversed(target), strict=False)
    )
    if not fits:
        raise InvalidArgument(
            f"attn_mask of shape {shape} does not broadcast to "
            f"[batch, heads, queries, keys] = {target}"
        )


# Compute capability and name of each CUDA device that was asked for.
_GPUS: dict[int, tuple[int, str]] = {}


def arch_of(device: torch.device) -> int | None:
    """Compute capability of a CUDA device as an integer (86, 90, 120), None elsewhere; cached per
    device.
    """
    known = _known_gpu(device)
    return None if known is None else known[0]


def gpu_of(device: torch.device) -> str | None:
    """The name of a CUDA device, None elsewhere; cached per device."""
    known = _known_gpu(device)
    return None if known is None else known[1]


def _known_gpu(device: torch.device) -> tuple[int, str] | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    known = _GPUS.get(index)
    if known is None:
        major, minor = torch.cuda.get_device_capability(index)
        known = _GPUS[index] = major * 10 + minor, torch.cuda.get_device_name(index)
    return known
