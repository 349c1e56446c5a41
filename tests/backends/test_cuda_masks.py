"""The Hopper kernel under causal offsets, windows, masks of keys and packed lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from cuda_support import DEVICE, check, dims, every_recipe, make, needs_hopper

from sagepatch.backends.cuda import attention_tiles

pytestmark = needs_hopper

CAUSAL = [
    *((300, 300, 0, None), (70, 530, 460, None), (530, 170, -360, None), (20, 20, -30, None)),
    *((700, 700, 0, 100), (1000, 1000, 0, 257), (513, 900, 200, 1), (1500, 1500, 0, None)),
]


# case 42 for the windows
@pytest.mark.parametrize("case", CAUSAL, ids=str)
@dims
@every_recipe
def test_causal_offsets_and_windows(recipe, dim, case):
    Sq, Skv, offset, window = case
    check(make((1, 2, 1, Sq, Skv, dim), causal_offset=offset, window=window), recipe)


@pytest.mark.parametrize("causal_offset", [None, 900])
@pytest.mark.parametrize("kind", ["prefix", "random", "nothing"])
@dims
@every_recipe
def test_key_masks(recipe, dim, kind, causal_offset):
    B, Skv = 3, 1500
    keys = torch.arange(Skv)
    if kind == "prefix":
        mask = keys[None] < torch.tensor([Skv, 123, 640])[:, None]
    elif kind == "random":
        mask = torch.rand(B, Skv, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[:, 130:500] = False
        mask[:, 512:1100] = True
    else:
        mask = (keys[None] < 1000).expand(B, Skv).clone()
        mask[1] = False
    call = make((B, 2, 1, 300, Skv, dim), causal_offset=causal_offset)
    hidden = ~mask.to(DEVICE)[:, None, :, None]
    # Whatever bytes lie there.
    call = replace(
        call,
        attn_mask=mask.to(DEVICE)[:, None, None],
        k=call.k.masked_fill(hidden, float("nan")),
        v=call.v.masked_fill(hidden, float("nan")),
    )
    out = check(call, recipe)
    if kind == "nothing":
        assert not out[1].any()


@dims
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@every_recipe
def test_packed_lengths(recipe, dim, causal):
    if attention_tiles.pick(recipe, dim, dim).block_n > 128:
        pytest.skip("a tile of 192 keys would reach into the next member")
    ends_q = torch.tensor([0, 5, 5, 205, 500, 777], dtype=torch.int32, device=DEVICE)
    ends_kv = torch.tensor([0, 130, 200, 205, 700, 1000], dtype=torch.int32, device=DEVICE)
    if causal:
        ends_kv = ends_q
    total = int(ends_kv[-1])
    call = make(
        (1, 4, 2, 777, total, dim),
        cu_seqlens_q=ends_q,
        cu_seqlens_kv=ends_kv,
        causal_offset=0 if causal else None,
    )
    check(call, recipe)
