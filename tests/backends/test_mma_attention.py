"""The mma.sync kernel against its emulator: shapes, masks, layouts and edges of a call. On a GPU
that has these instructions (sm_90 has all of them, some emulated), or else its source on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from kernel_contract import what_a_mask_adds_is_as_in_sdpa
from mma_support import (
    DEVICE,
    ON_GPU,
    RUNS,
    WHY_NOT,
    check,
    each,
    kernels_here,  # noqa: F401
    make,
    run,
)

from sagepatch.backends.catalogue import CUDA_MMA
from sagepatch.backends.cuda_mma import attention
from sagepatch.backends.cuda_mma.tiles import refusal
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

pytestmark = [
    pytest.mark.skipif(not RUNS, reason=WHY_NOT),
    pytest.mark.usefixtures("kernels_here"),
]

ALL = [variant.recipe.name for variant in CUDA_MMA]
# Compiling each takes a while: the quick tests take one of each kind of arithmetic.
FEW = ["sage2pp_8", "sage1_t", "sage2_4_f16", "sage1_vb"]
ONE = ["sage2_8"]
slow = pytest.mark.slow


@pytest.mark.parametrize("dim", [64, *([128] if ON_GPU else [])])
@pytest.mark.parametrize("name", each(FEW, rest=True))
def test_every_recipe(name, dim):
    recipe = RECIPES[name]
    check(make((1, 2, 1, 150, 200, dim)), recipe)
    check(make((2, 2, 1, 300, 330, dim), causal_offset=30), recipe)


# case 1, case 2: tails of every size
LENGTHS = [(1, 1), (2, 9), (63, 127), (128, 64), (129, 191), (130, 257), (1, 503)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", each(ONE))
def test_lengths(name, lengths):
    call = make((1, 2, 1, *lengths, 64))
    first = check(call, RECIPES[name])
    again, _ = run(call, RECIPES[name])
    assert torch.equal(first, again)  # two runs agree to the bit


# case 5, case 12: head sizes off every unit, and of V alone
DIMS = [(40, 72), (8, 8), (80, 33), (96, 96), (64, 128), (160, 160), (256, 256)]


@pytest.mark.parametrize(
    "dims", [pytest.param(d, marks=() if d == (40, 72) else slow) for d in DIMS]
)
@pytest.mark.parametrize("name", each(ONE))
def test_head_sizes(name, dims):
    if refusal(RECIPES[name], *dims) is None:
        check(make((1, 2, 1, 130, 150, *dims)), RECIPES[name])


CAUSAL = [
    *((70, 530, 460, None), (200, 100, -60, None), (20, 20, -30, None)),
    *((300, 300, 0, 100), (150, 400, 200, 1), (300, 300, 7, 257)),
]


# case 42 for the windows
@pytest.mark.parametrize("case", CAUSAL, ids=str)
@pytest.mark.parametrize("name", each(ONE))
def test_causal_offsets_and_windows(name, case):
    Sq, Skv, offset, window = case
    check(make((1, 2, 1, Sq, Skv, 64), causal_offset=offset, window=window), RECIPES[name])


@pytest.mark.parametrize("causal_offset", [None, 150])
@pytest.mark.parametrize("name", each(ONE))
def test_key_masks(name, causal_offset):
    B, Skv = 3, 320
    keep = torch.rand(B, Skv, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[0, 130:] = False
    keep[1, 64:192] = False
    keep[1, 192:256] = True
    keep[2] = False
    call = make((B, 2, 1, 150, Skv, 64), causal_offset=causal_offset)
    hidden = ~keep.to(DEVICE)[:, None, :, None]
    # Whatever bytes lie there.
    call = replace(
        call,
        attn_mask=keep.to(DEVICE)[:, None, None],
        k=call.k.masked_fill(hidden, float("nan")),
        v=call.v.masked_fill(hidden, float("nan")),
    )
    out = check(call, RECIPES[name])
    assert not out[2].any()


def bool_mask(shape: tuple[int, ...]) -> torch.Tensor:
    """Rows that see nothing, dead and whole tiles, keys that nobody sees."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[:, :, 5] = False
    mask[:, :, :128, 64:128] = False
    mask[:, :, :128, 128:192] = True
    mask[..., 290:] = False
    return mask.to(DEVICE)


@pytest.mark.parametrize("options", [{}, {"causal_offset": 150, "window": 90}], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 150, 300), (2, 1, 150, 300), (2, 2, 1, 300)], ids=str)
@pytest.mark.parametrize("name", each(ONE))
def test_bool_masks(name, shape, options):
    rows = (*shape[:2], 150, 300)
    mask = bool_mask(rows)[:, :, -shape[2] :]
    check(make((2, 2, 1, 150, 300, 64), attn_mask=mask, **options), RECIPES[name])


# cases 13 to 15: -inf hides, finfo.min does not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", each(ONE))
def test_additive_masks(name, dtype):
    mask = torch.randn(2, 1, 150, 300, generator=torch.Generator().manual_seed(2))
    mask[0, 0, 7] = -torch.inf
    mask[..., 64:128] = 0
    mask[..., 250:] = -torch.inf
    mask = mask.to(DEVICE, dtype)
    mask[0, 0, 8] = torch.finfo(dtype).min
    check(make((2, 2, 1, 150, 300, 64), attn_mask=mask), RECIPES[name])


