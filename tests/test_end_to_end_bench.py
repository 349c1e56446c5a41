"""The benchmark of whole forwards, rehearsed on thumbnails of the same classes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
import end_to_end_watch  # noqa: E402
from end_to_end_bench import UNPATCHED, Bench, built, error  # noqa: E402
from end_to_end_warm import KERNELS, jobs  # noqa: E402
from h200_end_to_end import picked  # noqa: E402
from models import thumbnails  # noqa: E402
from torch import Tensor  # noqa: E402
from true_models import CASES, Shape  # noqa: E402

from sagepatch.backends.catalogue import BY_NAME  # noqa: E402
from sagepatch.layer import PatchedLayer  # noqa: E402
from sagepatch.ops import run_layer  # noqa: E402
from sagepatch.spec import Call  # noqa: E402

BY_CASE = {case.name: case for case in thumbnails.CASES}
Told = list[tuple[str, dict[str, Any]]]


def bench(case: str, plans: Path | None = None) -> tuple[Bench, Told]:
    told: Told = []
    model = built(BY_CASE[case], False, "cpu")
    return Bench(model, "cpu", False, False, plans, lambda *row: told.append(row)), told


@pytest.mark.parametrize("name", ["flux", "cogvideox", "wan", "sdxl", "llama_21"])
def test_every_mode_of_a_model_is_timed_on_its_own_kernels(name: str) -> None:
    run, told = bench(name)
    case = BY_CASE[name]
    run.set_up([case])
    run.run(case)
    rows = [row for kind, row in told if kind == "row"]
    parts = [row for kind, row in told if kind == "parts"]
    assert [row["mode"] for row in rows] == [UNPATCHED, "calibrated", "safe"]
    assert rows[0]["model"] == case.label(False)
    assert rows[0]["speedup"] == rows[0]["predicted_speedup"] == "1.000"
    for row in rows:
        before, after = float(rows[0]["ms_median"]), float(row["ms_median"])
        assert float(row["speedup"]) == pytest.approx(before / after, abs=0.02)
    calls = sum(int(part.split()[0]) for part in parts[0]["kernels"].split("; "))
    assert parts[0]["kernels"] == f"{calls} sdpa.exact"
    assert parts[2]["kernels"] == f"{calls} emulated.sage1_b"
    assert float(parts[0]["rel_error"]) == 0 < float(parts[2]["rel_error"])
    assert all(part["forwards"] == case.rounds for part in parts)
    assert not any("sagepatch" in key for m in run.model.modules() for key in m.__dict__)


def test_the_prediction_is_what_the_kernels_save_where_they_are_timed_alone() -> None:
    run, told = bench("flux")
    times = {"sdpa.exact": 200.0, "emulated.sage2pp_8": 50.0, "emulated.sage1_b": 150.0}
    run.us = lambda variant, call, spec: times[variant.name]  # type: ignore[method-assign]
    run.run(BY_CASE["flux"])
    rows = {row["mode"]: row for kind, row in told if kind == "row"}
    unpatched = float(rows[UNPATCHED]["ms_median"])
    for mode, saved_ms in {UNPATCHED: 0, "calibrated": 4 * 0.15, "safe": 4 * 0.05}.items():
        expected = unpatched / (unpatched - saved_ms)
        assert float(rows[mode]["predicted_speedup"]) == pytest.approx(expected, abs=2e-3)


def test_a_wrong_output_has_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, told = bench("flux")

    def off(layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
        out, lse = run_layer(layer, call)
        return (out * float("nan") if layer.request.variant == "safe" else out), lse

    monkeypatch.setattr(end_to_end_watch, "run_layer", off)
    run.run(BY_CASE["flux"])
    assert [row["mode"] for kind, row in told if kind == "row"] == [UNPATCHED, "calibrated"]
    assert "off by nan" in capsys.readouterr().out


def test_a_plan_is_made_once_for_the_inputs_that_it_names(tmp_path: Path) -> None:
    run, told = bench("llama_21", tmp_path)
    run.run(BY_CASE["llama_21"])
    run.run(BY_CASE["llama_70"])
    modes = [row["mode"] for kind, row in told if kind == "row"]
    assert modes == [UNPATCHED, "calibrated", "safe", UNPATCHED, "calibrated (21)", "safe"]
    assert [path.name for path in tmp_path.iterdir()] == ["llama-21.json"]
    again, _ = bench("llama_70", tmp_path)
    assert again.plan(BY_CASE["llama_70"])[1] == 0.0


def test_error_is_relative_and_tells_what_is_not_finite() -> None:
    one = torch.tensor([3.0, 4.0])
    assert error(one * 1.1, one) == pytest.approx(0.1, abs=1e-6)
    assert error(one * float("nan"), one) != error(one, one) == 0


def test_jobs_hold_every_kernel_on_every_kind_of_call() -> None:
    found = jobs(CASES)
    assert {name for name, _ in found} == set(KERNELS) <= set(BY_NAME)
    for name in KERNELS:
        shapes = [shape for job, some in found for shape in some if job == name]
        assert len(shapes) == len(set(shapes))
        assert {(s.head_dim, s.causal, s.masked, s.q_len == s.kv_len) for s in shapes} == {
            (128, False, False, True),
            (128, False, False, False),
            (128, False, True, True),
            (128, True, False, True),
            (64, False, False, True),
            (64, False, False, False),
        }
    assert ("cuda.sage2_8", Shape(1, 40, 75600, 75600, 128)) in [
        (name, shape) for name, some in found for shape in some
    ]


def test_cases_are_picked_in_order_each_once_and_compiled_where_the_name_says_so() -> None:
    def names(wanted: list[str], compiled: bool = False) -> list[tuple[str, bool]]:
        return [(case.name, how) for case, how in picked(CASES, wanted, compiled)]

    wan = ["wan_14b_480p_81f", "wan_14b_720p_81f"]
    assert names(["wan", "sdxl:compile", "wan_14b_480p", "sdxl"]) == [
        *((name, False) for name in wan),
        *(("sdxl_1024", True), ("sdxl_1024", False)),
    ]
    assert names(["wan"], compiled=True) == [(name, True) for name in wan]
    assert len(names([])) == len(CASES)
    with pytest.raises(SystemExit, match="after the colon"):
        names(["wan:fast"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_writes_rows_as_they_come_and_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    table = tmp_path / "times.csv"
    command = [sys.executable, str(BENCHMARKS / "h200_end_to_end.py"), "--device", "cpu"]
    command += ["--cases", "models.thumbnails", "--out", str(table), "--commit", "abc"]
    command += ["--set-up", "300", "--seconds", "500", "--only", "llama", ""]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "SAGEPATCH_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "times_parts.csv").open(newline="") as file:
        parts = list(csv.DictReader(file))
    models = ["llama_21", "llama_70", "flux", "cogvideox (2 of 3 layers)", "wan", "sdxl"]
    assert [row["model"] for row in rows] == [name for name in models for _ in range(3)]
    assert len(parts) == len(rows)
    assert {row["commit"] for row in rows} == {row["commit"] for row in parts} == {"abc"}
    assert "broken: left out" in done.stdout
    assert "endless: left out" in done.stdout
