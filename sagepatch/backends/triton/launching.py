"""Launches of Triton kernels, noted so that calls of the same kind launch the machine code
themselves, parameters packed once. Knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sagepatch.backends import prepared
from sagepatch.backends.cuda.cubin import resources
from sagepatch.backends.driver import PROMOTION_128_BYTES, tensor_map
from sagepatch.backends.links import Argument, Link, Moving, MovingMap
from sagepatch.backends.parameters import FLAG, FLOAT, INT, LONG, MAP, POINTER, Layout
from sagepatch.spec import Call

# Scratch tensors start at multiples of this, as torch's allocator aligns its blocks.
ALIGNMENT = 512
# Of the parameters of our kernels, the softmax scale times log2(e).
FACTOR_NAME = "factor"
_LETTERS = {
    **{"i1": FLAG, "i8": FLAG, "i32": INT, "u32": INT},
    **{"i64": LONG, "u64": LONG, "fp32": FLOAT},
}
# Triton numbers the types of tensor maps as the device does, the driver otherwise.
_TYPES = {8: 10, 9: 8, 10: 9}
MOST_MAPS = 8192
MOST_KERNELS = 1024


@dataclass(slots=True)
class Recording:
    """The launches of one call, in order: compiled kernel, programs, every argument."""

    launches: list[tuple[Any, int, list[Any]]] = field(default_factory=list)


def launch(
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    recording: Recording | None,
    **options: Any,
) -> None:
    """Launch `kernel` on a grid of one axis; `constants` are its last parameters, in order."""
    compiled = kernel[(programs,)](*args, **constants, **options)
    if recording is not None and compiled is not None:
        recording.launches.append((compiled, programs, [*args, *constants.values()]))


# What of a call's tensors is whose place among the values of a chain.
_PLACES = {
    "q": prepared.Q,
    "k": prepared.K,
    "v": prepared.V,
    "mask": prepared.MASK,
    "cu_q": prepared.CU_Q,
    "cu_k": prepared.CU_K,
    "out": prepared.OUT,
    "lse": prepared.LSE,
    "flags": prepared.FLAGS,
}


def apart(call: Call) -> Call:
    """The same call, each tensor that has a place among the values of a chain an object of its own:
    one for two of them would be one place.
    """
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_kv
    return replace(
        call,
        q=call.q.detach(),
        k=call.k.detach(),
        v=call.v.detach(),
        cu_seqlens_q=None if cu_q is None else cu_q.detach(),
        cu_seqlens_kv=None if cu_k is None else cu_k.detach(),
    )


def tensors_of(
    call: Call, out: Tensor, lse: Tensor | None, flags: Tensor | None
) -> dict[str, Tensor | None]:
    """The tensors of a call, by name."""
    return {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "mask": call.attn_mask,
        "cu_q": call.cu_seqlens_q,
        "cu_k": call.cu_seqlens_kv,
        "out": out,
        "lse": lse,
        "flags": flags,
    }


def links_of(
    recording: Recording, tensors: dict[str, Tensor | None], scratch: int = 0
) -> tuple[list[Link], int] | None:
    """The launches of a recording as links of a chain, and the end of the scratch memory that they
    want from `scratch` on; None where nothing was launched, or a kernel asks for more than a plain
    launch has.

    `tensors` are those of the call, by the names above; any other one is scratch memory.
    """
    places = {id(tensor): _PLACES[name] for name, tensor in tensors.items() if tensor is not None}
    mask = tensors.get("mask")
    offsets: dict[int, int] = {}
    end = scratch

    def moving(tensor: Tensor) -> Moving:
        nonlocal end
        if id(tensor) in places:
            return Moving(places[id(tensor)])
        # By address: a descriptor holds a view of the tensor that another launch wrote, and a mask
        # goes by its bytes.
        pointer = tensor.data_ptr()
        if mask is not None and pointer == mask.data_ptr():
            return Moving(prepared.MASK)
        if pointer not in offsets:
            offsets[pointer] = end
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return Moving(prepared.SCRATCH, offsets[pointer])

    links = []
    for compiled, programs, args in recording.launches:
        link = _link(compiled, programs, args, moving)
        if link is None:
            return None
        links.append(link)
    return (links, end) if links else None


def _link(
    compiled: Any, programs: int, args: list[Any], moving: Callable[[Tensor], Moving]
) -> Link | None:
    """One launch, its parameters in the order that Triton gives them: arguments that are no
    constants, a descriptor as its map, shape and strides, and two pointers to scratch memory of its
    own, which our kernels have not.
    """
    layout = _layout_of(compiled)
    if layout is None:
        return None
    found = list[Argument]()
    described = iter(compiled.metadata.tensordesc_meta or ())
    for (name, kind), arg in zip(compiled.src.signature.items(), args, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            at = moving(arg.base)
            encode = partial(_encoded, *_map_form(next(described), arg))
            found += [MovingMap(at.value, at.offset, encode), *arg.shape, *arg.strides]
        elif kind.startswith("*"):
            found.append(moving(arg))
        elif name == FACTOR_NAME:
            found.append(Moving(prepared.FACTOR))
        else:
            found.append(arg)
    return Link(
        name=compiled.metadata.name,
        function=compiled.function,
        blocks=programs,
        threads=32 * compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        layout=layout,
        args=(*found, 0, 0),
        owner=compiled,
    )


@lru_cache(maxsize=MOST_KERNELS)
def _layout_of(compiled: Any) -> Layout | None:
    """The parameters of a compiled kernel; None where it asks for more than a plain launch has, or
    its machine code takes others than its signature says.
    """
    said = compiled.metadata
    if said.num_ctas != 1 or said.launch_cooperative_grid or said.launch_pdl:
        return None
    if said.global_scratch_size or said.profile_scratch_size:
        return None
    letters = ""
    described = iter(said.tensordesc_meta or ())
    for kind in compiled.src.signature.values():
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            form = next(described, None)
            if form is None:
                return None
            rank = len(form["block_size"])
            letters += MAP + INT * rank + LONG * rank
        elif kind.startswith("*"):
            letters += POINTER
        elif kind in _LETTERS:
            letters += _LETTERS[kind]
        else:
            return None
    layout = Layout.of(letters + 2 * POINTER)
    (made,) = (r for r in resources(compiled.asm["cubin"]) if r.kernel == said.name)
    return layout if layout.sizes == tuple(size for _, size in made.params) else None


def _map_form(form: dict[str, Any], descriptor: TensorDescriptor) -> tuple[Any, ...]:
    """What a tensor map of a descriptor is made from, but for the address."""
    assert descriptor.padding == "zero"
    return (
        _TYPES.get(form["elem_type"], form["elem_type"]),
        form["elem_size"],
        tuple(descriptor.shape),
        tuple(descriptor.strides[:-1]),
        tuple(form["block_size"]),
        form["swizzle"],
    )


@lru_cache(maxsize=MOST_MAPS)
def _encoded(
    kind: int,
    element_bytes: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    pointer: int,
) -> bytes:
    return tensor_map(
        pointer, kind, element_bytes, shape, strides, box, swizzle, PROMOTION_128_BYTES
    )
