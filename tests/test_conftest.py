"""What tests share and what they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOOKS = """
import os
from pathlib import Path
from sagepatch.backends.cuda import cache

def test_where():
    own = Path(os.environ["SAGEPATCH_CACHE_DIR"])
    Path(os.environ["SAID"], Path(__file__).name).write_text(f"{cache._folder()} {own}")
"""


@pytest.mark.parametrize("name", ["test_cuda_any.py", "test_cuda_cache.py", "test_mma_build.py"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_kernels_are_shared_by_all_tests_but_those_of_compiling(
    name: str, shared: bool, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / name).write_text(LOOKS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("SAGEPATCH_TEST_KERNELS", None)
    kernels = tmp_path / "kept" / "kernels"
    if shared:
        environment["SAGEPATCH_TEST_KERNELS"] = str(kernels)
    said = tmp_path / "said"
    said.mkdir()
    environment["SAID"] = str(said)
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / name)]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    folder, own = (said / name).read_text().split()
    if shared and name == "test_cuda_any.py":
        assert folder == str(kernels)
        assert kernels.stat().st_mode & 0o077 == 0
    else:
        assert folder == f"{own}/kernels"
    assert Path(own) != kernels.parent
