"""The static report: the reader of machine code on listings that say what comes out, rates against
the peaks that vendors print, and the main kernels of every GPU against the table in the tree.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sagepatch.backends.catalogue import CUDA_MMA
from sagepatch.backends.cuda.build import TARGETS as TARGET_OF
from sagepatch.backends.cuda.build import compile_program, missing

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
# A tile that one turn takes: masked or plain, with or without the next copy; then the way back.
LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IMMA.16832.S8.S8 R4, R8.ROW, R2.COL, RZ ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R2], [R4.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], [R5.64] ;
.L_x_2:
        /*0050*/              @!P1 BRA `(.L_x_3) ;
        /*0060*/                   ISETP.GT.AND P2, PT, R4, R5, PT ;
        /*0070*/                   FSEL R4, R4, -INF , P2 ;
        /*0080*/                   MUFU.EX2 R4, R4 ;
        /*0090*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*00a0*/                   MUFU.EX2 R4, R4 ;
.L_x_4:
        /*00b0*/                   QMMA.16832.F16.E4M3.E4M3 R4, R8, R2, RZ ;
.L_x_5:
        /*00c0*/              @!P3 BRA `(.L_x_5) ;
        /*00d0*/               @P4 BRA `(.L_x_9) ;
        /*00e0*/                   BRA `(.L_x_1) ;
.L_x_9:
        /*00f0*/                   IMMA.16832.S8.S8 R4, R8.ROW, R2.COL, RZ ;
        /*0100*/                   EXIT ;
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts as modules, by their own names, for as long as a test runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCHMARKS) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def code(benchmarks: None) -> Any:
    import machine_code

    return machine_code


@pytest.fixture
def rates(benchmarks: None) -> Any:
    import gpu_rates

    return gpu_rates


def test_a_turn_copies_and_does_not_mask(code: Any) -> None:
    turn = [one.opcode for one in code.main_loop(code.instructions(LISTING))]
    assert turn == [
        "IMMA.16832.S8.S8",
        "BRA",
        *["LDGSTS.E.BYPASS.LTC128B.128"] * 2,
        "BRA",
        "MUFU.EX2",
        "QMMA.16832.F16.E4M3.E4M3",
        *["BRA"] * 3,
    ]


def test_a_kernel_without_such_a_loop_is_refused(code: Any) -> None:
    straight = LISTING.replace("BRA `(.L_x_1)", "NOP")
    with pytest.raises(ValueError, match="no loop"):
        code.main_loop(code.instructions(straight))


@pytest.mark.parametrize(
    ("opcode", "kind", "flops"),
    [
        ("IMMA.16832.S8.S8", "s8", 2 * 16 * 8 * 32),
        ("IMMA.16864.S4.S4", "s4", 2 * 16 * 8 * 64),
        ("HMMA.16816.F16", "f16->f16", 2 * 16 * 8 * 16),
        ("HMMA.16816.F32", "f16->f32", 2 * 16 * 8 * 16),
        ("QMMA.16832.F32.E4M3.E4M3", "e4m3->f32", 2 * 16 * 8 * 32),
        # 64 rows of a warpgroup are 16 of each of its warps.
        ("IGMMA.64x192x32.S8.S8", "wgmma s8", 2 * 16 * 192 * 32),
        ("QGMMA.64x136x32.F16.E4M3.E4M3", "wgmma e4m3", 2 * 16 * 136 * 32),
    ],
)
def test_products(code: Any, rates: Any, opcode: str, kind: str, flops: int) -> None:
    (one,) = code.instructions(f"        /*0010*/                   {opcode} R4, R8, R2, RZ ;")
    assert one.mma_flops == flops
    assert rates.kind_of(one) == kind


def test_clocks_of_units(code: Any, rates: Any) -> None:
    (ada,) = (gpu for gpu in rates.GPUS if gpu.name == "RTX 4090")
    turn = code.main_loop(code.instructions(LISTING))
    clocks = rates.unit_clocks(turn, ada)
    # INT8 and E4M3 with FP16 sums at 2048 a clock; one exponential of 32 lanes at 16; two copies of
    # 512 bytes at 128; ten instructions on four schedulers.
    expected = {"tensor": 8.0, "exponentials": 2.0, "shared": 8.0, "issue": 2.5}
    assert {unit: clocks[unit] for unit in expected} == expected
    (ampere,) = (gpu for gpu in rates.GPUS if gpu.name == "A100")
    with pytest.raises(KeyError, match="e4m3"):
        rates.unit_clocks(turn, ampere)


def test_rates_give_the_peaks_that_are_published(rates: Any) -> None:
    for gpu in rates.GPUS:
        for kind, peak in gpu.peaks.items():
            assert gpu.tensor[kind] * gpu.clocks_a_second / 1e12 == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "warps"),
    [
        (255, 0, 256, 8),  # registers: one block of 8 warps
        (128, 0, 128, 16),
        (64, 49152, 128, 8),  # shared memory: 50176 bytes twice in 102400
        (32, 0, 512, 48),  # warps
    ],
)
def test_occupancy(rates: Any, registers: int, shared_bytes: int, threads: int, warps: int) -> None:
    (ada,) = (gpu for gpu in rates.GPUS if gpu.name == "RTX 4090")
    assert rates.occupancy(ada, registers, shared_bytes, threads) == warps


@pytest.mark.parametrize("name", ["machine_code_page", "ablation_page"])
def test_pages_say_what_the_tables_say(benchmarks: None, name: str) -> None:
    module = __import__(name)
    written = module.PAGE.read_text(encoding="utf-8")
    assert written == module.page(), f"run: python benchmarks/{name}.py"
    assert module.PAGE.with_suffix(".png").exists()


# Once missing: sm_87 and sm_121a.
def test_every_target_has_every_recipe_in_the_report(benchmarks: None, rates: Any) -> None:
    import machine_code_report

    with (BENCHMARKS / "machine_code.csv").open(newline="", encoding="utf-8") as file:
        kept = list(csv.DictReader(file))
    named = {(r["target"], r["recipe"], r["head_dim"]) for r in kept}
    wanted = {
        (target, variant.recipe.name, str(dim))
        for arch, target in TARGET_OF.items()
        for variant in CUDA_MMA
        for dim in machine_code_report.HEAD_DIMS
        if variant.archs is not None and arch in variant.archs
    }
    assert named == wanted
    for gpu in rates.GPUS:
        # Counts of every GPU; a ceiling of those whose rates are published, and else a reason.
        assert bool(gpu.unrated) == (not gpu.tensor)
        for r in kept:
            if r["gpu"] == gpu.name:
                assert min(int(r[name]) for name in ("registers", "warps", "instructions")) > 0
                assert (r["predicted_tops"] == r["bound"] == "-") == bool(gpu.unrated)


MAIN = ("sage2pp_8", "sage2_8", "sage1_b", "sage1_b_f32", "sage2_4_f16", "sage2pp_4")
TARGETS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120a", "sm_121a")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_report_is_current(benchmarks: None, target: str) -> None:
    if why := missing(target):
        pytest.skip(why)
    pytest.importorskip("triton")
    import machine_code_report

    with (BENCHMARKS / "machine_code.csv").open(newline="", encoding="utf-8") as file:
        kept = {(r["gpu"], r["recipe"], r["head_dim"]): r for r in csv.DictReader(file)}
    seen = 0
    for subject in machine_code_report.subjects():
        if subject.gpu.target != target or subject.recipe not in MAIN:
            continue
        seen += 1
        fresh = machine_code_report.row(subject, compile_program(subject.program))
        row = kept[subject.gpu.name, subject.recipe, str(subject.head_dim)]
        # Another compiler may schedule otherwise; the tensor work of a tile stays.
        fields = row if row["nvrtc"] == fresh["nvrtc"] else ("tensor_integer", "tensor_float")
        for field in fields:
            told = f"{subject.recipe}: {field}; run benchmarks/machine_code_report.py and _page.py"
            assert str(fresh[field]) == row[field], told
    assert seen >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name", "scores", "values"),
    [
        ("sm_80", "sage1_t_f32", "IMMA.16832.S8.S8", "HMMA.16816.F32"),
        ("sm_86", "sage1_b", "IMMA.16832.S8.S8", "HMMA.16816.F16"),
        ("sm_86", "sage2_4_f16", "IMMA.16864.S4.S4", "HMMA.16816.F16"),
        ("sm_89", "sage2pp_8", "IMMA.16832.S8.S8", "QMMA.16832.F16.E4M3.E4M3"),
        ("sm_89", "sage2_4", "IMMA.16864.S4.S4", "QMMA.16832.F32.E4M3.E4M3"),
        ("sm_89", "sage1_vb", "IMMA.16832.S8.S8", "IMMA.16832.S8.S8"),
        ("sm_120a", "sage2pp_8_d4", "IMMA.16832.S8.S8", "QMMA.16832.F16.E4M3.E4M3"),
    ],
)
def test_recipes_are_the_products_that_they_say(
    code: Any, target: str, name: str, scores: str, values: str
) -> None:
    if why := missing(target):
        pytest.skip(why)
    pytest.importorskip("triton")
    from sagepatch.backends.cuda_mma.tiles import Options, instance
    from sagepatch.numerics.recipe import RECIPES

    made = instance(RECIPES[name], 128, 128, target, Options())
    cubin = compile_program(made.program).cubin
    turn = code.main_loop(code.instructions(code.disassembled(cubin)))
    assert {one.opcode for one in turn if one.mma_flops} == {scores, values}
    found = code.mix(turn)
    # Asynchronous copies, and matrices from shared memory; every exponential in hardware.
    assert code.counted(found, "LDGSTS")
    assert code.counted(found, "LDSM")
    assert code.counted(found, "MUFU")
    # Threads exchange the maximum alone, in two steps for each of their two rows of 16; P and V
    # meet without.
    assert code.counted(found, "SHFL") == 2 * 2 * made.tile.m_tiles
