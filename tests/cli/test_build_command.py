"""`sagepatch build`: kernels compiled ahead, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import Sage

pytest.importorskip("cuda.bindings.nvrtc")

from sagepatch.backends.catalogue import CUDA, CUDA_MMA
from sagepatch.backends.cuda.build import Program, compile_program, nvrtc_version
from sagepatch.cli import build
from sagepatch.env import Gpu, Machine

if nvrtc_version() is None:
    pytest.skip("no NVRTC here", allow_module_level=True)

SMALL = Program(
    "prepass.cu",
    (
        *(("Q_TYPE", 1), ("K_TYPE", 1), ("V_TYPE", 1), ("HEAD", 64), ("V_HEAD", 64)),
        *(("VECTORS", 1), ("Q_BLOCK", 0), ("K_GROUPS", 4), ("K_BLOCK", 64), ("HALF_PV", 0)),
        *(("MASK", 0), ("SHIFT", 0)),
    ),
)


@pytest.fixture(autouse=True)
def _one_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = {SMALL: ["cuda.sage2_8"]}
    monkeypatch.setattr(build, "programs", lambda wanted: one if "sm_90a" in wanted else {})
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "kept"))


def test_every_kernel_is_reported_as_its_machine_code_says(sage: Sage, tmp_path: Path) -> None:
    ended = sage("build", "--all-archs", "--json")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["directory"] == str(tmp_path / "kept/kernels")
    assert [row["kernel"] for row in told["kernels"]] == ["keys_and_values", "queries"]
    for row in told["kernels"]:
        assert row["arch"] == "sm_90a"
        assert 16 <= row["registers"] <= 255
        assert row["spill_bytes"] == 0
        assert 0 <= row["shared_bytes"] < 48 << 10
        assert row["options"]["HEAD"] == 64
        assert row["variants"] == ["cuda.sage2_8"]
    assert len(list((tmp_path / "kept/kernels").glob("*.cubin"))) == 1
    assert "(once)" not in ended.err


def test_people_get_a_table(sage: Sage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", "")
    ended = sage("build", "--all-archs")
    assert ended.code == 0, ended.err
    assert "keys_and_values" in ended.out
    assert "Nothing is kept" in ended.out


@pytest.mark.parametrize("gpus", [(), (Gpu("RTX 2080", 75, 1 << 34),)], ids=len)
def test_other_machines_are_told_what_to_do(
    sage: Sage, monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...]
) -> None:
    machine = Machine("Linux", "3.12", {}, None, gpus, ())
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    ended = sage("build")
    assert ended.code == 3
    assert "are for sm_80, sm_86" in ended.err
    assert "--all-archs" in ended.err


def test_a_missing_compiler_is_one_sentence(sage: Sage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "missing_compiler", lambda target: "NVRTC is not here")
    ended = sage("build", "--all-archs")
    assert ended.code == 3
    assert ended.err.strip().endswith("NVRTC is not here")


def test_the_gpu_here_decides_without_all_archs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("H200", 90, 1 << 37), Gpu("H200", 90, 1 << 37), Gpu("L4", 89, 1 << 34))
    machine = Machine("Linux", "3.12", {}, None, gpus, ())
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    assert build.targets(all_archs=False) == ["sm_90a", "sm_89"]


def test_a_compilation_in_passing_is_told_on_standard_error(tmp_path: Path) -> None:
    code = f"""
from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.cache import kept
from sagepatch.cli.console import set_up_logging
set_up_logging()
kept(Program("prepass.cu", {SMALL.defines!r}))
"""
    environment = {**os.environ, "SAGEPATCH_CACHE_DIR": str(tmp_path / "other")}
    environment.pop("SAGEPATCH_LOG", None)
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stderr.strip() == "compiling prepass.cu for sm_90a (once)"


def test_what_is_compiled_ahead_covers_both_families() -> None:
    from sagepatch.backends.cuda.instances import instances

    programs = instances("sm_90a")
    assert len(programs) == len(set(programs))
    assert {program.source for program in programs} == {"prepass.cu", "attention.cu"}
    assert {dict(program.defines)["HEAD"] for program in programs} == {64, 128}
    assert instances("sm_100a") == ()


PROGRAMS = build.programs


def test_every_kernel_is_compiled_for_every_gpu_of_its_record() -> None:
    compiled = {
        (name, program.target)
        for program, names in PROGRAMS(list(build.TARGETS.values())).items()
        for name in names
    }
    listed = {
        (variant.name, build.TARGETS[arch])
        for variant in (*CUDA, *CUDA_MMA)
        for arch in variant.archs or ()
    }
    assert compiled == listed


def test_shared_memory_of_a_launch_counts() -> None:
    compiled = compile_program(SMALL)
    program = replace(SMALL, defines=(*SMALL.defines, ("SHARED_BYTES", 40000)))
    plain, more = build.facts(SMALL, compiled, []), build.facts(program, compiled, [])
    assert [b["shared_bytes"] - a["shared_bytes"] for a, b in zip(plain, more, strict=True)] == [
        40000,
        40000,
    ]


def test_a_cache_that_cannot_be_used_is_told_before_compiling(
    sage: Sage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "compile_all", lambda *_: pytest.fail("it was compiled"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "file"))
    ended = sage("build", "--all-archs")
    assert ended.code == 3
    assert "the cache directory" in ended.err
