"""The machine code of the Hopper kernel, compiled without a GPU: every instance compiles, keeps its
registers, overlaps its products, and stays in the budget of its main loop.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from sagepatch.backends.cuda.attention_tiles import SERVED, Options, instance, refusal
from sagepatch.backends.cuda.build import Compiled, Program, compile_program, missing
from sagepatch.numerics.recipe import RECIPES

pytestmark = pytest.mark.skipif(
    missing("sm_90a") is not None, reason="no NVRTC that compiles for sm_90a"
)

DIMS = (8, 40, 72, 80, 96, 112, 160, 192, 200, 216, 256)
PLAIN = Options()
# What the compiler says of products that it runs one after another.
SERIALISED = re.compile(r"C75(0[89]|1[0-4])")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);")
JUMP = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")


# Recipes whose scales alone differ share a program.
compile_once = cache(compile_program)


def compiled(recipe: str, head_dim: int, options: Options = PLAIN) -> Compiled:
    return compile_once(instance(RECIPES[recipe], head_dim, head_dim, options).program)


def machine_code(cubin: bytes, path: Path) -> list[tuple[int, str]]:
    """(address, instruction) of a cubin, by the cuobjdump that Triton brings."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"no {tool}")
    path.write_bytes(cubin)
    done = subprocess.run(
        [str(tool), "-sass", str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    return [(int(m[1], 16), m[2]) for m in INSTRUCTION.finditer(done.stdout)]


def loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """The bodies of loops that hold a product, shortest first."""
    index = {address: i for i, (address, _) in enumerate(code)}
    found = []
    for i, (address, text) in enumerate(code):
        jump = JUMP.search(text)
        if jump is None or int(jump[1], 16) >= address:
            continue
        body = [t for _, t in code[index[int(jump[1], 16)] : i + 1]]
        if any("GMMA" in t for t in body):
            found.append(body)
    return sorted(found, key=len)


def count(body: list[str], what: str) -> int:
    return sum(re.search(rf"\b{what}", text) is not None for text in body)


# Instructions of the main loop, as the compiler of CUDA 13 makes it, and a little slack. A tile of
# block_n keys has as many: kernels.md tells where they go.
BUDGET = {
    ("sage2_8", 128): 435,
    ("sage2pp_8_d4", 128): 500,
    ("sage2pp_8_d6", 128): 810,
    ("sage2pp_8", 128): 640,
    ("sage2_8", 64): 290,
    ("sage2pp_8_d4", 64): 495,
    ("sage1_b_f32", 128): 525,
    ("sage2_8_bf16", 128): 385,
    ("sage2_8_bf16", 64): 375,
}
# Registers that a loop keeps outside: with FP32 sums three warpgroups need a few more than 160.
MOST_SPILLS = {("sage2_8", 128): 4, ("sage2pp_8", 128): 12, ("sage1_b_f32", 128): 4}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize(("recipe", "dim"), BUDGET, ids=str)
def test_the_main_loop_stays_in_its_budget(recipe, dim, split, tmp_path):
    tile = instance(RECIPES[recipe], dim, dim, PLAIN).tile
    if split and not tile.shares:
        pytest.skip("not shared at this size")
    raw_q = torch.bfloat16 if RECIPES[recipe].q_granularity == "token" else None
    options = Options(split=split, raw_q=raw_q, raw_v=RECIPES[recipe].pv == "bf16")
    code = machine_code(compiled(recipe, dim, options).cubin, tmp_path / "kernel.cubin")
    main = loops(code)[0]
    assert count(main, "(LDL|STL)") <= MOST_SPILLS.get((recipe, dim), 0)
    assert len(main) <= BUDGET[recipe, dim]
    # Addresses stay in uniform registers: moving them there costs a tenth of the speed.
    assert count(main, "R2UR") <= 2
    # Both products of one tile are in it, and one exponential a score but for the polynomial ones.
    score_steps = -(-dim // 32)
    value_steps = tile.block_n // (16 if RECIPES[recipe].pv in ("fp16", "bf16") else 32)
    assert count(main, "IGMMA") == score_steps
    assert count(main, "[QH]GMMA") == value_steps
    # Nor a maximum, nor what scales earlier sums, where the scores are capped.
    exponentials = tile.block_n // 2 * (8 - tile.polynomial) // 8
    assert count(main, "MUFU.EX2") == exponentials + 2 * (not tile.cap)
    assert (count(main, "VIMNMX3") >= tile.block_n // 2 // 3) != bool(tile.cap)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("recipe", SERVED)
def test_usual_sizes_spill_little_and_overlap(recipe, dim):
    check(compiled(recipe, dim), recipe)


@pytest.mark.parametrize(
    "options",
    [
        Options(causal=True),
        Options(causal=True, window=True),
        Options(key_mask=True),
        Options(causal=True, key_mask=True),
        Options(packed=True),
        Options(packed=True, causal=True, window=True),
        Options(out_half=True),
        Options(split=True),
        Options(raw_q=torch.float16),
        Options(raw_q=torch.bfloat16, split=True),
        Options(raw_q=torch.bfloat16, causal=True),
        Options(raw_q=torch.bfloat16, raw_v=True, split=True),
        Options(raw_q=torch.bfloat16, raw_v=True, causal=True),
        Options(raw_v=True, causal=True, window=True),
    ],
    ids=lambda o: "_".join(n for n in Options.__slots__ if getattr(o, n)),
)
def test_options_spill_little(options):
    recipe = "sage1_b_f32" if options.split and not options.raw_q else "sage2_8"
    recipe = "sage2_8_bf16" if options.raw_v else recipe
    check(compiled(recipe, 128, options), recipe)


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("recipe", SERVED)
def test_every_instance_compiles(recipe, dim):
    if refusal(RECIPES[recipe], dim, dim) is None:
        check(compiled(recipe, dim), recipe)


# Registers kept outside, most of them around the loops and in those of masked tiles, which run once
# or twice a block of queries.
MOST_STACK_BYTES = 128


def check(made: Compiled, recipe: str) -> None:
    (kernel,) = made.resources
    assert kernel.stack_bytes <= MOST_STACK_BYTES
    # One MMA a flush leaves nothing to run beside: the compiler is right there.
    if RECIPES[recipe].depth != 1:
        assert not SERIALISED.search(made.log), made.log


@pytest.mark.parametrize("block_n", [64, 128, 192])
def test_lists_of_tiles_compile(block_n):
    (kernel,) = compile_program(Program("key_tiles.cu", (("BLOCK_N", block_n),))).resources
    assert kernel.kernel == "key_tiles"
    assert kernel.stack_bytes == 0


def test_sizes_that_no_instance_has_are_refused_in_words():
    assert refusal(RECIPES["sage2_8"], 128, 128) is None
    assert "over 256" in (refusal(RECIPES["sage2_8"], 264, 64) or "")
    assert "over 128" in (refusal(RECIPES["sage2pp_8_d6"], 160, 160) or "")
    assert "per token" in (refusal(RECIPES["sage1_t"], 64, 64) or "")
    assert "not one of INT8" in (refusal(RECIPES["sage2_4"], 64, 64) or "")
