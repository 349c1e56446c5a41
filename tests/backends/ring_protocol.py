"""The protocol by which the threads of attention.cu share tiles, as a model small enough to try
every order of events: one thread that copies, warpgroups that compute, barriers with parities, a
ring of slots for K and V, a buffer of Q, blocks of queries one after another. Knows no GPU.

Each wait and arrival bears the name by which benchmarks/schedule_noise.py takes the same one out of
the source (`FAULTS`, which quotes its line). A copy lands at any time after it was issued; a slot
is read from the issue of a product to the wait for its end. A warpgroup arrives as one: its warps
arrive alike, each for itself. What no other thread can tell apart is one step: a wait and the read
or copy behind it, the end of a read and the arrival behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Ring:
    """What is checked: `blocks` are tiles of one block of queries after another, of which
    warpgroup c leaves the last `skips[c]` to the others (OWN_TILES).
    """

    stages: int
    consumers: int
    blocks: tuple[int, ...]
    serial: bool = True
    raw_q: bool = False  # Q is read once, at the beginning of a block
    turns: bool = False  # PINGPONG
    skips: tuple[int, ...] = (0, 0, 0)


class Wait(NamedTuple):
    """Until the phase of this parity is over (mbarrier.try_wait.parity)."""

    barrier: int
    parity: int
    name: str


class Arrive(NamedTuple):
    barrier: int
    name: str


class Read(NamedTuple):
    """From now on, until `End`: the slot must hold tile, or block of Q, number `wanted`."""

    slot: int
    wanted: int


class End(NamedTuple):
    slot: int


class Copy(NamedTuple):
    """Expect the bytes at the full barrier of a slot, and issue the copy into it."""

    slot: int
    value: int


class Take(NamedTuple):
    turn: int


class Give(NamedTuple):
    turn: int


Operation = Wait | Arrive | Read | End | Copy | Take | Give
# The steps of one thread, each of operations that happen at once.
Program = list[tuple[Operation, ...]]


class Places:
    """Numbers of slots and barriers; `stage` and `phase` of one thread as the source has them."""

    def __init__(self, stages: int) -> None:
        self.stages, self.stage, self.phase, self.q_phase = stages, 0, 0, 0
        self.slots = 2 * stages + 1
        self.q = 2 * stages

    def k(self) -> int:
        return self.stage

    def v(self) -> int:
        return self.stages + self.stage

    def full(self, slot: int) -> int:
        return slot

    def empty(self, slot: int) -> int:
        return self.slots + slot

    def advance(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage = 0
            self.phase ^= 1


def copying(ring: Ring) -> Program:
    """The thread that copies: `warpgroup == 0`."""
    at, steps, tile = Places(ring.stages), Program(), 0
    q_form = "raw" if ring.raw_q else "codes"
    for block, count in enumerate(ring.blocks):
        if count == 0:
            continue
        wait = Wait(at.empty(at.q), at.q_phase ^ 1, f"copy: wait for Q empty ({q_form})")
        steps.append((wait, Copy(at.q, block)))
        at.q_phase ^= 1
        for _ in range(count):
            for slot, what in ((at.k(), "K"), (at.v(), "V")):
                wait = Wait(at.empty(slot), at.phase ^ 1, f"copy: wait for {what} empty")
                steps.append((wait, Copy(slot, tile)))
            at.advance()
            tile += 1
    return steps


def computing(ring: Ring, consumer: int) -> Program:
    """Warpgroup number `consumer` of those that compute."""
    at, steps, before = Places(ring.stages), Program(), 0
    q_form = "raw" if ring.raw_q else "codes"

    def take() -> Program:
        return [(Take(1 + consumer),)] if ring.turns else []

    def give() -> Program:
        return [(Give(2 - consumer),)] if ring.turns else []

    def scores(place: str, tile: int) -> Program:
        wait = Wait(at.full(at.k()), at.phase, f"{place}wait for K full")
        read = Read(at.k(), tile)
        return [(wait,), *take(), (read,)] if ring.turns else [(wait, read)]

    def values(place: str, tile: int, slot: int, phase: int) -> Program:
        return [(Wait(at.full(slot), phase, f"{place}wait for V full"), Read(slot, tile))]

    def free(place: str, what: str, slot: int) -> Program:
        return [(End(slot), Arrive(at.empty(slot), f"{place}arrival at {what} empty"))]

    if ring.turns and consumer == 1:
        steps.append((Give(1),))
    for block, count in enumerate(ring.blocks):
        if count == 0:
            continue
        own = max(1, count - ring.skips[consumer])
        end_q = free("", "Q", at.q)
        end_q = [tuple(_named(op, q_form) for op in step) for step in end_q]
        steps.append(
            (Wait(at.full(at.q), at.q_phase, f"wait for Q full ({q_form})"), Read(at.q, block))
        )
        at.q_phase ^= 1
        steps += end_q if ring.raw_q else []
        for tile in range(before, before + own):
            if ring.serial:
                steps += scores("serial: ", tile) + free("serial: ", "K", at.k())
                steps += values("serial: ", tile, at.v(), at.phase)
                steps += free("serial: ", "V", at.v())
                at.advance()
            elif tile == before:
                steps += scores("first tile: ", tile) + give() + free("first tile: ", "K", at.k())
            else:
                slot, phase = at.v(), at.phase
                at.advance()
                steps += scores("", tile) + values("", tile - 1, slot, phase) + give()
                steps += free("", "K", at.k()) + free("", "V", slot)
        steps += [] if ring.raw_q else end_q
        if not ring.serial:
            steps += values("last tile: ", before + own - 1, at.v(), at.phase)
            steps += free("last tile: ", "V", at.v())
            at.advance()
        for _ in range(count - own):
            place = "tiles of others: "
            for what, slot in (("K", at.k()), ("V", at.v())):
                steps.append((Wait(at.full(slot), at.phase, f"{place}wait for {what} full"),))
            for what, slot in (("K", at.k()), ("V", at.v())):
                steps.append((Arrive(at.empty(slot), f"{place}arrival at {what} empty"),))
            at.advance()
        before += count
    if ring.turns and consumer == 0:
        steps.append((Take(1),))
    return steps


def _named(operation: Operation, form: str) -> Operation:
    """An arrival at Q's barrier lies elsewhere for raw rows than for codes."""
    if isinstance(operation, Arrive):
        return Arrive(operation.barrier, f"{operation.name} ({form})")
    return operation


