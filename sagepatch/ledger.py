"""What ran where: calls by kernel and fallbacks by reason of one patched layer. Counts may be
approximate under threads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sagepatch.spec import AttnSpec


@dataclass(slots=True)
class Record:
    """The running account of one site. Written by the op, read by the report; nothing here decides
    anything.
    """

    calls: int = 0
    by_variant: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(
        default_factory=Counter
    )  # reason -> calls that ran exact because of it
    specs: Counter[AttnSpec] = field(default_factory=Counter)
    notes: list[str] = field(
        default_factory=list
    )  # demotions and other events, in order, each once

    def ran(self, spec: AttnSpec, variant: str) -> None:
        self.calls += 1
        self.by_variant[variant] += 1
        self.specs[spec] += 1

    def fell_back(self, reason: str) -> None:
        self.fallbacks[reason] += 1

    def note(self, text: str) -> bool:
        """Remember an event; True the first time, so that a caller warns once."""
        if text in self.notes:
            return False
        self.notes.append(text)
        return True
