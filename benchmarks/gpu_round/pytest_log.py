"""What a log of pytest says: how many tests passed and failed, and which failed. A test that hung
took pytest's process with it, or the process of pytest-xdist that ran it.
"""

from __future__ import annotations

import re

COUNTED = ("passed", "failed", "errors", "skipped")
MOST_NAMED = 20
# pytest's last line: "3 passed, 1 skipped in 2.13s", with or without a rule of "=" around it.
CLOSING = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s\b", re.MULTILINE)
DOWN = re.compile(r"\[gw\d+\] node down: Not properly terminated$", re.MULTILINE)
# Of a process that died in a test; without one it died between two.
CRASHED = re.compile(r"^worker 'gw\d+' crashed while running ", re.MULTILINE)
# What may stand behind letters: how far it is, a process that died, a test that took too long.
LETTERS = re.compile(
    r"^([.FEsxX]+)(?: *\[ *\d+%\]|\[gw\d+\] node down: .*|\++ Timeout \++)?$", re.MULTILINE
)
HUNG = re.compile(r"\++ Timeout \++$", re.MULTILINE)
NAMED = re.compile(
    r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)*(?:\[.*?\])?)(?: - .*)?$",
    re.MULTILINE,
)
FRAME = re.compile(r'^ +File "(?:.*/)?(\w+\.py)", line \d+, in (test_\w+)$', re.MULTILINE)


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
    """The same from pytest's lines of one letter a test, where it was killed before it closed.

    >>> progress("..F.s [ 50%]\\n.E")
    {'passed': 4, 'failed': 1, 'errors': 1, 'skipped': 1}
    """
    letters = "".join(LETTERS.findall(said))
    found = {name: letters.count(letter) for name, letter in zip(COUNTED, ".FEs", strict=True)}
    # It ended pytest, which had no letter for it.
    found["failed"] += bool(HUNG.search(said))
    return found


def failed_tests(said: str) -> str:
    """The tests that failed, were in error or hung, by file and name, not too many.

    >>> failed_tests("FAILED tests/a/test_b.py::test_c[1] - assert 0\\n")
    'test_b.py::test_c[1]'
    """
    names = [_short(name) for name in _named(said)]
    more = len(names) - MOST_NAMED
    return "; ".join(names[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else []))


def _named(said: str) -> list[str]:
    names = list(dict.fromkeys(NAMED.findall(said)))
    if not names and HUNG.search(said):
        # The thread that ran it is told last.
        names = ["::".join(frame) for frame in FRAME.findall(said)[-1:]]
    return names


def _short(name: str) -> str:
    file, colons, test = name.partition("::")
    return f"{file.rpartition('/')[2]}{colons}{test}"
