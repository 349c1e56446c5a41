"""Runs the Triton tests through Triton's interpreter in a process of their own: interpreted kernels
and compiled ones cannot share one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = ("triton_attention", "triton_masks", "triton_numerics", "fuzz")
SAMPLE = (
    "every_recipe and (sage2_8 or sage1_b) or dead_tiles or guard_tells"
    " or (packed_members_equal and sage2_8 and None)"
    " or (causal_offsets and sage2_8 and 2147483647)"
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs them directly"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="already interpreted"),
]


def _run(*options: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(HERE / f"test_{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_a_sample_of_the_kernels_through_the_interpreter():
    _run("-o", "addopts=-m 'not slow'", "-k", SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_the_kernels_through_the_interpreter():
    _run("-o", "addopts=-m 'not slow'")
