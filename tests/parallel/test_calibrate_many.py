"""Calibration over many prompts in two processes, merged into one plan: started by torchrun, or on
two GPUs by accelerate (on a CPU it starts several processes only over MPI).
"""

from __future__ import annotations

import os
import signal
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
        *("--main_process_port", "0"),  # any that is free
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
}
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def finished(command: list[str], longest_s: float) -> str:
    """What a command printed. One that takes too long fails, with the stacks of its processes."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=longest_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        _, err = process.communicate(timeout=20)
        pytest.fail(f"no end within {longest_s:.0f} s:\n{err[-6000:]}")
    assert process.returncode == 0, err[-6000:]
    return out


def plan_of(launcher: list[str], folder: Path) -> Plan:
    command = [
        *(sys.executable, "-m", *launcher, str(EXAMPLE), "--emulate"),
        *("--model", str(folder / "flux"), "--prompts", str(folder / "prompts.txt")),
        *("--steps", "2", "--size", "32", "--plan", str(folder / "plan.json")),
    ]
    assert finished(command, 150).count("plan.json: ") == 1
    return Plan.load(folder / "plan.json")


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_and_told() -> None:
    inner = "import time; time.sleep(99)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)no end within 2 s.*recent call first"):
        finished([sys.executable, "-c", code], 2)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=TWO_GPUS)])
def test_one_plan_of_all_prompts(launcher: str, tmp_path: Path) -> None:
    saved.save_tiny_flux(tmp_path / "flux")
    (tmp_path / "prompts.txt").write_text("a red apple\na blue cube\na cat\n")
    plan = plan_of(LAUNCHERS[launcher], tmp_path)
    # Two prompts of two steps in each process (the third is padded to a fourth), both measured.
    assert {entry.samples for entry in plan.entries} == {8}
    assert any(entry.variant != "sdpa.exact" for entry in plan.entries)
