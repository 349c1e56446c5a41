"""What `sagepatch.attention` and `sagepatch.apply` refuse of their arguments, each in a sentence.
Serves no call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from sagepatch.errors import InvalidArgument
from sagepatch.ops import check_rising

# What a scale and a soft cap can be: FP32 holds these, their inverse and their product with scores.
LEAST, MOST = 2.0**-100, 2.0**100
_WITHIN = "2**-100 to 2**100, which FP32 holds"


def check_tensors(given: Iterable[tuple[str, object]], *, needed: bool = False) -> None:
    """Refuse what is no tensor, or no dense one; None passes unless all are `needed`."""
    for name, value in given:
        if value is None and not needed:
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
        wrong = isinstance(value, (str, bytes, list, tuple, dict, set, frozenset))
        if wrong or _holds_several(value):
            raise InvalidArgument(f"{name} is {shown(value)}, needs True or False")


def shown(value: object) -> str:
    """A wrong argument in a sentence: its type, and what it holds where that is short."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= 60 and "\n" not in text else f"of type {kind}"


def _is_number(value: object) -> bool:
    if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat)):
        return True
    # Numbers of other libraries, and tensors that hold one.
    if isinstance(value, Tensor) and value.dtype.is_complex:
        return False
    return hasattr(value, "__float__") and not _holds_several(value)


def _holds_several(value: object) -> bool:
    """Whether a value is a tensor or an array with axes."""
    shape: object = getattr(value, "shape", None)
    return bool(shape)


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
    if scale is not None and scale != 0 and not LEAST <= abs(scale) <= MOST:
        raise InvalidArgument(f"scale is {shown(scale)}, needs {_WITHIN}, of either sign, or 0")
    for name, value in (("causal_offset", causal_offset), ("window", window)):
        if value is not None and not _whole(value):
            raise InvalidArgument(f"{name} is {shown(value)}, needs a whole number of 64 bits")
    if causal_offset is not None and not is_causal:
        raise InvalidArgument(f"causal_offset={causal_offset} needs is_causal=True")
    if window is not None and window < 1:
        raise InvalidArgument(
            f"window={window} must keep at least the token itself: pass 1 or more"
        )
    if softcap is not None and not LEAST <= softcap <= MOST:
        raise InvalidArgument(f"softcap is {shown(softcap)}, needs {_WITHIN}")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise InvalidArgument(
            f"sinks has shape {tuple(sinks.shape)}, needs one value a query head: ({q.shape[1]},)"
        )
    if sinks is not None and (sinks.dtype.is_complex or sinks.dtype == torch.bool):
        raise InvalidArgument(f"sinks has dtype {sinks.dtype}, needs real numbers")


def _whole(value: object) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    # True is a whole number to Python, and tensors do not count with it.
    if isinstance(value, bool):
        return False
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
        if _varies(offsets):
            raise InvalidArgument(
                f"{name} cannot differ over a vmap: call attention once for each row of it"
            )
        # What is fake or traced holds no numbers yet; the op looks again.
        if type(offsets) is Tensor and not torch.compiler.is_compiling():
            check_rising(name, offsets, total)
    if cu_seqlens_q.numel() != cu_seqlens_kv.numel():
        raise InvalidArgument(
            f"cu_seqlens_q and cu_seqlens_kv describe {cu_seqlens_q.numel() - 1} "
            f"and {cu_seqlens_kv.numel() - 1} members"
        )


def _varies(tensor: Tensor) -> bool:
    """Whether a `torch.vmap` around this call gives the tensor other numbers in each of its
    members.
    """
    if torch.compiler.is_compiling():
        return False
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
