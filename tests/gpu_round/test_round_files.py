"""Whether a round's files are those of the commit that its rows are of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu_round.kept import differing, told_of_files

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(root), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def commits(tmp_path: Path) -> tuple[str, str]:
    """An older commit, which is checked out, and a newer one, which the files are of."""
    git(tmp_path, "init", "-q")
    found = []
    for text in ("old", "new"):
        (tmp_path / "sagepatch").mkdir(exist_ok=True)
        (tmp_path / "sagepatch" / "a.cu").write_text(text)
        (tmp_path / "sagepatch" / f"{text}.py").write_text(text)
        (tmp_path / "notes.txt").write_text(text)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", text)
        found.append(git(tmp_path, "rev-parse", "--short=7", "HEAD"))
    git(tmp_path, "reset", "-q", found[0])
    return found[0], found[1]


@needs_git
def test_files_are_compared_with_the_commit_that_is_named(
    commits: tuple[str, str], tmp_path: Path
) -> None:
    old, new = commits
    assert differing(new, tmp_path) == {"changed": [], "checkout": ""}
    changed = ["sagepatch/a.cu", "sagepatch/new.py"]
    assert differing(None, tmp_path) == {"changed": changed, "checkout": ""}
    assert differing(old, tmp_path)["changed"] == changed
    (tmp_path / "sagepatch" / "a.cu").write_text("newest")
    (tmp_path / "sagepatch" / "old.py").unlink()
    (tmp_path / "sagepatch" / "ä.py").write_text("")
    changed = ["sagepatch/a.cu", "sagepatch/old.py", "sagepatch/ä.py"]
    assert differing(new, tmp_path)["changed"] == changed
    # The index stays what it was.
    assert git(tmp_path, "diff", "--cached", "--name-only") == ""


@needs_git
def test_a_commit_that_git_does_not_know_is_said(commits: tuple[str, str], tmp_path: Path) -> None:
    old, _ = commits
    found = differing("5ea1fe2", tmp_path)
    assert found == {"changed": ["sagepatch/a.cu", "sagepatch/new.py"], "checkout": old}
    assert told_of_files({"commit": "5ea1fe2", **found}) == (
        f"the checkout is of {old}, not of 5ea1fe2, which git does not know; "
        f"changed since {old}: sagepatch/a.cu, sagepatch/new.py"
    )
    git(tmp_path, "checkout", "-q", "-f", old)
    (tmp_path / "sagepatch" / "new.py").unlink()
    found = differing("5ea1fe2", tmp_path)
    assert told_of_files({"commit": "5ea1fe2", **found}) == (
        f"the checkout is of {old}, not of 5ea1fe2, which git does not know"
    )


@pytest.mark.parametrize("lacks", ["program", "repository"])
def test_without_git_nothing_is_said(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "program":
        (tmp_path / ".git").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path))
    found = differing("5ea1fe2", tmp_path)
    assert told_of_files({"commit": "5ea1fe2", **found}) == ""


def test_archives_of_before_have_their_files_told() -> None:
    files = [f"{n}.cu" for n in range(10)]
    assert told_of_files({"commit": "a", "changed": []}) == ""
    told = told_of_files({"commit": "a", "changed": files})
    assert told.startswith("not what a says: 0.cu, 1.cu")
    assert told.endswith("7.cu and 2 more")
