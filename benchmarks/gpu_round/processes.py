"""One job as processes: started in a group of its own, asked to end, and no child left behind.

A job's processes carry a mark in their environment: some of them start groups of their own, and are
found by it wherever they are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MARK = "SAGEPATCH_GPU_ROUND_JOB"
# Seconds that a job has after it was asked to end: pytest then still tells its counts.
GRACE = 5.0
# Seconds that killed processes are waited for.
PATIENCE = 20.0
PROCESSES = Path("/proc")


class Started:
    """A command that runs; what it prints goes to `log`, or its output to `stdout` alone."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str],
        log: Path,
        stdout: Path | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.began = time.monotonic()
        with log.open("wb") as errors, (stdout or log).open("ab") as printed:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**env, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=printed if stdout else errors,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def exit_code(self) -> int | None:
        """None while it runs. What it left running when it ended is killed."""
        code = self._process.poll()
        if code is not None:
            self._kill_all()
        return code

    def end(self) -> int:
        """Ask it to end as by Ctrl-C, wait a moment, then kill all of it."""
        self._signal_group(signal.SIGINT)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        finally:
            self._kill_all()
        return self._process.wait()

    def _kill_all(self) -> None:
        self._signal_group(signal.SIGKILL)
        # Whoever was starting another one meanwhile is found in the next turn; a process that lets
        # go of a GPU takes a moment.
        until = time.monotonic() + PATIENCE
        while (found := marked(self.mark)) and time.monotonic() < until:
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def marked(mark: str) -> list[int]:
    """Processes that carry a mark; none where the system has no /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in PROCESSES.glob("[0-9]*"):
        try:
            carried = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in carried:
            found.append(int(folder.name))
    return found
