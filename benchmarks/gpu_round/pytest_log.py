"""What a log of pytest with a line a test says: how many tests passed and failed, which failed, and
which had not ended. A test that hung took pytest's process with it, or that of pytest-xdist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

COUNTED = ("passed", "failed", "errors", "skipped")
WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")
MOST_NAMED = 20
# pytest's last line: "3 passed, 1 skipped in 2.13s", with or without a rule of "=" around it.
CLOSING = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s\b", re.MULTILINE)
DOWN = re.compile(r"\[gw\d+\] node down: Not properly terminated$", re.MULTILINE)
# Of a process that died in a test; without one it died between two.
CRASHED = re.compile(r"^worker 'gw\d+' crashed while running ", re.MULTILINE)
NAME = r"(\S+\.py(?:::\w+)+(?:\[.*?\])?)"
BEGUN = re.compile(rf"^{NAME} (?:\++ Timeout \++)?$", re.MULTILINE)
TIMEOUT = re.compile(rf"^{NAME} \++ Timeout \++$", re.MULTILINE)
# As pytest tells of a test that has ended, and as pytest-xdist does.
ENDED = re.compile(rf"^{NAME} ([A-Z]+)(?: .*)?$", re.MULTILINE)
ENDED_APART = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) {NAME} *$", re.MULTILINE)
# A line of the summary; a file that could not be read has no test.
SUMMED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)*(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


def counts(said: str) -> dict[str, int]:
    """How many tests passed, failed, were in error and skipped, from pytest's closing line; empty
    where there is none. A process that died between tests counts as a failed one, too.

    >>> counts("...\\n2 failed, 3 passed, 1 skipped in 0.51s\\n")
    {'passed': 3, 'failed': 2, 'errors': 0, 'skipped': 1}
    """
    lines = CLOSING.findall(said)
    if not lines:
        return {}
    found = dict.fromkeys(COUNTED, 0)
    for number, what in re.findall(r"(\d+) ([a-z]+)", lines[-1]):
        name = "errors" if what == "error" else what
        if name in found:
            found[name] = int(number)
    found["failed"] += max(len(DOWN.findall(said)) - len(CRASHED.findall(said)), 0)
    return found


def progress(said: str) -> dict[str, int]:
    """The same from the lines of tests, where pytest was killed before it closed.

    >>> progress("test_a.py::test_b PASSED    [ 50%]\\n[gw1] [ 60%] FAILED test_a.py::test_c \\n")
    {'passed': 1, 'failed': 1, 'errors': 0, 'skipped': 0}
    """
    words = [word for _, word in _ended(said)]
    found = {name: words.count(word) for name, word in zip(COUNTED, WORDS, strict=True)}
    # It ended pytest, which had no word for it.
    found["failed"] += len(TIMEOUT.findall(said))
    return found


def failed_tests(said: str) -> str:
    """The tests that failed, were in error or hung, by file and name, not too many.

    >>> failed_tests("FAILED tests/a/test_b.py::test_c[1] - assert 0\\n")
    'test_b.py::test_c[1]'
    """
    live = (name for name, word in _ended(said) if word in ("FAILED", "ERROR"))
    return _listed([*SUMMED.findall(said), *live, *TIMEOUT.findall(said)])


def unfinished_tests(said: str) -> str:
    """The tests that had begun and not ended.

    >>> unfinished_tests("a/test_b.py::test_c \\n")
    'test_b.py::test_c'
    """
    ended = {name for name, _ in _ended(said)}
    return _listed(name for name in BEGUN.findall(said) if name not in ended)


def _ended(said: str) -> list[tuple[str, str]]:
    apart = [(name, word) for word, name in ENDED_APART.findall(said)]
    return [(name, word) for name, word in (*ENDED.findall(said), *apart) if word in WORDS]


def _listed(found: Iterable[str]) -> str:
    names = []
    for name in dict.fromkeys(found):
        file, colons, test = name.partition("::")
        names.append(f"{file.rpartition('/')[2]}{colons}{test}")
    more = len(names) - MOST_NAMED
    return "; ".join(names[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else []))
