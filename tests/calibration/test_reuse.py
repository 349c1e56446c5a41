"""Plan entries made earlier or elsewhere: checked at the first call, timed again, translated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.layers import call, entry, layer

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE, SDPA
from sagepatch.calibration import measure as measuring
from sagepatch.calibration import reuse
from sagepatch.calibration.choose import LEAST_GAIN
from sagepatch.calibration.measure import Stopwatch
from sagepatch.calibration.reuse import (
    FirstLook,
    TimeAgain,
    accurate_alternatives,
    emulation,
    native,
    stale,
)
from sagepatch.calibration.timing import CallTime
from sagepatch.dispatch import Request
from sagepatch.errors import KernelUnavailable
from sagepatch.ops import run_exact
from sagepatch.plan import PlanRange

FAST, SAFE = "emulated.sage2_8", "emulated.sage1_b"


class TestFirstLook:
    """A kept entry, before the layer's first call."""

    def look(self, *, measured: str):
        told: list[str] = []

        def settle(one, found, reason) -> None:
            told.append(f"settled: {reason}")
            one.run_with(Request(found.variant), reason)

        def anew(one) -> None:
            told.append("anew")
            one.observer = lambda same, given: run_exact(given)

        kept = entry("blocks.0.attn", FAST, shapes=(measured,))
        return FirstLook(kept, "kept", settle, anew), told

    def test_a_call_like_the_measured_ones_is_served_by_the_entry(self) -> None:
        look, told = self.look(measured="2x2x40x50x32 fp32")
        one = layer()
        assert look.observe(one, call()) is None
        assert told == ["settled: kept"]
        assert one.runs == FAST

    @pytest.mark.parametrize("size", [{"B": 0}, {"Sq": 0}, {"Skv": 0}, {"H": 0}])
    def test_a_call_without_rows_decides_nothing(self, size: dict[str, int]) -> None:
        look, told = self.look(measured="1x2x33x47x32 fp32")
        found = look.observe(layer(), call(**size))
        assert found is not None
        assert found[0].shape == call(**size).q.shape
        assert told == []

    @pytest.mark.parametrize(
        "measured",
        [
            *("1x2x100x47x32 fp32", "1x4x33x47x32 fp32", "1x2x33x47x32 bf16"),
            "1x2x33x47x32 fp32 mask bool",
        ],
    )
    def test_another_call_is_measured_anew_and_exact(self, measured: str) -> None:
        look, told = self.look(measured=measured)
        given = call()
        result = look.observe(layer(), given)
        assert result is not None
        assert torch.equal(result[0], run_exact(given)[0])
        assert told == ["anew"]

    def test_single_queries_decide_nothing(self) -> None:
        look, told = self.look(measured="1x2x33x47x32 fp32")
        given = call(Sq=1)
        result = look.observe(layer(), given)
        assert result is not None
        assert torch.equal(result[0], run_exact(given)[0])
        assert told == []


