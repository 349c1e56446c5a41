"""What ships: data files, licence, one version, dependency ranges, and a CI that checks the built
wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path, PurePosixPath

import pytest

import sagepatch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE = ROOT / "sagepatch"
DATA = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc")
)


@pytest.mark.parametrize("name", DATA)
def test_a_data_file_is_matched_by_package_data(name: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["sagepatch"]
    flat = [pattern.removeprefix("**/") for pattern in patterns]
    assert any(PurePosixPath(name).match(pattern) for pattern in flat)


def test_kinds_of_data_that_must_be_there() -> None:
    suffixes = {PurePosixPath(name).suffix for name in DATA}
    assert {".safetensors", ".json", ".html", ".typed", ".txt"} <= suffixes


def test_an_editable_install_serves_beside_the_clone(tmp_path: Path) -> None:
    """Before, a script in the folder that the clone `sagepatch` lies in imported an empty
    namespace: the clone itself.
    """
    clone, site = tmp_path / "sagepatch", tmp_path / "site"
    (clone / "sagepatch").mkdir(parents=True)
    (clone / "sagepatch" / "__init__.py").write_text("apply = True\n")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, clone)
    build = f"from setuptools.build_meta import build_editable as b; b({str(site)!r})"
    site.mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    use = f"import site; site.addsitedir({str(site)!r}); import sagepatch; print(sagepatch.apply)"
    # Without the packages of these tests, where sagepatch is found as well.
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", use]
    ended = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert ended.stdout == "True\n", ended.stderr


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == sagepatch.__version__ == version("sagepatch")


def test_licence_texts() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for named in ("Noto Color Emoji", "SIL Open Font License", "2410.02367"):
        assert named in notice
    assert PROJECT["project"]["license-files"] == ["LICENSE", "NOTICE"]


def test_dependency_ranges_are_those_that_are_tested() -> None:
    wanted = PROJECT["project"]["dependencies"]
    assert {"torch>=2.11", "diffusers>=0.42,<0.43", "transformers>=5.17"} <= set(wanted)


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="sagepatch")
    assert command.load() is __import__("sagepatch.cli", fromlist=["main"]).main


def test_ci_ends_with_pytest_and_stops_at_the_first_failure() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.strip()]
    assert "set -euo pipefail" in lines[:4]
    # Two halves of the long matrices at once: either failure counts, pytest's closing line is last.
    halves = [line for line in lines if line.startswith("pytest -m slow")]
    # What the one runs the other leaves out.
    assert [half.count("$kernels") for half in halves] == [1, 1]
    assert "--ignore=%s" in halves[0]
    assert halves[1].endswith("|| failed=1")
    assert lines[-3:] == [
        'wait "$others" || failed=1',
        "cat .ci-venv/others.log",
        'exit "$failed"',
    ]
    order = [
        next(number for number, line in enumerate(lines) if part in line)
        for part in ("torch==", "[test,dev]", "ruff check", "mypy", "build --wheel", "check_wheel")
    ]
    assert order == sorted(order)
