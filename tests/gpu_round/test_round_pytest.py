"""Jobs of tests: what is counted, which tests are named, and what a test that hangs does."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rounds import job

from benchmarks.gpu_round import processes, running
from benchmarks.gpu_round.job import PYTEST
from benchmarks.gpu_round.jobs import chosen
from benchmarks.gpu_round.pytest_log import counts, failed_tests, progress, unfinished_tests
from benchmarks.gpu_round.running import Round

Make = Callable[..., Round]
# What pytest-xdist says where a test took its process with it, another process died between two
# tests, and a test failed.
CRASHED = """
tests/backends/test_masks.py::test_ok[0]@
[gw1] [ 25%] PASSED tests/backends/test_masks.py::test_ok[0]@
tests/backends/test_masks.py::test_hang[a - b]@
[gw1] node down: Not properly terminated
[gw1] [ 50%] FAILED tests/backends/test_masks.py::test_hang[a - b]@

replacing crashed worker gw1
[gw0] node down: Not properly terminated
replacing crashed worker gw0
tests/backends/test_masks.py::TestOne::test_two@
[gw2] [ 75%] FAILED tests/backends/test_masks.py::TestOne::test_two@
tests/backends/test_masks.py::test_err@
[gw2] [100%] ERROR tests/backends/test_masks.py::test_err@
=================================== FAILURES ===================================
___________________________ backends/test_masks.py _____________________________
[gw1] linux -- Python 3.11.7 python
worker 'gw1' crashed while running 'tests/backends/test_masks.py::test_hang[a - b]'
=========================== short test summary info ============================
FAILED tests/backends/test_masks.py::test_hang[a - b] - worker 'gw1' crashed whi...
FAILED tests/backends/test_masks.py::TestOne::test_two - assert 0
ERROR tests/backends/test_masks.py::test_err - ValueError: a - b
""".replace("@", " ")
CLOSED = "========== 2 failed, 1 passed, 1 error in 6.02s ==========\n"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("..\n3 passed in 1.20s\n", (3, 0, 0, 0)),
        ("== 1 failed, 2 passed, 1 warning, 2 errors in 61.00s (0:01:01) ==\n", (2, 1, 2, 0)),
        ("5 skipped, 7 deselected in 0.1s\n", (0, 0, 0, 5)),
        ("1 passed in 1s\n4 passed in 2s\n", (4, 0, 0, 0)),
        ("16.0 passed by\n", None),
    ],
)
def test_pytests_closing_line(said: str, found: tuple[int, ...] | None) -> None:
    assert tuple(counts(said).values()) == (found or ())


def test_tests_are_counted_where_pytest_was_killed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "test_one.py"
    # Does not hear when it is asked to end.
    tests.write_text(
        "import signal, time\n"
        "def test_one(): pass\n"
        "def test_two():\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.setattr(processes, "GRACE", 0.3)
    monkeypatch.setattr(running, "is_there", lambda need: False)
    going = make(replace(job("tests", ""), command=(*PYTEST, "-q", str(tests))))
    log = tmp_path / "out" / "tests" / "log.txt"

    def stop() -> None:
        while not log.exists() or "::test_two" not in log.read_text():
            time.sleep(0.05)
        going.stopped = True

    threading.Thread(target=stop).start()
    (record,) = going.run()
    assert (record.outcome, record.passed, record.failed) == ("interrupted", 1, 0)
    assert record.why.endswith("; in test_one.py::test_two")


def test_pytest_gets_its_processes_only_where_it_can_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tested,) = chosen(["test_cuda_masks"])
    for there, last in ((True, ["-n", "6"]), (False, ["tests/backends/test_cuda_masks.py"])):
        monkeypatch.setattr(running, "is_there", lambda need, there=there: there)
        words = running.command_of(tested, tmp_path, "abc1234", 6)
        assert words[-len(last) :] == last


def test_processes_that_died_count_as_failed_tests() -> None:
    told = {"passed": 1, "failed": 3, "errors": 1, "skipped": 0}
    assert counts(CRASHED + CLOSED) == told
    assert progress(CRASHED) == told | {"failed": 2}
    hung = "a/test_b.py::test_c PASSED  [ 50%]\na/test_b.py::test_d[x y] ++ Timeout ++\n"
    assert progress(hung) == {"passed": 1, "failed": 1, "errors": 0, "skipped": 0}
    assert failed_tests(hung) == unfinished_tests(hung) == "test_b.py::test_d[x y]"


def test_failed_tests_are_named_shortly() -> None:
    assert failed_tests(CRASHED + CLOSED) == (
        "test_masks.py::test_hang[a - b]; test_masks.py::TestOne::test_two; test_masks.py::test_err"
    )
    assert unfinished_tests(CRASHED + CLOSED) == ""
    killed = CRASHED[: CRASHED.index("[gw2] [ 75%]")]
    assert failed_tests(killed) == "test_masks.py::test_hang[a - b]"
    assert unfinished_tests(killed) == "test_masks.py::TestOne::test_two"
    assert failed_tests("ERROR tests/a/test_b.py - ImportError: no\n") == "test_b.py"
    assert failed_tests("3 passed in 1.0s\n") == ""
    many = "".join(f"FAILED tests/test_a.py::test_b[{n}] - assert 0\n" for n in range(23))
    assert failed_tests(many).endswith("test_a.py::test_b[19]; and 3 more")


@pytest.mark.parametrize("alone", [True, False], ids=["in pytest itself", "in a process of xdist"])
def test_a_test_that_hangs_is_counted_and_named(
    alone: bool, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not alone:
        pytest.importorskip("xdist")
    tests = tmp_path / "test_one.py"
    tests.write_text(
        "import time\ndef test_one(): pass\ndef test_two(): time.sleep(60)\n"
        "def test_three(): assert 0\n"
    )
    monkeypatch.setattr(running, "is_there", lambda need: not alone)
    one = job("tests", "")
    (record,) = make(replace(one, command=(*PYTEST, "-q", "--timeout=2", str(tests)))).run()
    assert record.outcome == "failed"
    if alone:
        assert (record.passed, record.failed) == (1, 1)
        assert record.failed_tests == "test_one.py::test_two"
    else:
        assert (record.passed, record.failed) == (1, 2)
        named = {"test_one.py::test_two", "test_one.py::test_three"}
        assert set(record.failed_tests.split("; ")) == named
    with (tmp_path / "out" / "summary.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["failed_tests"] == record.failed_tests


def test_a_process_that_died_between_tests_fails_its_job(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "is_there", lambda need: False)
    tests = tmp_path / "test_one.py"
    tests.write_text(
        "def test_one():\n    import sys\n"
        "    sys.__stdout__.write('[gw0] node down: Not properly terminated\\n')\n"
    )
    (record,) = make(replace(job("tests", ""), command=(*PYTEST, "-s", str(tests)))).run()
    assert (record.outcome, record.failed) == ("failed", 1)
    assert record.why == "a process of the tests died"
