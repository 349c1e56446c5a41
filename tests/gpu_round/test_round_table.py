"""The table of jobs is about files and options that exist, and benchmarks/README.md about every
file that was measured.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest
import rounds

from benchmarks.end_to_end_rows import read
from benchmarks.gpu_round import __main__ as command
from benchmarks.gpu_round import running
from benchmarks.gpu_round.job import EVERY, HOPPER, TEST_SECONDS, Job
from benchmarks.gpu_round.jobs import JOBS, chosen, table
from benchmarks.gpu_round.merging import TABLES
from benchmarks.gpu_round.timings import PLAN, SERVING

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
# Files of kernels' tests that a GPU only skips.
WITHOUT_GPU = {
    "test_cuda_registers.py",
    "test_mma_machine.py",
    "test_triton_interpreter.py",
}
each_job = pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)


def script_of(job: Job) -> Path | None:
    """The script that a job runs, None for pytest and for the package's own command."""
    if job.command[1] in ("-m", "-c"):
        module = job.command[2]
        named = module.startswith("benchmarks.")
        return ROOT / f"{module.replace('.', '/')}.py" if named else None
    return ROOT / job.command[1]


def test_names_are_unique_and_are_names_of_folders() -> None:
    assert max(Counter(job.name for job in JOBS).values()) == 1
    assert all(re.fullmatch(r"[a-z0-9_.]+", job.name) for job in JOBS)
    assert not {"summary.json", "summary.csv", "plans", "cache"} & {job.name for job in JOBS}


@each_job
def test_a_job_says_what_it_needs(job: Job) -> None:
    assert job.seconds > 0
    assert job.proves
    assert job.gpus in (1, 2)
    assert job.kernels
    assert job.kernels <= EVERY
    assert {name for _, name in job.writes if name} <= set(TABLES)
    assert not job.stdout or job.stdout in dict(job.writes)


