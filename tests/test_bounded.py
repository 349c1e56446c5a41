"""A dictionary with a bound: full, it forgets everything, and never more than it must."""

from __future__ import annotations

import threading

from sagepatch.bounded import Bounded


def test_it_forgets_everything_when_full() -> None:
    kept: Bounded[int, str] = Bounded(3)
    for number in range(3):
        kept[number] = str(number)
    assert list(kept) == [0, 1, 2]
    kept[3] = "3"
    assert kept == {3: "3"}


def test_a_key_that_is_there_makes_no_room() -> None:
    kept = Bounded[str, int](2)
    kept["a"], kept["b"] = 1, 2
    kept["a"] = 3
    assert kept == {"a": 3, "b": 2}
    assert kept.get("c") is None


def test_threads_never_see_more_than_it_holds() -> None:
    kept: Bounded[int, int] = Bounded(8)
    most = []

    def fill(start: int) -> None:
        for number in range(start, start + 500):
            kept[number] = number
            found = kept.get(number)
            assert found in (None, number)
            most.append(len(kept))

    threads = [threading.Thread(target=fill, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 4000
    # Each thread may be past its look at the size when the others fill it up.
    assert max(most) <= 8 + 8
