"""What ran where: calls by kernel and fallbacks by reason of one patched layer. Counts may be
approximate under threads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sagepatch.spec import AttnSpec

# Kinds of call that a layer's account tells apart. A language model makes a new one with each token
# it writes; past this many, calls are counted but no longer told apart.
MOST_SPECS = 1024


@dataclass(slots=True)
class Record:
    """The account of one layer since it was patched. The op writes it and the report reads it;
    nothing is decided by it.
    """

    calls: int = 0
    by_variant: Counter[str] = field(default_factory=Counter)
    # Reason -> calls that ran exact because of it.
    fallbacks: Counter[str] = field(default_factory=Counter)
    specs: Counter[AttnSpec] = field(default_factory=Counter)
    # Demotions and other events, in order, each once.
    notes: list[str] = field(default_factory=list)

    def ran(self, spec: AttnSpec, variant: str) -> None:
        self.calls += 1
        self.by_variant[variant] += 1
        if spec in self.specs or len(self.specs) < MOST_SPECS:
            self.specs[spec] += 1

    def ran_exact_instead(self, variant: str, exact: str, reason: str) -> None:
        """Correct the account of the last call: it was `variant`'s, but exact attention served."""
        self.by_variant[variant] -= 1
        if self.by_variant[variant] <= 0:
            del self.by_variant[variant]
        self.by_variant[exact] += 1
        self.fell_back(reason)

    def fell_back(self, reason: str) -> None:
        self.fallbacks[reason] += 1

    def note(self, text: str) -> bool:
        """Remember an event; True the first time, so that a caller warns once."""
        if text in self.notes:
            return False
        self.notes.append(text)
        return True
