"""The Hopper kernel against its emulator and against the same loop of tiles in torch: shapes,
masks, layouts and edges of a call. All of it needs an sm_90 GPU; test_cuda_sass.py does not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc")

from attention_calls import poison, random_call

from sagepatch.backends.cuda import attention, attention_tiles
from sagepatch.numerics import quantize
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.exact import exact, members
from sagepatch.numerics.masks import merged_mask
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.prepass import prepare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
DEVICE = torch.device("cuda", 0)

SERVED = [RECIPES[name] for name in attention_tiles.SERVED]
every_recipe = pytest.mark.parametrize("recipe", SERVED, ids=lambda r: r.name)
dims = pytest.mark.parametrize("dim", [64, 128])
# The kernel's own faults, against the same tiles in the same order: exp2 of the hardware and the
# polynomial one move a few codes of P to their neighbours.
REL_L1 = {"e4m3": 0.012, "fp16": 0.002}
LSE_ABS = 1e-2

make = partial(random_call, DEVICE)


def by_tiles(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """What the kernel computes, from the emulator's codes, in the kernel's tiles and in order of
    keys: output and log-sum-exp, fp32. `emulate` has the recipe's own tiles, and another running
    maximum rounds P elsewhere.
    """
    tile = attention_tiles.pick(recipe, call.q.shape[3], call.v.shape[3])
    operands = prepare(call, recipe)
    group = call.q.shape[1] // call.k.shape[1]
    k = operands.k_codes.repeat_interleave(group, 1).double()
    s = (operands.q_codes.double() @ k.mT).float() * operands.q_scale_log2
    s = s * operands.k_scale.repeat_interleave(group, 1)
    mask = merged_mask(call)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    v = operands.v_codes.repeat_interleave(group, 1)
    m = s.new_full((*s.shape[:3], 1), -torch.inf)
    total, acc = torch.zeros_like(m), s.new_zeros(*s.shape[:3], v.shape[3])
    code = torch.float16 if recipe.pv == "fp16" else torch.float8_e4m3fn
    for first in _order(call, tile.block_n):
        x = s[..., first : first + tile.block_n]
        m_new = torch.maximum(m, x.amax(3, keepdim=True))
        base = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p, decay = torch.exp2(x - base), torch.exp2(m - base)
        codes = quantize.round_to(p * recipe.p_range, code)
        row_sum = codes.sum(3, True) / recipe.p_range if tile.ones else p.sum(3, True)
        total, acc = total * decay + row_sum, acc * decay
        for at in range(0, x.shape[3], tile.flush):
            part = codes[..., at : at + tile.flush]
            values = v[:, :, first + at : first + at + part.shape[3]]
            added = part @ values
            half = recipe.keys_per_flush is not None
            acc = acc + (quantize.round_to(added, torch.float16) if half else added)
        m = m_new
    empty = total == 0
    out = acc / (recipe.p_range * total.masked_fill(empty, 1.0))
    out = (out * operands.v_scale.repeat_interleave(group, 1)).masked_fill(empty, 0.0)
    lse = (m + torch.log2(total) + operands.shift_log2) * 0.6931471805599453
    return out, lse.squeeze(3)


def _order(call: Call, block_n: int) -> list[int]:
    """First keys of the tiles in the order that the kernel takes: with a mask of keys and no
    positions those that are seen whole come first. One batch member then, where masks differ.
    """
    firsts = list(range(0, call.k.shape[2], block_n))
    if call.attn_mask is None or call.causal_offset is not None:
        return firsts
    seen = call.attn_mask[0, 0, 0]
    return sorted(firsts, key=lambda first: int(seen[first : first + block_n].sum()) < block_n)


def _alone(call: Call) -> list[Call]:
    """The members of a packed call, or of a batch whose masks differ."""
    if call.packed:
        return members(call)
    if call.attn_mask is None or call.attn_mask.shape[0] == 1:
        return [call]
    return [
        replace(
            call,
            **{n: getattr(call, n)[i : i + 1] for n in ("q", "k", "v", "attn_mask")},
        )
        for i in range(call.q.shape[0])
    ]


def check(call: Call, recipe: Recipe, *, shared: bool = False) -> Tensor:
    """Run on poisoned memory; hold the result to the same tiles in torch. Codes of P follow the
    maximum of a part where blocks are `shared`: FP8 is as far then as two roundings are from each
    other, and must be as near to exact attention as before.
    """
    poison(call)
    out, lse = attention.run(replace(call, return_lse=True), recipe)
    parts = [by_tiles(c, recipe) for c in _alone(call)]
    axis = 2 if call.packed else 0
    expected = torch.cat([part[0] for part in parts], axis)
    expected_lse = torch.cat([part[1] for part in parts], axis)
    assert out.dtype == call.v.dtype
    assert out.shape == expected.shape
    worst = compare(out.float(), expected).worst
    assert worst.finite
    if shared and recipe.pv == "e4m3":
        assert worst.rel_l1 <= 0.035, worst
        truth = exact(call)[0].float()
        before = compare(expected.to(out.dtype).float(), truth).worst.rel_l1
        assert compare(out.float(), truth).worst.rel_l1 <= 1.05 * before + 0.001
    else:
        assert worst.rel_l1 <= REL_L1[recipe.pv] + torch.finfo(out.dtype).eps, worst
    assert lse is not None
    same = (lse == expected_lse) | ((lse - expected_lse).abs() < LSE_ABS)
    assert bool(same.all()), (lse - expected_lse).abs().max()
    # Without a log-sum-exp the attention makes the codes of Q itself: the same ones.
    poison(call)
    alone, _ = attention.run(replace(call, return_lse=False), recipe)
    assert torch.equal(out, alone)
    return out


# case 1, case 2: tails of every size
LENGTHS = [
    *((1, 1), (2, 9), (63, 127), (65, 129), (128, 64), (129, 191), (130, 255), (192, 193)),
    *((1, 503), (333, 700), (1000, 384), (1001, 4111)),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@dims
@every_recipe
def test_lengths(recipe, dim, lengths):
    call = make((2, 4, 2, *lengths, dim))
    raw_q = attention.raw_strides(call, recipe)
    shared = attention.launch_of(attention.Shape.of(call, recipe, call.empty_out(), raw_q)).split
    first = check(call, recipe, shared=shared)
    poison(call)
    again, _ = attention.run(call, recipe)
    assert torch.equal(first, again)  # two runs agree to the bit


SHARED = [
    *((1, 2, 2, 128, 384), (2, 4, 2, 333, 700), (1, 1, 1, 1, 1), (1, 5, 5, 2000, 1111)),
    *((1, 1, 1, 1000, 9111), (3, 20, 4, 1300, 800), (1, 40, 8, 900, 300)),
]


@pytest.mark.parametrize("shape", SHARED, ids=str)
@dims
@every_recipe
def test_blocks_that_several_share(recipe, dim, shape, monkeypatch):
    if not attention_tiles.pick(recipe, dim, dim).shares:
        pytest.skip("not shared at this size")
    monkeypatch.setattr(attention, "splits", lambda *facts: True)
    monkeypatch.setattr(attention, "_READY", {})
    attention.launch_of.cache_clear()
    check(make((*shape, dim)), recipe, shared=True)
    attention.launch_of.cache_clear()


# Other ways to run a tile, tuned by benchmarks/cuda_tiles.py: the same numbers.
WAYS = {
    "turns": {"serial": False, "pingpong": True, "warpgroups": 2},
    "no turns": {"serial": False, "pingpong": False, "warpgroups": 2},
    "serial": {"serial": True, "pingpong": False, "warpgroups": 3},
    "no ones": {"ones": False},
    "no polynomial": {"polynomial": 0},
    "polynomial": {"polynomial": 2},
}


@pytest.mark.parametrize("way", WAYS)
@dims
@every_recipe
def test_other_ways_to_run_a_tile(recipe, dim, way, monkeypatch):
    tile = attention_tiles.pick(recipe, dim, dim)
    if way == "serial" and tile.block_n > 128:
        pytest.skip("scores of 192 keys do not fit in 160 registers")
    other = replace(tile, **WAYS[way])
    monkeypatch.setattr(attention_tiles, "pick", lambda *facts: other)
    monkeypatch.setattr(attention, "pick", lambda *facts: other)
    monkeypatch.setattr(attention, "_READY", {})
    attention_tiles.instance.cache_clear()
    attention.launch_of.cache_clear()
    for shape in ((2, 4, 2, 333, 700, dim), (1, 1, 1, 1000, 4111, dim)):
        check(make(shape), recipe)
        check(make(shape, causal_offset=60, window=500), recipe)
    attention_tiles.instance.cache_clear()
    attention.launch_of.cache_clear()


def test_when_blocks_are_shared():
    assert attention.splits(576, 36, 132)  # 4.4 rounds
    assert not attention.splits(864, 36, 132)  # 6.5 rounds: a little idle costs less
    assert not attention.splits(4200, 32, 132)  # 31.8 rounds
    assert not attention.splits(132, 10, 132)
    assert not attention.splits(4, 10, 132)  # too little to share
    assert attention.splits(40, 100, 132)


@every_recipe
def test_the_emulator_itself_is_as_near_as_other_tiles_allow(recipe):
    call = make((1, 2, 2, 500, 1300, 128))
    out, _ = attention.run(call, recipe)
    worst = compare(out.float(), emulate(call, recipe)[0]).worst
    assert worst.cosine > (0.9999 if recipe.pv == "fp16" else 0.999)
    assert compare(out.float(), exact(call)[0]).worst.cosine > 0.998


# case 5: head sizes that no swizzle fits
@pytest.mark.parametrize("dim", [8, 36, 40, 72, 80, 96, 100, 112, 160, 184, 192, 216, 248, 256])
@every_recipe
def test_head_sizes(recipe, dim):
    if attention_tiles.refusal(recipe, dim, dim) is None:
        check(make((1, 2, 1, 200, 400, dim)), recipe)


# case 12
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64), (40, 33), (192, 128)], ids=str)
@every_recipe
def test_value_size_of_its_own(recipe, sizes):
    if attention_tiles.refusal(recipe, *sizes) is None:
        check(make((1, 2, 1, 200, 400, *sizes)), recipe)


# case 6
@pytest.mark.parametrize("scale", [1.0, 0.0625, 0.0, -0.1])
@every_recipe
def test_scale_is_the_callers(recipe, scale):
    check(make((1, 2, 2, 66, 300, 64), scale=scale), recipe)


# case 11: every kv head holds its own constant
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_query_heads_share_key_heads_in_blocks(kv_heads):
    call = make((1, 8, kv_heads, 40, 50, 64))
    v = torch.arange(1, kv_heads + 1, device=DEVICE, dtype=call.v.dtype)
    v = v.view(1, -1, 1, 1).expand_as(call.v)
    out, _ = attention.run(replace(call, v=v), RECIPES["sage2_8"])
    expected = v.repeat_interleave(8 // kv_heads, 1)[:, :, :1].expand_as(out)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.01, atol=0)


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


# case 9, case 10
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 8, 2, 130, 60, 64), (1, 8, 8, 8, 8, 64)], ids=str)
def test_memory_orders(shape, dtype):
    call = make(shape, bshd_out=True, dtype=dtype)
    out = check(call, RECIPES["sage2_8"])
    assert out.transpose(1, 2).is_contiguous()
    plain, _ = attention.run(replace(call, bshd_out=False), RECIPES["sage2_8"])
    assert plain.is_contiguous()
    assert torch.equal(plain, out)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@every_recipe
def test_nan_reaches_the_output(recipe, which):
    call = make((1, 2, 2, 200, 300, 64))
    tensor = getattr(call, which)
    tensor[0, 1, 150, 7] = float("nan")
    out, _ = attention.run(call, recipe)
    assert out[0, 1].isnan().any()
    assert out[0, 0].isfinite().all()


def test_nothing_to_see_and_nothing_to_ask():
    recipe = RECIPES["sage2_8"]
    out, lse = attention.run(make((1, 2, 2, 5, 0, 64), return_lse=True), recipe)
    assert not out.any()
    assert lse is not None
    assert (lse == -torch.inf).all()
    out, _ = attention.run(make((1, 2, 2, 0, 5, 64)), recipe)
    assert out.shape == (1, 2, 0, 64)


def test_queries_that_no_tensor_map_describes_get_their_codes_before():
    recipe = RECIPES["sage2_8"]
    call = make((2, 4, 2, 200, 300, 64))
    expected, _ = attention.run(call, recipe)
    odd = torch.empty(2, 4, 200, 65, dtype=call.q.dtype, device=DEVICE)[..., 1:]
    odd.copy_(call.q)
    one = call.q[:1].expand_as(call.q)
    bshd = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert attention.raw_strides(call, recipe)
    assert attention.raw_strides(replace(call, q=bshd), recipe)
    assert attention.raw_strides(replace(call, q=odd), recipe) is None
    assert attention.raw_strides(replace(call, q=one), recipe) is None
    assert attention.raw_strides(replace(call, return_lse=True), recipe) is None
    assert attention.raw_strides(call, RECIPES["sage1_b"]) is None
    for q in (bshd, odd):
        assert torch.equal(attention.run(replace(call, q=q), recipe)[0], expected)
    expected, _ = attention.run(replace(call, q=one.contiguous()), recipe)
    assert torch.equal(attention.run(replace(call, q=one), recipe)[0], expected)


@pytest.mark.parametrize("name", ["sage2_8", "sage2pp_8_d4"])
def test_streams_and_graphs(name):
    recipe = RECIPES[name]
    call = make((1, 8, 8, 1000, 1000, 128))
    expected, _ = attention.run(call, recipe)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside, _ = attention.run(call, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(expected, beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = attention.run(call, recipe)
    captured.zero_()
    graph.replay()
    assert torch.equal(expected, captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage2_8", "sage2pp_8_d6", "sage1_b_f32"])
def test_very_long_and_past_two_to_the_31st(name):
    recipe = RECIPES[name]
    long = make((1, 1, 1, 200, 200_000, 64))
    out, _ = attention.run(long, recipe)
    assert compare(out.float(), exact(long)[0]).worst.cosine > 0.998
    # The last of many heads lies past 2^31 elements of q and out.
    q = torch.zeros(1, 140_000, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    small = make((1, 1, 1, 128, 100, 128))
    q[:, -1] = small.q[0]
    k, v = (t.expand(1, 1, -1, -1) for t in (small.k, small.v))
    out, _ = attention.run(replace(small, q=q, k=k, v=v), recipe)
    alone, _ = attention.run(small, recipe)
    assert torch.equal(out[:, -1], alone[0, :1])
