"""The Hopper kernel against its emulator and against the same loop of tiles in torch: lengths, head
sizes, and ways to run a tile. test_cuda_sass.py needs no GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from attention_calls import poison
from cuda_support import DEVICE, check, dims, every_recipe, is_shared, make, needs_hopper

from sagepatch.backends import prepared
from sagepatch.backends.cuda import attention, attention_tiles
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES

pytestmark = needs_hopper

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
    first = check(call, recipe, shared=is_shared(call, recipe))
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
    monkeypatch.setattr(prepared, "_PREPARED", {})
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
    "maximum moves at once": {"lag": 0, "cap": 0},
    "maximum moves late": {"lag": 8, "cap": 0},
    "maximum moves late, turns": {
        **{"lag": 8, "cap": 0, "serial": False, "pingpong": True, "warpgroups": 2}
    },
    "no maximum under a cap": {"lag": 8, "cap": 40, "serial": True, "pingpong": False},
}


@pytest.mark.parametrize("way", WAYS)
@dims
@every_recipe
def test_other_ways_to_run_a_tile(recipe, dim, way, monkeypatch):
    tile = attention_tiles.pick(recipe, dim, dim)
    if way == "serial" and tile.block_n > 128:
        pytest.skip("scores of 192 keys do not fit in 160 registers")
    if "lag" in WAYS[way] and not tile.in_place:
        pytest.skip("for sums in place alone")
    other = replace(tile, **WAYS[way])
    monkeypatch.setattr(attention_tiles, "pick", lambda *facts: other)
    monkeypatch.setattr(attention, "pick", lambda *facts: other)
    monkeypatch.setattr(prepared, "_PREPARED", {})
    attention_tiles.instance.cache_clear()
    attention.launch_of.cache_clear()
    for shape in ((2, 4, 2, 333, 700, dim), (1, 1, 1, 1000, 4111, dim)):
        check(make(shape), recipe)
        check(make(shape, causal_offset=60, window=500), recipe)
    if "lag" in WAYS[way]:
        # Scores that grow and grow, by more than the lag and by less.
        call = make((1, 2, 1, 200, 2000, dim))
        k = torch.randn(call.k.shape, generator=torch.Generator().manual_seed(7)).to(call.k)
        for most in (3.0, 30.0):
            growth = torch.linspace(0.1, most, 2000, device=DEVICE, dtype=call.k.dtype)
            check(replace(call, k=k * growth[:, None]), recipe)
    attention_tiles.instance.cache_clear()
    attention.launch_of.cache_clear()


def test_when_blocks_are_shared():
    assert attention.splits(576, 36, 132, 0.08)  # 4.4 rounds
    assert not attention.splits(864, 36, 132, 0.08)  # 6.5 rounds: a little idle costs less
    assert attention.splits(864, 36, 132, 0.02)
    assert not attention.splits(4200, 32, 132, 0.08)  # 31.8 rounds
    assert not attention.splits(132, 10, 132, 0.08)
    assert not attention.splits(4, 10, 132, 0.08)  # too little to share
    assert attention.splits(40, 100, 132, 0.08)


@every_recipe
def test_the_emulator_itself_is_as_near_as_other_tiles_allow(recipe):
    call = make((1, 2, 2, 500, 1300, 128))
    out, _ = attention.run(call, recipe)
    worst = compare(out.float(), emulate(call, recipe)[0]).worst
    assert worst.cosine > (0.9999 if recipe.pv in ("fp16", "bf16") else 0.999)
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
