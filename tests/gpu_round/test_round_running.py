"""A round of jobs without a GPU: order, time, company, what is left of a job, and its archive."""

from __future__ import annotations

import csv
import json
import os
import signal
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rounds import job

from benchmarks.gpu_round import processes, running
from benchmarks.gpu_round.job import PYTEST
from benchmarks.gpu_round.kept import CACHE
from benchmarks.gpu_round.running import RESERVE as AT_LEAST
from benchmarks.gpu_round.running import Round

Make = Callable[..., Round]
LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at /proc")
# Writes a table into its folder.
TABLE = "import sys; open(sys.argv[1] + '/a.csv', 'w').write('x\\n1\\n2\\n')"
# Leaves a child in a group of its own, and its number in a file.
CHILD = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True)\n"
    "open(sys.argv[1] + '/pid', 'w').write(str(p.pid))\n"
)


def outcomes(going: Round) -> dict[str, tuple[str, str]]:
    return {record.job: (record.outcome, record.why) for record in going.run()}


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_what_becomes_of_jobs(make: Make, tmp_path: Path) -> None:
    going = make(
        job("good", TABLE, writes=(("a.csv", ""),), rows=2),
        job("bad", "import sys; print('said'); sys.exit(3)"),
        job("few", TABLE, writes=(("a.csv", ""),), rows=3),
        job("none", "pass", writes=(("a.csv", ""),)),
        job("two GPUs", "pass", gpus=2),
        job("package", "pass", needs=("no-such-package", "json-of-nobody")),
    )
    assert outcomes(going) == {
        "two GPUs": ("skipped", "needs 2 GPUs, found 1"),
        "package": ("skipped", "missing: no-such-package, json-of-nobody"),
        "good": ("ok", ""),
        "bad": ("failed", "exit code 3"),
        "few": ("failed", "too few rows in a.csv"),
        "none": ("failed", "too few rows in a.csv"),
    }
    assert (tmp_path / "out" / "bad" / "log.txt").read_text() == "said\n"


def test_missing_packages_can_be_overlooked_but_not_missing_gpus(make: Make) -> None:
    going = make(
        job("package", "pass", needs=("no-such-package",)), job("gpu", "pass", gpus=2), anyway=True
    )
    assert outcomes(going) == {
        "gpu": ("skipped", "needs 2 GPUs, found 1"),
        "package": ("ok", ""),
    }


def test_a_job_that_does_not_fit_is_not_begun_and_a_shorter_one_is(make: Make) -> None:
    going = make(
        job("long", "pass", seconds=500), job("short", "pass", seconds=1), seconds=20, cores=1
    )
    found = outcomes(going)
    assert found["long"][0] == "not reached"
    assert found["long"][1].startswith("needs 500 s, ")
    assert found["short"] == ("ok", "")


def test_a_job_that_overruns_is_ended_and_what_it_left_is_kept(make: Make, tmp_path: Path) -> None:
    code = TABLE + "\nimport time; print('begun', flush=True)\ntime.sleep(60)"
    began = time.monotonic()
    going = make(
        *(job("slow", code, writes=(("a.csv", ""),)), job("next", "pass")),
        seconds=AT_LEAST + 3,
        cores=1,
    )
    found = outcomes(going)
    assert time.monotonic() - began < AT_LEAST + 6
    assert found["slow"] == ("ended", "the round's time was over; usually 1 s")
    assert found["next"][0] == "not reached"
    with tarfile.open(tmp_path / "out.tar") as tar:
        names = tar.getnames()
        log = tar.extractfile("slow/log.txt").read().decode()  # type: ignore[union-attr]
    assert "slow/a.csv" in names
    assert log.startswith("begun")


def test_a_job_that_hangs_does_not_stop_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MORE", 0.5)
    monkeypatch.setattr(running, "TIMES", 0.0)
    going = make(job("hangs", "import time; time.sleep(60)"), job("next", "pass"), cores=1)
    assert outcomes(going) == {"hangs": ("ended", "it hung; usually 1 s"), "next": ("ok", "")}


# Each writes when it began and when it ended.
SPAN = (
    "import sys, time\nbegan = time.time()\ntime.sleep(0.6)\n"
    "open(sys.argv[1] + '/span', 'w').write(f'{began} {time.time()}')"
)


def spans(folder: Path) -> dict[str, tuple[float, float]]:
    found = {}
    for path in folder.glob("*/span"):
        began, ended = map(float, path.read_text().split())
        found[path.parent.name] = began, ended
    return found


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def test_nothing_runs_beside_a_quiet_job(make: Make, tmp_path: Path) -> None:
    make(
        *(job(name, SPAN) for name in ("a", "b")),
        job("quiet", SPAN, quiet=True),
        *(job(name, SPAN) for name in ("c", "d")),
    ).run()
    found = spans(tmp_path / "out")
    assert overlap(found["a"], found["b"])
    assert overlap(found["c"], found["d"])
    others = [span for name, span in found.items() if name != "quiet"]
    assert not any(overlap(found["quiet"], span) for span in others)


