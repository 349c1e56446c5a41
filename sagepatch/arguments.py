"""What `sagepatch.attention` and `sagepatch.apply` refuse of their arguments, each in a sentence.
Serves no call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from sagepatch.errors import InvalidArgument
from sagepatch.ops import check_rising


def check_tensors(given: Iterable[tuple[str, object]]) -> None:
    """Refuse what is no tensor, or no dense one; None passes."""
    for name, value in given:
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise InvalidArgument(f"{name} is {shown(value)}, needs a tensor")
        if value.is_nested or value.layout is not torch.strided:
            kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            raise InvalidArgument(f"{name} is {kind}, needs a dense one; see cu_seqlens_q")


def check_numbers(given: Iterable[tuple[str, object]]) -> None:
    """Refuse what cannot be read as one number; None passes."""
    for name, value in given:
        if value is not None and not _is_number(value):
            raise InvalidArgument(f"{name} is {shown(value)}, needs a number")


def check_flags(given: Iterable[tuple[str, object]]) -> None:
    """Refuse words and collections where yes or no is asked for: "no" would count as yes."""
    for name, value in given:
        if isinstance(value, (str, bytes, list, tuple, dict, set, frozenset)):
            raise InvalidArgument(f"{name} is {shown(value)}, needs True or False")


def shown(value: object) -> str:
    """A wrong argument in a sentence: its type, and what it holds where that is short."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= 60 and "\n" not in text else f"of type {kind}"


def _is_number(value: object) -> bool:
    if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat)):
        return True
    # Numbers of other libraries, and tensors that hold one.
    return hasattr(value, "__float__") and not getattr(value, "shape", ())


def check_options(
    q: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    causal_offset: int | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Refuse options that contradict one another or mean nothing."""
    check_flags([("is_causal", is_causal)])
    check_numbers([("scale", scale), ("softcap", softcap)])
    if is_causal and attn_mask is not None:
        raise InvalidArgument(
            "is_causal and attn_mask exclude each other, as in SDPA: fold one into the other"
        )
    # torch's SDPA turns a scale of NaN into zeros.
    if scale is not None and not abs(scale) < math.inf:
        raise InvalidArgument(f"scale={scale} must be finite")
    if causal_offset is not None and not is_causal:
        raise InvalidArgument(f"causal_offset={causal_offset} needs is_causal=True")
    for name, value in (("causal_offset", causal_offset), ("window", window)):
        if value is not None and not _whole(value):
            raise InvalidArgument(f"{name}={value!r} must be a whole number of 64 bits")
    if window is not None and window < 1:
        raise InvalidArgument(
            f"window={window} must keep at least the token itself: pass 1 or more"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise InvalidArgument(f"softcap={softcap} must be positive and finite")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise InvalidArgument(
            f"sinks has shape {tuple(sinks.shape)}, needs one value a query head: ({q.shape[1]},)"
        )


def _whole(value: object) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, int) and abs(value) < 1 << 63


def check_packed(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor
) -> None:
    """Refuse cumulative lengths that do not describe a packed call."""
    if attn_mask is not None:
        raise InvalidArgument(
            "a packed call takes no attn_mask: its members are separated by cu_seqlens"
        )
    if q.shape[0] != 1:
        raise InvalidArgument(f"a packed call has batch 1, found {q.shape[0]}")
    for name, offsets, total in (
        ("cu_seqlens_q", cu_seqlens_q, q.shape[2]),
        ("cu_seqlens_kv", cu_seqlens_kv, k.shape[2]),
    ):
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(
                f"{name} must be one row of int32 or int64, "
                f"found {offsets.dtype} of {tuple(offsets.shape)}"
            )
        if offsets.numel() < 2:
            raise InvalidArgument(f"{name} needs at least two entries, found {offsets.numel()}")
        # What is fake or traced holds no numbers yet; the op looks again.
        if type(offsets) is Tensor and not torch.compiler.is_compiling():
            check_rising(name, offsets, total)
    if cu_seqlens_q.numel() != cu_seqlens_kv.numel():
        raise InvalidArgument(
            f"cu_seqlens_q and cu_seqlens_kv describe {cu_seqlens_q.numel() - 1} "
            f"and {cu_seqlens_kv.numel() - 1} members"
        )
