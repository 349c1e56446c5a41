"""A dictionary with a bound, for what is remembered from one call to the next. Knows nothing of
what it holds.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dictionary that forgets everything when it is full: what is in it can be made again.

    Threads may share one: at worst something is made twice.

    >>> kept = Bounded(2)
    >>> for word in ("one", "two", "three"):
    ...     kept[word] = len(word)
    >>> kept
    {'three': 5}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