@dataclass(frozen=True)
class Verdict:
    """What a check found: a fault in words, "" for none, after how many states."""

    fault: str
    states: int


class State(NamedTuple):
    places: tuple[int, ...]  # steps that each thread has behind it
    barriers: tuple[int, ...]  # 16 * parity of the phase under way + arrivals in it
    slots: tuple[int, ...]  # what each holds: a number, NOTHING, or FLYING + number
    turns: tuple[int, ...]  # whether turn 1 and 2 are given


NOTHING = -1
FLYING = 1 << 20


class _Fault(Exception):
    """Something is wrong."""


def programs(ring: Ring) -> list[Program]:
    """Of all threads."""
    return [copying(ring), *(computing(ring, c) for c in range(ring.consumers))]


def names(ring: Ring) -> set[str]:
    """Waits and arrivals that `check` can leave out."""
    steps = (step for program in programs(ring) for step in program)
    return {op.name for step in steps for op in step if isinstance(op, Wait | Arrive)}


def check(ring: Ring, without: str | None = None, early: str | None = None) -> Verdict:
    """Try every order of events of `ring`, `without` a wait or arrival, or with an arrival made too
    `early`, before the end of the read, until something is wrong: a slot read that holds another
    tile or none yet, a copy into a slot that is read or copied into, threads that all wait,
    something left at the end.
    """
    assert {without, early} <= {None, *names(ring)}, f"not one of {sorted(names(ring))}"
    threads = [
        [
            tuple(op for op in part if not _is_named(op, without))
            for step in program
            for part in ([step[::-1][:1], step[:1]] if _is_named(step[-1], early) else [step])
        ]
        for program in programs(ring)
    ]
    reading = [_reading(program) for program in threads]
    slots = Places(ring.stages).slots
    # Warpgroups that do the same may change names.
    alike = all(program == threads[1] for program in threads[2:])
    start = State((0,) * len(threads), (0,) * (2 * slots), (NOTHING,) * slots, (0, 0, 0))
    seen, stack = {start}, [start]
    try:
        while stack:
            state = stack.pop()
            moved = False
            for following in _following(state, threads, reading, ring.consumers):
                moved = True
                if alike:
                    first, *others = following.places
                    following = following._replace(places=(first, *sorted(others)))
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
            if not moved:
                _end(state, threads)
    except _Fault as fault:
        return Verdict(str(fault), len(seen))
    return Verdict("", len(seen))


