"""The attention and mask functions that transformers calls by name, for patched modules and for
those that only share a config with one. Knows no model family; imports transformers when called.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sagepatch.errors import MachineError
from sagepatch.functional import needs_grad, run
from sagepatch.layer import find_layer
from sagepatch.patchers.carrier import carried, count_elsewhere, recomputed_later
from sagepatch.patchers.code import own_forward
from sagepatch.patchers.passing import counted, form_of, passing, remember
from sagepatch.patchers.sdpa_redirect import SUBCLASS, TRAINING, plain_types
from sagepatch.spec import Call

# The name in a config tells what ran before, so that modules that are not patched (copies, other
# models with the same config) can run just that. None contains a word that transformers reads.
OVER_SDPA = "sagepatch"
OVER_SDPA_MASKED = "sagepatch_masked"
OVER_EAGER = "sagepatch_eager"
PREVIOUS: dict[str, str] = {OVER_SDPA: "sdpa", OVER_SDPA_MASKED: "sdpa", OVER_EAGER: "eager"}

DROPOUT = "training: dropout needs the original call"
MAP_WANTED = "output_attentions: the model's own eager attention gave the map"
EXTRA_TERMS = ("sinks", "indices", "block_indices")
# What makes a call more than torch's SDPA of its tensors.
_TERMS = ("position_bias", "softcap", "s_aux", *EXTRA_TERMS)
# What an eager attention function may take by name: what a call of ours can mean, what sends a call
# back to the original, and what the mask says already.
_KNOWN = frozenset(
    {
        "module",
        *("query", "key", "value", "query_states", "key_states", "value_states"),
        *("attention_mask", "scaling", "dropout", "is_causal", "sliding_window"),
        *_TERMS,
        *("output_attentions", "position_ids", "kwargs"),
    }
)
UNLIKE = "shapes that only the original function can serve"

Result = tuple[Tensor, Tensor | None]


@cache
def register() -> None:
    """Make our names known to transformers, attention and masks in one step; once a process."""
    from transformers import AttentionInterface

    try:
        from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
    except ImportError as error:
        raise MachineError(
            "this transformers has no registry of mask builders, without which a patched model "
            "would lose its masks: install transformers 5.17 or newer"
        ) from error

    def explicit_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        kwargs["allow_is_causal_skip"] = False
        mask: Tensor | None = sdpa_mask(*args, **kwargs)
        return mask

    for name, attend, build_mask in (
        (OVER_SDPA, attend_over_sdpa, sdpa_mask),
        (OVER_SDPA_MASKED, attend_over_sdpa, explicit_mask),
        (OVER_EAGER, attend_over_eager, eager_mask),
    ):
        AttentionMaskInterface.register(name, build_mask)
        AttentionInterface.register(name, attend)


def attend_over_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Result:
    """Attention of a module whose config said "sdpa": no mask means causal where the module is."""
    handle = carried(module)
    if handle is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # No mask: causal from the first key on, but a single query is the newest and sees all.
        causal = query.shape[2] > 1 and attention_mask is None and causal
        if _map_wanted(kwargs):
            eager = eager_function(type(module))
            if eager is not None:
                _count_map(handle)
                mask = _additive(query, key, attention_mask, causal)
                own: Result = eager(
                    module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
                )
                return own
        result = _attend(
            module,
            handle,
            query,
            key,
            value,
            attention_mask,
            dropout,
            scaling,
            causal,
            kwargs,
            original_is_exact=True,
        )
        if result is not None:
            return result
    before: Result = _sdpa_function()(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )
    return before


def attend_over_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Result:
    """Attention of a module whose config said "eager": what its mask does not hide is seen."""
    handle = carried(module)
    if handle is not None:
        if _map_wanted(kwargs):
            _count_map(handle)
        else:
            options = dict(kwargs)
            dropout, scaling = options.pop("dropout", 0.0), options.pop("scaling", None)
            result = _attend(
                module,
                handle,
                query,
                key,
                value,
                attention_mask,
                dropout,
                scaling,
                False,
                options,
                original_is_exact=False,
            )
            if result is not None:
                return result
    eager = eager_function(type(module))
    assert eager is not None  # `find` leaves modules alone whose eager function it cannot see
    before: Result = eager(module, query, key, value, attention_mask, **kwargs)
    return before


def eager_function(owner: type) -> Callable[..., Result] | None:
    """The eager attention that a module class falls back on, as its forward names it."""
    forward = own_forward(owner)
    if forward is None:
        return None
    for name in forward.__code__.co_names:
        if name.endswith("eager_attention_forward"):
            found: Callable[..., Result] | None = forward.__globals__.get(name)
            return found
    return None


def unknown_terms(owner: type) -> list[str]:
    """Arguments of a class's eager attention that we give no meaning: terms we would lose."""
    eager = eager_function(owner)
    return [] if eager is None else sorted(inspect.signature(eager).parameters.keys() - _KNOWN)


