"""Runs a function in a forked child, which must come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

MOST_SECONDS = 20.0


def in_a_child(work: Callable[[], bool]) -> bool:
    """Whether `work` is true in a child forked now; a child that hangs is ended, and that is not
    true either.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