def _is_named(operation: Operation, name: str | None) -> bool:
    return isinstance(operation, Wait | Arrive) and operation.name == name


def _reading(program: Program) -> list[frozenset[int]]:
    """The slots that a thread reads when it has so many steps behind it."""
    now: frozenset[int] = frozenset()
    found = [now]
    for step in program:
        for op in step:
            if isinstance(op, Read):
                now |= {op.slot}
            elif isinstance(op, End):
                now -= {op.slot}
        found.append(now)
    return found


def _following(
    state: State, threads: list[Program], reading: list[list[frozenset[int]]], consumers: int
) -> Iterator[State]:
    """What may be next: a copy that lands, a thread that goes on."""
    for slot, content in enumerate(state.slots):
        if content >= FLYING:
            yield state._replace(
                slots=_with(state.slots, slot, content - FLYING),
                # The bytes that the one arrival told of are there: the phase is over.
                barriers=_with(state.barriers, slot, (state.barriers[slot] & 16) ^ 16),
            )
    for thread, steps in enumerate(threads):
        place = state.places[thread]
        if place == len(steps):
            continue
        _, barriers, slots, turns = state
        for op in steps[place]:
            match op:
                case Wait(barrier, parity, _):
                    if barriers[barrier] >> 4 == parity:
                        break
                case Take(turn):
                    if not turns[turn]:
                        break
                    turns = _with(turns, turn, 0)
                case Give(turn):
                    if turns[turn]:
                        raise _Fault(f"turn {turn} is given twice")
                    turns = _with(turns, turn, 1)
                case Arrive(barrier, _):
                    barriers = _with(barriers, barrier, _arrived(barriers[barrier], consumers))
                case Read(slot, wanted):
                    if slots[slot] != wanted:
                        raise _Fault(f"thread {thread} reads slot {slot} without {wanted}")
                case Copy(slot, value):
                    if any(slot in of[at] for of, at in zip(reading, state.places, strict=True)):
                        raise _Fault(f"slot {slot} is copied into while it is read")
                    if slots[slot] >= FLYING:
                        raise _Fault(f"slot {slot} is copied into while a copy is under way")
                    barriers = _with(barriers, slot, barriers[slot] + 1)
                    slots = _with(slots, slot, FLYING + value)
        else:
            yield State(_with(state.places, thread, place + 1), barriers, slots, turns)


def _arrived(barrier: int, count: int) -> int:
    """A barrier of `count` arrivals after one more: the last one ends the phase."""
    return (barrier & 16) ^ 16 if (barrier & 15) + 1 == count else barrier + 1


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _end(state: State, threads: list[Program]) -> None:
    """Nothing moves: that is right where all have ended and left nothing."""
    waiting = [t for t, steps in enumerate(threads) if state.places[t] < len(steps)]
    if waiting:
        raise _Fault(f"threads {waiting} wait for ever")
    if any(state.turns) or any(barrier & 15 for barrier in state.barriers):
        raise _Fault("a barrier or a turn is left half used")
