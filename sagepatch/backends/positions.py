"""Causal offsets and windows as kernels take them: in 32 bits."""

from __future__ import annotations

from sagepatch.spec import Call

# Sums of an offset, a window and a row stay in 32 bits below.
MOST_PLAIN = 1 << 29


def positions(causal_offset: int | None, window: int | None, tokens: int) -> tuple[int, int]:
    """Causal offset and window for a call of so many `tokens` (queries and keys together), small
    enough that sums of them stay within 32 bits. What lies beyond all tokens is moved to their end,
    which hides and shows the same keys. A window of 0 is none.

    >>> positions(2**40, None, 100), positions(2**40, 2**40 - 3, 100), positions(5, 7, 100)
    ((100, 0), (100, 97), (5, 7))
    """
    offset = causal_offset or 0
    near = max(-tokens, min(tokens, offset))
    if window is None:
        return near, 0
    # A window hides what lies before offset - window + 1: that edge moves with the offset.
    edge = max(-tokens, min(tokens, offset - window + 1))
    return near, max(1, near - edge + 1)


def plain_positions(call: Call) -> tuple[int, int]:
    """Causal offset and window of a call, 0 for what it has not: as they are where sums with them
    stay in 32 bits, else by `positions`. Triton compiles for what divides its integers: those of
    one model are to stay those of one kernel whatever the length.
    """
    offset, window = call.causal_offset or 0, call.window or 0
    if abs(offset) < MOST_PLAIN and window < MOST_PLAIN:
        return offset, window
    return positions(offset, call.window, call.q.shape[2] + call.k.shape[2])
