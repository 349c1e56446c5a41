"""diffusers' attention dispatcher as a patched processor sees it, and the private globals that put
it in the processor's reach; no module or class of diffusers changes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sagepatch.functional import needs_grad, run
from sagepatch.layer import find_layer
from sagepatch.patchers.carrier import count_elsewhere, recomputed_later
from sagepatch.patchers.code import reached
from sagepatch.patchers.diffusers_processors import DISPATCH
from sagepatch.patchers.parallel import refusal, run_parallel
from sagepatch.patchers.sdpa_redirect import OBSERVED, TRAINING, observed_by_others, sdpa_call
from sagepatch.spec import Call

SPARSE = "a block mask, which only diffusers' flex backend reads"
EXTRA = "arguments for one backend only (attention_kwargs)"
REPLACED = "another library has put its own function in the place of diffusers' dispatcher"


def over_private_globals(method: types.FunctionType, before: Any) -> types.FunctionType:
    """A method's code over globals whose dispatcher knows our handles.

    `before` is the backend that calls go to which are not ours to take.
    """
    home = method.__globals__["__name__"]
    _private_globals(home, before)
    return _over(method, _private(home, before))


def is_diffusers_own(dispatcher: Any) -> bool:
    """Whether a dispatcher is diffusers', and not what somebody has put in its place."""
    home = getattr(dispatcher, "__globals__", {}).get("__name__")
    return home == "diffusers.models.attention_dispatch"


def make_dispatch(
    plain: Callable[..., Any], before: Any, *, replaced: bool = False
) -> Callable[..., Any]:
    """`dispatch_attention_fn` where a layer's handle, a Tensor, may arrive as `backend`.

    With `replaced`, `plain` is somebody else's: every call is its, counted with the reason.

    Tensors are [B, S, H, D], as in diffusers. A call without a handle, and one that no kernel of
    ours could mean the same by, is `plain`'s, arguments untouched.
    """

    def dispatch_attention_fn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Any:
        handle = backend if isinstance(backend, Tensor) else None
        if handle is not None:
            call: Call | str
            if replaced:
                call = REPLACED
            elif attention_kwargs:
                call = EXTRA
            elif attn_mask is not None and not isinstance(attn_mask, Tensor):
                call = SPARSE
            else:
                call = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if not isinstance(call, str) and _recomputed_later(handle):
                call = TRAINING
            if parallel_config is not None and not isinstance(call, str):
                call = refusal(query, key, call.attn_mask, is_causal, parallel_config) or call
            if not isinstance(call, str):
                if parallel_config is not None:
                    mask, scale = call.attn_mask, call.scale
                    return run_parallel(query, key, value, mask, scale, handle, parallel_config)
                return run(call, handle=handle)[0].transpose(1, 2)
            count_elsewhere(handle, call)
            backend = before
        return plain(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            attention_kwargs=attention_kwargs,
            backend=backend,
            parallel_config=parallel_config,
        )

    return dispatch_attention_fn


def _recomputed_later(handle: Tensor) -> bool:
    """As `recomputed_later`, of the module that this handle's layer was installed on."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    layer = find_layer(handle)
    module = None if layer is None else layer.module()
    return module is not None and recomputed_later(module)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Call | str:
    if (
        attn_mask is not None
        and attn_mask.dim() == 2
        and attn_mask.shape[0] == query.shape[0]
        and attn_mask.shape[1] == key.shape[1]
    ):
        # diffusers takes a mask of [B, Skv] as one row of keys a sample; SDPA would as [Sq, Skv].
        attn_mask = attn_mask[:, None, None, :]
    call = sdpa_call(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
    )
    if isinstance(call, str):
        return call
    if observed_by_others():
        return OBSERVED
    return TRAINING if needs_grad(call) else call


@dataclass(slots=True)
class _Private:
    """The globals of a module of diffusers, with our dispatcher and the functions that call it, and
    what the module held when they were last brought up to date.

    `codes` holds, by the id of a code object of the module, that and the like of it that runs over
    `namespace`.
    """

    namespace: dict[str, Any]
    source: dict[str, Any]
    codes: dict[int, tuple[types.CodeType, types.CodeType]]


def refresh(methods: Iterable[types.FunctionType], before: Any) -> None:
    """Bring private globals of these methods up to date: what somebody has put in the place of a
    helper or of the dispatcher since counts from the next patch on, as it does unpatched.
    """
    for name in {m.__globals__["__name__"] for m in methods if DISPATCH in m.__globals__}:
        _private_globals(name, before)


def _private_globals(source_name: str, before: Any) -> dict[str, Any]:
    source = vars(sys.modules[source_name])
    private = _private(source_name, before)
    known = private.source
    same = known.keys() == source.keys() and all(known[key] is source[key] for key in known)
    if not same:
        private.source = dict(source)
        _fill(private, source, before, known.keys() - source.keys())
    return private.namespace


@functools.cache
def _private(source_name: str, before: Any) -> _Private:
    """Empty globals in a module of `sys.modules` under their own `__name__`, where Dynamo's guards
    look.
    """
    suffix = "" if before is None else f".{getattr(before, 'value', before)}"
    module = types.ModuleType(f"sagepatch.patched.{source_name}{suffix}")
    sys.modules[module.__name__] = module
    return _Private(module.__dict__, {}, {})


def _fill(private: _Private, source: dict[str, Any], before: Any, gone: Iterable[str]) -> None:
    """Key by key: other threads may be running over these globals."""
    namespace = private.namespace
    for key in gone:
        namespace.pop(key, None)
    for key, value in source.items():
        if key == "__name__":
            continue
        own = isinstance(value, types.FunctionType) and value.__globals__ is source
        if key == DISPATCH:
            value = make_dispatch(value, before, replaced=not is_diffusers_own(value))
        elif own and any(name == DISPATCH for _, name in reached(value, type(None))):
            value = _over(value, private)
        namespace[key] = value


def _over(function: types.FunctionType, private: _Private) -> types.FunctionType:
    copy = types.FunctionType(
        _own_code(function.__code__, private),
        private.namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    return copy


def _own_code(code: types.CodeType, private: _Private) -> types.CodeType:
    """A code object equal to `code` and not the same: the compiler keeps what it makes of a frame
    by its code object, and looks up the pieces in the globals of whoever runs it next. Over two
    globals, one of them would not have these pieces.
    """
    known = private.codes.get(id(code))
    if known is None:
        known = private.codes.setdefault(id(code), (code, code.replace()))
    return known[1]