class TestTimeAgain:
    """An entry of another GPU, at the layer's first call on this one."""

    @pytest.fixture
    def clock(self, monkeypatch):
        """Reads what a test says that each kernel takes."""
        speeds = {SDPA.name: 100.0, FAST: 50.0, SAFE: 80.0, "emulated.sage2pp_8": 10.0}
        name = {"now": ""}
        original = Stopwatch.us

        def us(self, variant, given, spec, again=True, layer=""):
            name["now"] = variant.name
            return original(self, variant, given, spec)

        monkeypatch.setattr(Stopwatch, "us", us)
        monkeypatch.setitem(measuring.TIMERS, "cpu", lambda *_: CallTime(speeds[name["now"]], 0.0))
        return speeds

    def settled(self, made, one=None):
        found = []

        def settle(layer_, new) -> None:
            found.append(new)

        observer = TimeAgain(made, Stopwatch(), settle)
        result = observer.observe(one or layer(), call())
        return result, found[0]

    @pytest.mark.parametrize("size", [{"B": 0}, {"Sq": 0}, {"Skv": 0}, {"H": 0}])
    def test_a_call_without_rows_is_not_timed(self, clock, size: dict[str, int]) -> None:
        found: list[str] = []
        observer = TimeAgain(entry("x", FAST), Stopwatch(), lambda *_: found.append("settled"))
        assert observer.observe(layer(), call(**size)) is not None
        assert found == []

    def test_the_fastest_accurate_one_is_taken(self, clock) -> None:
        made = entry("x", SAFE, alternatives={FAST: 1})
        result, new = self.settled(made)
        assert result is None
        assert (new.variant, new.us_exact, new.us_chosen) == (FAST, 100.0, 50.0)
        assert new.alternatives == {SAFE: 1}
        assert new.cosine is None  # what was measured is another recipe's
        assert "timed again on this GPU: 2.00x exact; before: 1.30x exact" in new.reason

    def test_the_entry_s_own_kernel_keeps_its_errors(self, clock) -> None:
        _, new = self.settled(entry("x", SAFE))
        assert (new.variant, new.cosine, new.worst_head) == (SAFE, 0.9995, 1)

    def test_a_faster_one_that_was_not_accurate_is_no_candidate(self, clock) -> None:
        _, new = self.settled(entry("x", FAST))
        assert new.variant == FAST

    def test_exact_wins_where_it_is_faster_here(self, clock) -> None:
        clock[SDPA.name] = 20.0
        _, new = self.settled(entry("x", FAST, alternatives={SAFE: 1}))
        assert new.variant == SDPA.name
        assert new.alternatives == {FAST: 1, SAFE: 1}

    def test_a_kernel_that_gains_too_little_here_is_not_taken(self, clock) -> None:
        clock[FAST] = 80.0
        clock[SDPA.name] = clock[FAST] / (1 - LEAST_GAIN) - 1
        _, new = self.settled(entry("x", FAST))
        assert (new.variant, new.alternatives) == (SDPA.name, {FAST: 1})
        clock[SDPA.name] = clock[FAST] / (1 - LEAST_GAIN) + 1e-9
        assert self.settled(entry("x", FAST))[1].variant == FAST

    # Once wrong: it raised out of the user's generation.
    @pytest.mark.parametrize(
        "error", [KernelUnavailable("does not compile here"), torch.OutOfMemoryError("full")]
    )
    def test_a_kernel_that_cannot_be_timed_here_is_not_taken(
        self, clock, monkeypatch, error
    ) -> None:
        real = Stopwatch.us

        def us(self, variant, one, spec, layer=""):
            if variant.name == FAST:
                raise error
            return real(self, variant, one, spec)

        monkeypatch.setattr(Stopwatch, "us", us)
        seen = layer()
        _, new = self.settled(entry("x", FAST, alternatives={SAFE: 1}), seen)
        assert new.variant in (SAFE, SDPA.name)
        assert len(seen.record.notes) == 1

    def test_an_entry_that_was_exact_for_speed_may_quantise_here(self, clock) -> None:
        _, new = self.settled(entry("x", SDPA.name, alternatives={FAST: 1, SAFE: 1}))
        assert new.variant == FAST
        assert new.alternatives == {SAFE: 1}

    def test_alternatives_with_other_numerics_are_dropped(self, clock) -> None:
        made = entry("x", SAFE, alternatives={FAST: 7, "gone.sage2_8": 1})
        assert accurate_alternatives(made) == {}
        _, new = self.settled(made)
        assert new.variant == SAFE
        exact = replace(made, variant=SDPA.name)
        assert self.settled(exact)[1].variant == SDPA.name

    def test_where_nothing_serves_exact_runs_and_says_so(self, clock) -> None:
        _, new = self.settled(entry("x", FAST), layer(emulate=False))
        assert new.variant == SDPA.name
        assert "no accurate kernel serves it here" in new.reason

    def test_on_a_device_without_a_clock_it_waits_and_is_exact(self) -> None:
        given = call()
        observer = TimeAgain(entry("x", FAST), Stopwatch(), lambda *_: pytest.fail("settled"))
        result = observer.observe(layer(), given)
        assert result is not None
        assert torch.equal(result[0], run_exact(given)[0])


def test_an_emulated_entry_becomes_a_kernel_of_its_recipe(monkeypatch) -> None:
    made = entry("x", FAST, alternatives={SAFE: 1})
    released = tuple(replace(variant, withheld=None) for variant in CATALOGUE)
    monkeypatch.setattr(reuse, "CATALOGUE", released)
    got = native(made)
    assert (got.variant, got.cosine) == ("cuda.sage2_8", 0.9995)
    assert "cuda.sage2_8 for emulated.sage2_8 of the plan" in got.reason
    monkeypatch.setattr(reuse, "CATALOGUE", (SDPA,))
    none = native(made)
    assert (none.variant, none.cosine) == (SDPA.name, None)
    assert none.alternatives == {FAST: 1, SAFE: 1}