@each_job
def test_files_and_options_of_a_job_exist(job: Job) -> None:
    assert all((ROOT / word).exists() for word in job.command if word.startswith("tests/"))
    script = script_of(job)
    if script is None:
        return
    assert script.exists()
    strings = {
        node.value
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    options = {word for word in job.command[3 if job.command[1] == "-m" else 2 :]}
    assert {word for word in options if word.startswith("--")} <= strings


@each_job
def test_nothing_is_written_outside_the_folder_of_a_job(job: Job) -> None:
    named = [file for file, _ in job.writes if file != job.stdout]
    told = [word for word in job.command if "{out}" in word]
    assert bool(told) == bool(named)
    for word in told:
        assert word == "{out}" or word.removeprefix("{out}/") in named


def test_every_file_of_kernels_tests_is_a_job() -> None:
    tested = {word.rpartition("/")[2] for job in JOBS for word in job.command if ".py" in word}
    backends = ROOT / "tests" / "backends"
    files = {
        f.name for prefix in ("triton", "cuda", "mma") for f in backends.glob(f"test_{prefix}_*")
    }
    files |= {file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files - WITHOUT_GPU <= tested


def test_jobs_draw_every_recipe_and_the_plan_once() -> None:
    drawn = [
        word
        for job in chosen(["quality_*"])
        for word in job.command[job.command.index("--only") + 1 :]
    ]
    assert Counter(drawn) == dict.fromkeys((*SERVING, PLAN), 1)
    for job in chosen(["quality_*"]):
        names = job.command[job.command.index("--only") + 1 :]
        assert job.rows == 1 + len(names)
        # It ends by itself before it is ended.
        assert job.seconds < float(job.command[job.command.index("--seconds") + 1])
        assert float(job.command[job.command.index("--seconds") + 1]) < running.patience(job)
        assert job.quiet == (PLAN in names)
        if job.kernels != HOPPER:
            assert {SERVING[name] for name in names} == job.kernels


def test_a_test_that_hangs_is_named_before_its_job_is_ended() -> None:
    for job in JOBS:
        if job.is_pytest:
            assert f"--timeout={TEST_SECONDS}" in job.command
            assert "--timeout-method=thread" in job.command
            assert running.patience(job) > job.seconds + TEST_SECONDS


def test_every_script_for_a_gpu_is_a_job() -> None:
    scripts = {path for job in JOBS if (path := script_of(job)) is not None}
    wanted = {path for path in BENCHMARKS.glob("h200_*.py")}
    wanted |= {BENCHMARKS / f"{name}.py" for name in ("cuda_tiles", "cuda_ways", "cuda_prepass")}
    assert wanted <= scripts


def test_shapes_and_models_are_those_of_the_scripts() -> None:
    from benchmarks.true_models import CASES

    text = (BENCHMARKS / "h200_attention.py").read_text(encoding="utf-8")
    shapes = re.findall(r'^    Shape\("(\w+)"', text, re.MULTILINE)
    assert [f"attention_{name}" for name in shapes] == [job.name for job in chosen(["attention_*"])]
    # `--only` takes all names that begin with a word.
    names = [case.name for case in CASES]
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


def test_tables_take_their_rows_by_a_key() -> None:
    for name, kind in TABLES.items():
        rows = read(BENCHMARKS / name)
        assert rows, name
        keys = Counter(kind.key_of(row) for row in rows)
        if kind.key and "about" not in kind.key:
            assert max(keys.values()) == 1, name
        kind.group_of(rows[0])


def test_jobs_are_chosen_by_name_glob_and_kernels() -> None:
    assert [job.name for job in chosen(["masked", "test_cuda_m*", "masked"])] == [
        *("masked", "test_cuda_masks", "test_cuda_memory"),
    ]
    assert chosen([]) == list(JOBS)
    assert {job.name for job in chosen(["fuzz_*"], "cuda_mma")} == {"fuzz_cuda_mma"}
    with pytest.raises(ValueError, match="no job is named nothing"):
        chosen(["nothing"])


def test_the_list_has_every_job_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--list", "fuzz_triton", "ulysses"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert re.match(r"fuzz_triton +105 s  1 GPU +14 cores +thousands of random calls", first)
    assert re.match(r"ulysses +~ +90 s  2 GPUs  alone ", second)
    assert last == "2 jobs, 195 s one after the other; ~ is a guess"
    assert len(table(JOBS).splitlines()) == len(JOBS) + 1


def test_a_round_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.run(["no_such_job"]) == 2
    (tmp_path / "full").write_text("")
    assert command.run(["masked", "--out", str(tmp_path)]) == 2
    about = {"gpus": 0, "commit": "abc1234", "changed": [], "checkout": ""}
    monkeypatch.setattr(command, "facts", lambda commit: about)
    assert command.run(["masked", "--out", str(tmp_path / "new")]) == 2
    about |= {"gpus": 1, "commit": "unknown"}
    assert command.run(["masked", "--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err.splitlines()
    words = ("no job is named", "is there already", "there is no GPU here", "--commit says")
    assert all(word in line for word, line in zip(words, said, strict=True))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("does", "code"), [("pass", 0), ("import sys; sys.exit(4)", 1)])
def test_a_round_from_the_command_line(
    does: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "facts", lambda commit: rounds.ABOUT | {"changed": ["a.cu"]})
    monkeypatch.setattr(
        command, "chosen", lambda *asked: [rounds.job("a", does), rounds.job("b", "", gpus=2)]
    )
    archive = tmp_path / "kept" / "all.tar"
    words = ["--out", str(tmp_path / "out"), "--archive", str(archive), "--workers", "1"]
    assert command.run([*words, "--seconds", "60"]) == code
    said = capsys.readouterr().out
    assert "not what abc1234 says: a.cu" in said
    assert "1 skipped: b" in said
    assert archive.exists()


ROWS = dict(re.findall(r"^\| `([^`]+\.(?:csv|png))` \| ([^|]+) \|", README, re.MULTILINE))


def test_every_measured_file_is_in_the_readme() -> None:
    found = {
        str(path.relative_to(BENCHMARKS))
        for kind in ("*.csv", "*.png")
        for path in BENCHMARKS.rglob(kind)
    }
    assert set(ROWS) == found


@pytest.mark.parametrize(("file", "made"), ROWS.items(), ids=list(ROWS))
def test_its_script_exists_or_it_is_kept_by_hand(file: str, made: str) -> None:
    scripts = re.findall(r"`([\w/]+\.py)`", made)
    assert all((BENCHMARKS / script).exists() for script in scripts)
    assert scripts or "by hand" in made


def test_what_hands_keep_no_job_writes() -> None:
    by_hand = {file for file, made in ROWS.items() if made.startswith("by hand")}
    assert not by_hand & set(TABLES)


def test_commits_that_are_no_more_are_named() -> None:
    """As long as a table has rows of them."""
    gone = ["299fbff", "f40c5b8", "783bd81", "b71b94b", "490a205", "00b2769", "2ff1a32"]
    tables = [path.read_text(encoding="utf-8") for path in BENCHMARKS.rglob("*.csv")]
    assert all((commit in README) == any(commit in text for text in tables) for commit in gone)


def test_the_page_is_linked_and_tells_every_option() -> None:
    page = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    assert "(docs/measuring.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    text = (BENCHMARKS / "gpu_round" / "__main__.py").read_text(encoding="utf-8")
    options = re.findall(r'add_argument\("(--\w+)"', text)
    assert [option for option in options if f"`{option}" not in page] == []
    for word in re.findall(r"`([a-z_0-9]+\*[a-z_0-9*]*)`", page):
        assert any(fnmatch(job.name, word) for job in JOBS), word
    loops = re.findall(r"for page in ([\w ]+);", page)
    for folder, names in zip((BENCHMARKS, BENCHMARKS / "quality"), loops, strict=True):
        assert all((folder / f"{name}.py").exists() for name in names.split())
