"""Calibration tables as plain values, drawn at random from a seed: no model, no kernel."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from report.report_rows import EXACT, REPORT, ROW

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.sample import HeadErrors, Sample
from sagepatch.calibration.sections import sampled_steps
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.plan import Plan, PlanEntry
from sagepatch.report.model import LayerRow, Report, main_variant

NAMES = (
    *("triton.sage2_8b_k128", "triton.sage2_8", "triton.sage2pp_8", "triton.sage1_b"),
    "triton.sage1_b_f32",
)
SHAPE = "1x6x4608x4608x128 bf16"


def errors(cosine: float, heads: int, dice: random.Random, us: float | None) -> HeadErrors:
    """Errors of a kernel whose worst head has this cosine."""
    least = dice.randrange(heads)
    cosines = [min(1.0, cosine + (1 - cosine) * dice.random()) for _ in range(heads)]
    cosines[least] = cosine
    rel_l1 = [math.sqrt(2 * max(0.0, 1 - one)) * dice.uniform(0.4, 1.1) for one in cosines]
    ratios = [abs(1 + (1 - one) * dice.choice((3, 60)) * dice.uniform(-1, 1)) for one in cosines]
    return HeadErrors(
        True, tuple(cosines), tuple(rel_l1), tuple(one / 10 for one in rel_l1), tuple(ratios), us
    )


def table(
    seed: int, *, layers: int = 7, steps: int | None = 28, timed: bool = True, heads: int = 6
) -> Calibration:
    """A calibration of `layers` layers over `steps` denoising steps (None: calls without a place)
    with what happens in one: ties, one sample, not finite, quite wrong, nothing tried.
    """
    dice = random.Random(seed)
    rows = []
    for number in range(layers):
        names = dice.sample(NAMES, dice.randint(2, len(NAMES)))
        places = list(sampled_steps(steps)) if steps else [0, 1, 3, 7]
        if number == 1:
            names = []
        if number == 2:
            places = places[:1]
        level = {name: 10 ** dice.uniform(-5, -2) for name in names}
        us = {name: dice.choice([310.0, 320.0, 331.25, 442.0, 500.0]) for name in names}
        samples = []
        for place in places:
            harder = 1 + 6 * abs(place / max(places[-1], 1) - 0.5) * dice.random()
            # Calls of other shapes take other times.
            slower = dice.choice((1.0, 1.1, 1.4)) if number == 5 else 1.0
            found = {
                name: errors(
                    1 - level[name] * harder, heads, dice, slower * us[name] if timed else None
                )
                for name in names
            }
            if number == 3 and names and place == places[-1]:
                first = found[names[0]]
                broken = (-1.0, *first.cosine[1:])
                inf = (math.inf, *first.rel_l1[1:])
                nan = (math.nan, *first.norm_ratio[1:])
                found[names[0]] = HeadErrors(False, broken, inf, inf, nan, first.us)
            if number == 4 and names:
                found[names[-1]] = errors(-0.9, heads, dice, us[names[-1]] if timed else None)
            at = place if steps else None
            exact = 442.0 * slower if timed else None
            samples.append(Sample(place + 1, at, steps, SHAPE, "bf16", found, None, exact))
        rows.append(LayerTable(f"blocks.{number}.attn", "joint", tuple(samples)))
    return Calibration("f" * 16, "FluxPipeline", not timed, "NVIDIA H200", {}, tuple(rows))


def shortened(calibration: Calibration, seed: int) -> Calibration:
    """The calibration with one kernel at least in every sample, and no time for some others; each
    step is a prompt of its own.
    """
    dice = random.Random(seed)

    def short(row: Sample) -> Sample:
        kept = set(dice.sample(list(row.errors), dice.randint(1, len(row.errors))))
        found = {name: one for name, one in row.errors.items() if name in kept}
        skipped = tuple(name for name in row.errors if name not in kept)
        return replace(row, errors=found, skipped=skipped, run=f"run {row.call}")

    layers = (
        LayerTable(one.site, one.kind, tuple(short(row) if row.errors else row for row in one.rows))
        for one in calibration.layers
    )
    return replace(calibration, layers=tuple(layers))


def report_of_table(calibration: Calibration, threshold: float = 0.998) -> Report:
    """A report whose layers run what the calibration's plan says."""
    return report_of_plan(calibration.plan(threshold)).with_calibration(calibration)


def report_of_plan(plan: Plan) -> Report:
    """A report whose layers run a plan, 28 calls each."""
    return replace(
        REPORT,
        model=plan.model,
        layers=tuple(row_of_entry(entry) for entry in plan.entries),
        threshold=plan.threshold,
        emulated=plan.emulated,
        warnings=(),
    )


def row_of_entry(entry: PlanEntry) -> LayerRow:
    """The row of a layer that has run its entry's kernel 28 times."""
    kept = ("kind", "variant", "reason", "samples", "ranges", "us_exact", "us_chosen", "cosine")
    measured = ("cosine_mean", "rel_l1", "rmse", "norm_ratio", "worst_head", "worst_call")
    values = {name: getattr(entry, name) for name in (*kept, *measured)}
    values["variant"] = main_variant(entry)
    tier = BY_NAME[values["variant"]].tier
    base = EXACT if tier == "exact" else ROW
    name = entry.site
    quantised = 0 if tier == "exact" else 28
    counts = {values["variant"]: 28}
    shapes = entry.shapes
    return replace(
        base, name=name, tier=tier, quantised_calls=quantised, by_variant=counts, fallbacks={},
        measured_on=shapes, **values,
    )  # fmt: skip
