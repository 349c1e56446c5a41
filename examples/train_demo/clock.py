"""Holds the time budget of a run and the log that carries it; knows nothing of what is trained."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Clock:
    """Seconds since the start of the run."""

    start: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Seconds passed."""
        return time.monotonic() - self.start

    def log(self, text: str) -> None:
        """Print the text behind the time, at once."""
        print(f"[{self.seconds():7.1f} s] {text}", flush=True)
