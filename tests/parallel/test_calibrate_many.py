"""Calibration over many prompts in two processes, merged into one plan: started by torchrun, or on
two GPUs by accelerate (on a CPU it starts several processes only over MPI).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import saved

from sagepatch.plan import Plan

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "calibrate_many.py"
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate": [
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def plan_of(launcher: list[str], folder: Path) -> Plan:
    done = subprocess.run(
        [
            *(sys.executable, "-m", *launcher, str(EXAMPLE), "--emulate"),
            *("--model", str(folder / "flux"), "--prompts", str(folder / "prompts.txt")),
            *("--steps", "2", "--size", "32", "--plan", str(folder / "plan.json")),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("plan.json: ") == 1
    return Plan.load(folder / "plan.json")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=TWO_GPUS)])
def test_one_plan_of_all_prompts(launcher: str, tmp_path: Path) -> None:
    saved.save_tiny_flux(tmp_path / "flux")
    (tmp_path / "prompts.txt").write_text("a red apple\na blue cube\na cat\n")
    plan = plan_of(LAUNCHERS[launcher], tmp_path)
    # Two prompts of two steps in each process (the third is padded to a fourth), both measured.
    assert {entry.samples for entry in plan.entries} == {8}
    assert any(entry.variant != "sdpa.exact" for entry in plan.entries)
