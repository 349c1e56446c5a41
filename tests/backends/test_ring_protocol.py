"""The protocol of the Hopper kernel's ring of tiles, every order of events tried on a model:
nothing is read before it is there, nothing is copied over what is read, nobody waits for ever; and
each wait and arrival is needed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from ring_protocol import Ring, check, names

from sagepatch.backends.cuda.attention_tiles import SERVED, Options, instance, refusal
from sagepatch.numerics.recipe import RECIPES

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from schedule_noise import FAULTS

# K of a tile is followed, a round later, by a tile whose V before it takes the place of V that is
# read until after the product with this K has ended: the copy waits for that.
SHIELDED = {"arrival at K empty"}


@cache
def served() -> tuple[Ring, ...]:
    """The rings of all instances that serve, over one block that goes round and two of one tile."""
    found = set()
    for recipe in map(RECIPES.get, SERVED):
        assert recipe is not None
        for dim in range(8, 257, 8):
            for raw_q in (None, torch.bfloat16)[: 1 + (recipe.q_granularity == "token")]:
                if refusal(recipe, dim, dim) is None:
                    made = instance(recipe, dim, dim, Options(raw_q=raw_q))
                    stages = int(dict(made.program.defines)["STAGES"])
                    tile = made.tile
                    blocks = (stages + 1, 1, 1)
                    form = tile.serial, raw_q is not None, tile.pingpong
                    found.add(Ring(stages, tile.warpgroups, blocks, *form))
    return tuple(sorted(found, key=repr))


def small(ring: Ring, stages: int) -> Ring:
    """The same with fewer stages, round and round again."""
    return replace(ring, stages=stages, blocks=(stages + 1, 1, 1, stages))


# Without this wait a warpgroup can come round to the slot, in the next block of queries, before its
# copy has landed, and take the parity of the phase before for the one that it wants. With codes of
# Q that block is held back by whoever still waits for the tile.
NEEDLESS_WITH_CODES = "tiles of others: wait for K full"
# Under a causal mask warpgroups leave their last tiles to the others (OWN_TILES).
OWN = [
    Ring(2, 2, (3, 4, 1, 1), raw_q=True, skips=(2, 0)),
    Ring(2, 2, (3, 4, 1, 1), raw_q=True, serial=False, skips=(2, 0)),
    Ring(2, 2, (3, 4, 1, 1), skips=(2, 0)),
    Ring(2, 3, (3, 1, 1), raw_q=True, skips=(2, 1, 0)),
]
RINGS = [*dict.fromkeys(small(ring, 2) for ring in served()), *OWN]


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_every_order_of_events_is_right(ring):
    assert check(ring).fault == ""


@pytest.mark.slow
@pytest.mark.parametrize("ring", [*served(), replace(OWN[-1], stages=3, blocks=(4, 2))], ids=str)
def test_every_order_of_events_of_rings_that_serve_is_right(ring):
    verdict = check(ring)
    assert verdict.fault == ""
    assert verdict.states > 1000


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_each_wait_and_arrival_is_needed(ring):
    for name in sorted(names(ring)):
        needed = name != NEEDLESS_WITH_CODES or ring.raw_q
        assert bool(check(ring, without=name).fault) == needed, name


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_an_arrival_before_its_read_has_ended_is_found(ring):
    arrivals = {name for name in names(ring) if "arrival" in name and "of others" not in name}
    for name in sorted(arrivals):
        found = "while it is read" in check(ring, early=name).fault
        assert found == (name not in SHIELDED), name


def test_the_model_has_each_wait_and_arrival_of_the_source():
    """By the list that takes them out on a GPU, which quotes their lines."""
    modelled = set().union(*map(names, RINGS))
    quoted = {
        name
        for name, fault in FAULTS.items()
        if fault.file in ("attention.cu", "attention_copy.cuh", "attention_queries.cuh")
        and any(word in fault.said for word in ("wait(", "arrive("))
        and ("wait for" in name or "arrival" in name)
    }
    # An arrival at V's barrier has one line a form, each in the same place.
    same = {"in pieces: arrival at V empty", "in place: arrival at V empty"}
    assert quoted - same == modelled


def test_faults_are_told_in_words():
    assert "without" in check(Ring(2, 2, (3,)), without="serial: wait for K full").fault
    assert "for ever" in check(Ring(2, 2, (3,)), without="serial: arrival at V empty").fault
