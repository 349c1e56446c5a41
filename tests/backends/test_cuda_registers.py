"""What every instance that `sagepatch build` makes of the Hopper attention keeps outside registers:
recorded by instance, so that none grows unseen. Compiled without a GPU.
"""

from __future__ import annotations

import pytest

from sagepatch.backends.cuda.build import Program, compile_program, missing, nvrtc_version
from sagepatch.backends.cuda.instances import instances, of_recipe
from sagepatch.numerics.recipe import RECIPES

pytestmark = pytest.mark.skipif(
    missing("sm_90a") is not None, reason="no NVRTC that compiles for sm_90a"
)

# Another compiler deals registers out otherwise.
MEASURED_WITH = (13, 0)
# Bytes a thread by recipe, head size and what a call asks for beyond a plain one in BF16: masks of
# positions, FP16, blocks of queries shared out. Those that are not named keep nothing outside. Main
# loops keep next to nothing of it: test_cuda_sass.py.
OUTSIDE_BYTES = {
    "sage2pp_8 128": 96,
    "sage2pp_8 128 split": 32,
    "sage2pp_8 128 causal": 104,
    "sage2pp_8 128 half": 96,
    "sage2pp_8 128 causal half": 104,
    "sage2_8 128": 88,
    "sage2_8 128 split": 24,
    "sage2_8 128 causal": 88,
    "sage2_8 128 half": 88,
    "sage2_8 128 causal half": 88,
    "sage2pp_8_d4 64": 16,
    "sage2pp_8_d4 64 causal": 112,
    "sage2pp_8_d4 64 half": 16,
    "sage2pp_8_d4 64 causal half": 112,
    "sage2pp_8_d4 128": 32,
    "sage2pp_8_d4 128 causal": 32,
    "sage2pp_8_d4 128 half": 32,
    "sage2pp_8_d4 128 causal half": 32,
    "sage2pp_8_d6 128": 88,
    "sage2pp_8_d6 128 causal": 152,
    "sage2pp_8_d6 128 half": 88,
    "sage2pp_8_d6 128 causal half": 152,
    "sage1_b_f32 128": 8,
    "sage1_b_f32 128 split": 8,
    "sage1_b_f32 128 causal": 16,
    "sage1_b_f32 128 half": 8,
    "sage1_b_f32 128 causal half": 8,
    "sage2_8_bf16 128": 80,
    "sage2_8_bf16 128 split": 72,
    "sage2_8_bf16 128 causal": 80,
    "sage2_8_bf16 128 half": 72,
    "sage2_8_bf16 128 causal half": 72,
}
ASKED = (("causal", "CAUSAL"), ("half", "OUT_HALF"), ("split", "SPLIT"))


def programs() -> dict[str, dict[str, Program]]:
    """The programs of the attention by recipe and name; recipes whose programs are the same have
    them under the first.
    """
    found: dict[str, dict[str, Program]] = {}
    taken = set()
    for recipe in RECIPES.values():
        for program in of_recipe(recipe, "sm_90a"):
            if program.source != "attention.cu" or program in taken:
                continue
            taken.add(program)
            macros = dict(program.defines)
            asked = [word for word, macro in ASKED if macros[macro]]
            name = " ".join((recipe.name, str(macros["HEAD"]), *asked))
            assert name not in found.setdefault(recipe.name, {})
            found[recipe.name][name] = program
    return found


def test_every_instance_has_a_name_and_every_name_an_instance() -> None:
    names = [name for made in programs().values() for name in made]
    made = [p for p in instances("sm_90a") if p.source == "attention.cu"]
    assert len(names) == len(made)
    assert set(OUTSIDE_BYTES) <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", programs())
def test_no_instance_keeps_more_outside_registers_than_was_measured(recipe: str) -> None:
    if nvrtc_version() != MEASURED_WITH:
        pytest.skip(f"measured with NVRTC {MEASURED_WITH[0]}.{MEASURED_WITH[1]}")
    found = {}
    for name, program in programs()[recipe].items():
        (kernel,) = compile_program(program).resources
        found[name] = kernel.stack_bytes
    over = {n: b for n, b in found.items() if b > OUTSIDE_BYTES.get(n, 0)}
    assert not over, "more outside registers than was measured"
    under = {n: b for n, b in found.items() if b < OUTSIDE_BYTES.get(n, 0)}
    assert not under, "less outside registers: lower the bounds, and say so in kernels-cuda.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_quantises_keeps_nothing_outside_registers() -> None:
    for program in instances("sm_90a"):
        if program.source != "attention.cu":
            for kernel in compile_program(program).resources:
                assert kernel.stack_bytes == 0, program.defines