@cache
def _sdpa_function() -> Callable[..., Result]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    function: Callable[..., Result] = sdpa_attention_forward
    return function


def _attend(
    module: nn.Module,
    handle: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    options: dict[str, Any],
    *,
    original_is_exact: bool,
) -> Result | None:
    """The call through the op, or None where the original must run, counted: with its reason, or as
    exact attention of a layer that runs nothing else.
    """
    layer, form = None, None
    plain = dropout == 0.0 and all(options.get(term) is None for term in _TERMS)
    if original_is_exact and plain:
        layer = passing(handle)
        form = None if layer is None else form_of(query, key, value, mask, 0.0, causal)
    if layer is not None and form is not None and not module.training and counted(layer, form):
        return None
    bias = options.get("position_bias")
    if causal and key.shape[2] > query.shape[2]:
        # The first filling of a cache of fixed length: what follows is not written yet.
        length = query.shape[2]
        key, value = key[:, :, :length], value[:, :, :length]
        bias = bias if bias is None else bias[:, :, :, :length]
    if bias is not None:
        mask = _biased(key, mask, bias)
    sinks = options.get("s_aux")
    reason = _original_needed(query, key, value, mask, sinks, dropout, options)
    if reason is None:
        call = Call(
            query,
            key,
            value,
            1 / math.sqrt(query.shape[3]) if scaling is None else float(scaling),
            mask,
            0 if causal else None,
            softcap=options.get("softcap"),
            sinks=sinks,
            bshd_out=True,
        )
        if not (needs_grad(call) or recomputed_later(module)):
            if layer is not None and form is not None:
                remember(layer, form, call)
                return None
            return run(call, handle=handle)[0].transpose(1, 2), None
        reason = TRAINING
    count_elsewhere(handle, reason)
    return None


def _original_needed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> str | None:
    if dropout != 0.0:
        return DROPOUT
    for term in EXTRA_TERMS:
        if options.get(term) is not None:
            return f"{term}: a term of the scores that only the original function knows"
    if not torch.compiler.is_compiling() and not plain_types(query, key, value):
        return SUBCLASS
    fits = (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[:3] == value.shape[:3]
        and query.shape[1] % key.shape[1] == 0
        and query.device == key.device == value.device
        and (sinks is None or tuple(sinks.shape) == (query.shape[1],))
        and (mask is None or _fits(mask, query, key))
    )
    return None if fits else UNLIKE


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    B, H, Sq, Skv = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    return (
        mask.dim() == 4
        and (mask.dtype == torch.bool or mask.is_floating_point())
        and mask.shape[0] in (1, B)
        and mask.shape[1] in (1, H)
        and mask.shape[2] in (1, Sq)
        and mask.shape[3] in (1, Skv)
    )


def _biased(key: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
    """A mask and a position bias as one additive mask; hidden keys get the lowest finite score."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(key.dtype).min)
    return bias + mask


def _additive(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """The additive mask that eager attention expects, from what SDPA was given."""
    if mask is None and causal:
        rows = torch.arange(query.shape[2], device=query.device)
        columns = torch.arange(key.shape[2], device=query.device)
        mask = (rows[:, None] >= columns[None, :])[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)


def _map_wanted(options: dict[str, Any]) -> bool:
    """Whether this call has to give its attention map: asked by argument, or by who records it."""
    if options.get("output_attentions"):
        return True
    recorder = None if torch.compiler.is_compiling() else _recorder()
    recorded = None if recorder is None else recorder.get()
    return recorded is not None and any("attentions" in kind for kind in recorded)


@cache
def _recorder() -> Any:
    """Where transformers notes which outputs the running model call has to collect, if it does."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def _count_map(handle: Tensor) -> None:
    count_elsewhere(handle, MAP_WANTED)
    if not torch.compiler.is_compiling():
        layer = find_layer(handle)
        if layer is not None:
            layer.record.note(MAP_WANTED)
