"""diffusers' context parallelism over our op: Ulysses, ring and both at once.

Under plain Ulysses Q, K and V go in one exchange of ours. Otherwise diffusers exchanges the tensors
and merges the parts; only the attention of one process is ours, and gives the log-sum-exp that a
ring's merge needs. Knows no model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sagepatch.errors import InvalidArgument
from sagepatch.functional import run
from sagepatch.patchers.sdpa_redirect import sdpa_call
from sagepatch.spec import Call

OTHER_KIND = "a parallel configuration that is not diffusers' context parallelism"
CAUSAL = "diffusers' context parallelism has no causal attention"
GROUPED = "diffusers' context parallelism has no shared key heads"
RING_MASK = (
    "a mask in a ring: each process holds that of its own keys, and diffusers passes no more"
)
QUERY_MASK = "a mask over queries, which diffusers does not exchange between processes"
HEAD_MASK = "a mask over heads, whose uneven shares (ulysses_anything) only diffusers knows"


def refusal(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, parallel_config: Any
) -> str | None:
    """Why a call under `parallel_config` is left to diffusers, or None where ours can serve it.

    `query` [B, Sq, H, D] and `key` [B, Skv, H, D] are this process's share of the tokens; a mask is
    one that `sdpa_call` takes. Every process comes to the same answer: it rests on what they share.
    """
    shared = getattr(parallel_config, "context_parallel_config", None)
    if shared is None:
        return OTHER_KIND
    if is_causal:
        return CAUSAL
    if query.shape[2] != key.shape[2]:
        return GROUPED
    if attn_mask is None:
        return None
    if shared.ring_degree > 1:
        return RING_MASK
    if attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        return QUERY_MASK
    by_head = attn_mask.dim() > 2 and attn_mask.shape[-3] != 1
    return HEAD_MASK if by_head and shared.ulysses_anything else None


def run_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float,
    handle: Tensor,
    parallel_config: Any,
) -> Tensor:
    """Attention of this process's queries over the keys of all processes: [B, Sq, H, Dv].

    query [B, Sq, H, D], key [B, Skv, H, D] and value [B, Skv, H, Dv] are this process's share of
    the tokens; `attn_mask` is over its keys, [B, H, 1, Skv] or as broadcasts to it. Each process
    calls the layer of `handle` on what diffusers brings it: with Ulysses all tokens of some heads,
    in a ring once for each process's keys. Forward only: a backward raises `InvalidArgument`.
    """
    if attn_mask is None and goes_together(query, key, value, parallel_config):
        return exchanged_once(query, key, value, scale, handle, parallel_config)
    return exchanged_by_diffusers(query, key, value, attn_mask, scale, handle, parallel_config)


def goes_together(query: Tensor, key: Tensor, value: Tensor, parallel_config: Any) -> bool:
    """Whether Q, K and V can go in one exchange: plain Ulysses, and three tensors alike."""
    shared = parallel_config.context_parallel_config
    return (
        shared.ring_degree == 1
        and not shared.ulysses_anything
        and query.shape == key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
        and query.shape[2] % shared.ulysses_degree == 0
    )


def exchanged_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    handle: Tensor,
    parallel_config: Any,
) -> Tensor:
    """Ulysses with one exchange before the attention, which reads the tensors as they arrive, and
    one behind it. Jacobs et al., DeepSpeed Ulysses (2023).
    """
    shared = parallel_config.context_parallel_config
    world, group = shared.ulysses_degree, shared._ulysses_mesh.get_group()
    B, S, H, D = query.shape
    h = H // world
    # Heads of each process together: [world, S, B, 3, h, D].
    apart = [t.reshape(B, S, world, h, D).permute(2, 1, 0, 3, 4) for t in (query, key, value)]
    all_tokens = _to_each(torch.stack(apart, 3), group).flatten(0, 1)
    q, k, v = all_tokens.permute(2, 1, 3, 0, 4).unbind(0)  # [B, h, world * S, D]
    out, _ = run(Call(q, k, v, scale, bshd_out=True), handle=handle)
    parts = out.transpose(1, 2).reshape(B, world, S, h, D).permute(1, 2, 0, 3, 4)
    own_tokens = _to_each(parts.contiguous(), group)  # [world, S, B, h, D]
    return own_tokens.permute(2, 1, 0, 3, 4).reshape(B, S, H, D)


def _to_each(sent: Tensor, group: Any) -> Tensor:
    """Part r of the first axis goes to process r, and theirs come in the same order."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        flat = functional.all_to_all_single(sent.flatten(), None, None, group)
        got: Tensor = functional.wait_tensor(flat).reshape(sent.shape)
        return got
    arrived = torch.empty_like(sent)
    # Without the functional collective's dispatch, which costs the host more than a launch.
    torch.distributed.all_to_all_single(arrived, sent, group=group)
    return arrived


def exchanged_by_diffusers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float,
    handle: Tensor,
    parallel_config: Any,
) -> Tensor:
    """As diffusers itself does it, with our attention between its exchanges."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    out: Tensor = _templated_context_parallel_attention(
        query,
        key,
        value,
        # Gathered from all processes, which takes no gaps.
        None if attn_mask is None else attn_mask.contiguous(),
        scale=scale,
        forward_op=functools.partial(_attend, handle),
        backward_op=_refuse_backward,
        _parallel_config=parallel_config,
    )
    return out


def _attend(
    handle: Tensor,
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One call as diffusers makes it: the output [B, Sq, H, Dv], with `return_lse` also the natural
    log-sum-exp [B, Sq, H] fp32.
    """
    from diffusers.models.attention_dispatch import _wait_tensor

    # In a ring the keys of others may still be on their way until now.
    query, key, value = (_wait_tensor(tensor) for tensor in (query, key, value))
    if attn_mask is not None:
        attn_mask = _of_own_heads(attn_mask, query.shape[2], _parallel_config)
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
    # Every reason against a call was looked for before the exchange, which changes none of them.
    assert not isinstance(call, str), call
    out, lse = run(replace(call, return_lse=return_lse), handle=handle)
    out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.transpose(1, 2)


def _of_own_heads(attn_mask: Tensor, heads: int, parallel_config: Any) -> Tensor:
    """The part of a mask for the `heads` that Ulysses gave this process: diffusers exchanges its
    keys and leaves all heads in it.
    """
    if attn_mask.dim() < 3 or attn_mask.shape[-3] in (1, heads):
        return attn_mask
    rank: int = parallel_config.context_parallel_config._ulysses_local_rank
    return attn_mask.narrow(-3, rank * heads, heads)


def _refuse_backward(*args: Any, **kwargs: Any) -> Any:
    raise InvalidArgument(
        "quantised attention under context parallelism has no backward: "
        "call the model under torch.no_grad(), or take the patch back to train"
    )


def name_handle(handle: Tensor, before: Any, holder: Any) -> Callable[[], object]:
    """Let diffusers read a layer's handle, where it expects a backend's name, as the backend that
    the layer had before: `enable_parallelism` looks its first processor's up.

    It is one entry beside the names in the enum's table, gone with the call that is returned, or
    with `holder`, the processor that carries the handle.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    active, _ = _AttentionBackendRegistry.get_active_backend()
    table: dict[Any, Any] = AttentionBackendName._value2member_map_
    table[handle] = AttentionBackendName(active if before is None else before)
    return weakref.finalize(holder, table.pop, handle, None)