@pytest.mark.parametrize("name", each(ONE))
def test_what_is_no_number_in_a_mask_spoils_its_row(name):
    what_a_mask_adds_is_as_in_sdpa(run, make((1, 2, 1, 140, 140, 64)), RECIPES[name])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", each(ONE))
def test_packed_lengths(name, causal):
    ends_q = torch.tensor([0, 5, 5, 205, 300], dtype=torch.int32, device=DEVICE)
    ends_kv = torch.tensor([0, 130, 200, 205, 400], dtype=torch.int32, device=DEVICE)
    if causal:
        ends_kv = ends_q
    call = make(
        (1, 4, 2, 300, int(ends_kv[-1]), 64),
        cu_seqlens_q=ends_q,
        cu_seqlens_kv=ends_kv,
        causal_offset=0 if causal else None,
    )
    check(call, RECIPES[name])


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"softcap": 1e4},
        {"sinks": (0.5, 9.0)},
        {"softcap": 20.0, "sinks": (4, -3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", each(ONE))
def test_soft_caps_and_sinks(name, options):
    if "sinks" in options:
        options = {**options, "sinks": torch.tensor(options["sinks"], device=DEVICE)}
    check(make((1, 2, 1, 130, 200, 64), **options), RECIPES[name])


# case 6
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.1])
@pytest.mark.parametrize("name", each(ONE))
def test_scale_is_the_callers(name, scale):
    check(make((1, 2, 2, 66, 130, 64), scale=scale), RECIPES[name])


# cases 9, 10
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memory_orders_and_types(dtype):
    recipe = RECIPES["sage2_8"]
    call = make((2, 4, 2, 130, 60, 64), bshd_out=True, dtype=dtype)
    out = check(call, recipe)
    assert out.transpose(1, 2).is_contiguous()
    plain, _ = run(replace(call, bshd_out=False), recipe)
    assert plain.is_contiguous()
    assert torch.equal(plain, out)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("name", each(ONE))
def test_nan_reaches_the_output(name, which):
    call = make((1, 2, 2, 130, 200, 64))
    getattr(call, which)[0, 1, 120, 7] = float("nan")
    out, _ = run(call, RECIPES[name])
    assert out[0, 1].isnan().any()
    assert out[0, 0].isfinite().all()


# Scores of a million: a softmax of one key, whose code must neither overflow nor vanish.
@pytest.mark.parametrize("name", each(ONE))
def test_scores_of_any_size(name):
    call = make((1, 2, 2, 130, 200, 64))
    call = replace(call, q=call.q * 1e3, k=call.k * 1e2, scale=1.0)
    out, _ = run(call, RECIPES[name])
    assert compare(out.float(), emulate(call, RECIPES[name])[0]).worst.rel_l1 < 4e-3


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["sage2pp_8", "sage1_b"])
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


# Codes that are integers already, keys and queries in pairs of opposite sign: every scale is 1 and
# every mean 0, so that a softmax over one key gives its score back.
@pytest.mark.parametrize("name", each(ONE))
def test_scores_are_exact_integers(name):
    recipe = RECIPES[name]
    gen = torch.Generator().manual_seed(4)
    most, size, dim = recipe.qk_max, 128, 64

    def codes() -> torch.Tensor:
        half = torch.randint(-most, most + 1, (1, 1, size // 2, dim), generator=gen)
        half[..., 0] = most
        return torch.stack([half, -half], 3).flatten(2, 3).to(DEVICE, torch.float16)

    q, k = codes(), codes()
    scores = q[0, 0].double() @ k[0, 0].double().mT
    v = torch.randn(1, 1, size, dim, generator=gen).to(DEVICE, torch.float16)
    rows = torch.arange(size, device=DEVICE)
    for shift in (0, 1, 37, 101) if not ON_GPU else range(0, size, 5):
        seen = torch.zeros(1, 1, size, size, dtype=torch.bool, device=DEVICE)
        keys = (rows + shift) % size
        seen[0, 0, rows, keys] = True
        call = Call(q, k, v, scale=2.0**-6, attn_mask=seen, return_lse=True)
        _, lse = run(call, recipe)
        off = lse[0, 0].double() * 2**6 - scores[rows, keys]
        assert off.abs().max() < 0.25


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ALL)
def test_long_calls(name):
    recipe = RECIPES[name]
    call = make((1, 4, 2, 1500, 5000, 128), dtype=torch.bfloat16)
    out = check(call, recipe)
    truth = exact(call)[0]
    ours = compare(out.float(), truth).worst
    # The price of the recipe is the emulator's: 1 % for 8 bits, 20 % for 4.
    price = compare(emulate(call, recipe)[0].to(out.dtype).float(), truth).worst
    assert ours.rel_l1 <= 1.02 * price.rel_l1 + 0.001
    assert ours.cosine >= price.cosine - 0.001
    assert ours.cosine > (0.997 if recipe.qk_bits == 8 else 0.97)
