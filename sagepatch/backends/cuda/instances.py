"""Every program that is compiled ahead, for `sagepatch build` and for tests: a list, no policy."""

from __future__ import annotations

from sagepatch.backends.cuda import prepass
from sagepatch.backends.cuda.build import Program


def instances(target: str) -> tuple[Program, ...]:
    """The programs of every kernel family for `target`; others are compiled when a call wants
    them.
    """
    return prepass.instances(target)