def test_a_kernel_s_entry_becomes_its_emulation() -> None:
    got = emulation(entry("x", "triton.sage2_8"))
    assert (got.variant, got.cosine) == (FAST, 0.9995)
    for name in (FAST, SDPA.name):
        assert emulation(entry("x", name)) == entry("x", name)


def test_stale_entries_say_what_changed() -> None:
    assert stale(entry("x", FAST)) is None
    assert "numerics version 9, it is version 1 now" in str(
        stale(replace(entry("x", FAST), numerics_version=9))
    )
    assert "it is gone" in str(stale(entry("x", "cuda_mma.sage2_8b")))
    assert BY_NAME.get("cuda_mma.sage2_8b") is None


class TestRanges:
    """Entries of several kernels over the schedule."""

    SPLIT = (
        PlanRange(0.0, 0.25, SAFE, 1, "first", 0.9999),
        PlanRange(0.25, 1.0, FAST, 1, "rest", 0.999, alternatives={SAFE: 1}),
    )

    def timed(self, monkeypatch, times: dict[str, float], **changes):
        """The entry that a layer settles on where kernels take these times."""

        class Watch(Stopwatch):
            def us(self, variant, call, spec, layer=""):
                return times.get(variant.name)

        made = replace(entry("x", SAFE), ranges=self.SPLIT, **changes)
        settled = []
        observer = TimeAgain(made, Watch(), lambda one, found: settled.append(found))
        one = layer()
        assert observer.observe(one, call()) is None
        return settled[0]

    def test_each_range_takes_its_fastest_accurate_kernel(self, monkeypatch) -> None:
        got = self.timed(monkeypatch, {SDPA.name: 100.0, SAFE: 60.0, FAST: 40.0})
        assert [part.variant for part in got.ranges] == [SAFE, FAST]
        assert [part.us_chosen for part in got.ranges] == [60.0, 40.0]
        assert got.us_chosen == pytest.approx(0.25 * 60 + 0.75 * 40)
        assert (got.variant, got.us_exact) == (SAFE, 100.0)
        assert all("timed again on this GPU" in part.reason for part in got.ranges)

    def test_where_the_accurate_one_is_fastest_the_ranges_go(self, monkeypatch) -> None:
        got = self.timed(monkeypatch, {SDPA.name: 100.0, SAFE: 60.0, FAST: 70.0})
        assert (got.variant, got.ranges, got.us_chosen) == (SAFE, (), 60.0)
        got = self.timed(monkeypatch, {SDPA.name: 50.0, SAFE: 60.0, FAST: 70.0})
        assert (got.variant, got.ranges, got.us_chosen) == (SDPA.name, (), 50.0)

    def test_a_range_whose_kernel_is_too_slow_here_is_exact(self, monkeypatch) -> None:
        got = self.timed(monkeypatch, {SDPA.name: 80.0, SAFE: 90.0, FAST: 40.0})
        assert [part.variant for part in got.ranges] == [SDPA.name, FAST]
        assert got.variant == SDPA.name
        assert got.ranges[0].cosine is None
        assert got.ranges[0].alternatives == {SAFE: 1}

    def test_a_fast_kernel_never_enters_a_range_that_refused_it(self, monkeypatch) -> None:
        got = self.timed(monkeypatch, {SDPA.name: 100.0, SAFE: 70.0, FAST: 1.0})
        assert got.ranges[0].variant == SAFE
        assert got.variant == SAFE

    def test_they_are_translated_range_by_range(self, monkeypatch) -> None:
        released = tuple(replace(variant, withheld=None) for variant in CATALOGUE)
        monkeypatch.setattr(reuse, "CATALOGUE", released)
        made = replace(entry("x", SAFE), ranges=self.SPLIT)
        there = native(made)
        names = [part.variant.split(".") for part in there.ranges]
        assert [recipe for _, recipe in names] == ["sage1_b", "sage2_8"]
        assert all(toolchain != "emulated" for toolchain, _ in names)
        back = emulation(there)
        assert [part.variant for part in back.ranges] == [SAFE, FAST]
        assert back.variant == SAFE

    def test_one_outdated_range_makes_the_entry_stale(self) -> None:
        made = replace(entry("x", SAFE), ranges=self.SPLIT)
        assert stale(made) is None
        old = replace(self.SPLIT[1], numerics_version=7)
        assert "numerics version 7" in stale(replace(made, ranges=(self.SPLIT[0], old)))