def test_jobs_share_the_cores_and_no_more(make: Make, tmp_path: Path) -> None:
    make(*(job(name, SPAN, workers=3) for name in ("a", "b")), cores=4).run()
    found = spans(tmp_path / "out")
    assert not overlap(found["a"], found["b"])


def test_a_job_of_more_cores_than_there_are_gets_those(make: Make) -> None:
    going = make(job("wide", "pass", workers=64), cores=2)
    assert outcomes(going) == {"wide": ("ok", "")}


@LINUX
@pytest.mark.parametrize("ends", [True, False], ids=["ends by itself", "is ended"])
def test_no_child_of_a_job_survives(make: Make, tmp_path: Path, ends: bool) -> None:
    code = CHILD + ("" if ends else "time.sleep(60)")
    make(job("parent", code), seconds=None if ends else AT_LEAST + 3).run()
    child = int((tmp_path / "out" / "parent" / "pid").read_text())
    assert not alive(child)


@LINUX
def test_an_interrupted_round_keeps_what_ran_and_leaves_no_process(
    make: Make, tmp_path: Path
) -> None:
    going = make(
        job("first", "pass"), job("second", CHILD + "time.sleep(60)"), job("third", "pass"), cores=1
    )
    pid = tmp_path / "out" / "second" / "pid"

    def stop() -> None:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    found = outcomes(going)
    assert found == {
        "first": ("ok", ""),
        "second": ("interrupted", "by Ctrl-C or SIGTERM"),
        "third": ("not reached", "interrupted before"),
    }
    assert not alive(int(pid.read_text()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with tarfile.open(tmp_path / "out.tar") as tar:
        summary = json.load(tar.extractfile("summary.json"))  # type: ignore[arg-type]
    assert [one["job"] for one in summary["jobs"]] == ["first", "second", "third"]


def test_the_archive_is_there_while_a_round_runs(make: Make, tmp_path: Path) -> None:
    going = make(job("a", TABLE), job("b", SPAN + "; time.sleep(1)"), cores=1, every=0.1)
    seen: list[list[str]] = []

    def look() -> None:
        while not seen or "a/a.csv" not in seen[-1]:
            if (tmp_path / "out.tar").exists():
                with tarfile.open(tmp_path / "out.tar") as tar:
                    seen.append(tar.getnames())
            time.sleep(0.02)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    going.run()
    assert not looking.is_alive()
    assert not list(tmp_path.glob("*.half"))


def test_the_summary_says_what_ran_on_what(make: Make, tmp_path: Path) -> None:
    make(job("tests", "print('2 passed, 1 skipped in 0.10s')")).run()
    with (tmp_path / "out" / "summary.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    told = {name: row[name] for name in ("job", "outcome", "passed", "failed", "skipped")}
    assert told == dict(job="tests", outcome="ok", passed="2", failed="0", skipped="1")
    assert (row["commit"], row["gpu"], row["torch"]) == ("abc1234", "a GPU", "2.0")
    assert row["command"].startswith("python -c ")


def test_what_a_job_prints_may_be_its_table(make: Make, tmp_path: Path) -> None:
    code = "import sys; print('x'); print(1); print('words', file=sys.stderr)"
    going = make(job("printed", code, writes=(("a.csv", ""),), stdout="a.csv"))
    assert outcomes(going) == {"printed": ("ok", "")}
    assert (tmp_path / "out" / "printed" / "a.csv").read_text() == "x\n1\n"
    assert (tmp_path / "out" / "printed" / "log.txt").read_text() == "words\n"


def test_a_run_of_tests_of_which_none_ran_proves_nothing(make: Make, tmp_path: Path) -> None:
    tests = tmp_path / "test_one.py"
    tests.write_text("import pytest\n@pytest.mark.skip\ndef test_one(): pass\n")
    skipping = replace(job("tests", ""), command=(*PYTEST, str(tests)))
    assert outcomes(make(skipping)) == {"tests": ("skipped", "no test ran")}


def test_jobs_share_kernels_that_the_archive_leaves_out(make: Make, tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\n"
        "kernels = pathlib.Path(os.environ['SAGEPATCH_TEST_KERNELS'])\n"
        "kernels.mkdir(exist_ok=True, parents=True)\n"
        "assert kernels.parent == pathlib.Path(os.environ['SAGEPATCH_CACHE_DIR'])\n"
        "pathlib.Path(sys.argv[1], 'found').write_text(str(list(kernels.iterdir())))\n"
        "(kernels / 'a.cubin').write_text('x')\n"
    )
    going = make(job("a", code), job("b", code), job("c", code, cold=True), cores=1)
    assert {outcome for outcome, _ in outcomes(going).values()} == {"ok"}
    found = {name: (tmp_path / "out" / name / "found").read_text() for name in "abc"}
    assert (found["a"], found["c"]) == ("[]", "[]")
    assert "a.cubin" in found["b"]
    assert (tmp_path / "out" / CACHE).stat().st_mode & 0o077 == 0
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert not [name for name in tar.getnames() if "cubin" in name]


@LINUX
def test_a_mark_finds_only_its_own() -> None:
    assert processes.marked("not a mark of anybody") == []
