"""The first lines of a page: what runs where, why, what it costs and what it gains; pure."""

from __future__ import annotations

from dataclasses import dataclass

from sagepatch.report.model import LayerRow, Report
from sagepatch.report.summary import counted


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure: what it is of, the figure, and a line that explains it."""

    what: str
    value: str
    how: str


def lead(report: Report) -> str:
    """One sentence: by which rule the layers got their kernels."""
    if not any(row.samples for row in report.layers):
        return (
            "Attention runs on quantised kernels where they serve, and on torch's exact attention "
            "elsewhere; nothing was measured here, the column at the right says why."
        )
    rule = "the first kernel by tier" if report.emulated else "the fastest kernel measured here"
    return (
        f"Each layer runs {rule} that stayed close enough to exact attention on the layer's own "
        f"inputs: a cosine of at least {report.threshold:g} in the worst head of every measured "
        "call. Where none did, or none was faster, it runs exact attention."
    )


def tiles(report: Report) -> list[Tile]:
    """What runs where, what it costs, what it gains."""
    counts = report.counts
    quantised = counts.fast + counts.safe
    exact = f"{counts.exact} exact" if counts.exact else "none exact"
    made = [Tile("Layers quantised", f"{quantised} of {counts.found}", _rest(report, exact))]
    worst = worst_row(report.layers)
    if worst is not None:
        where = f"{worst.name}, {worst.variant}"
        if worst.worst_head is not None:
            where += f", head {worst.worst_head}"
        if worst.worst_step is not None:
            where += f", step {worst.worst_step}"
        elif worst.worst_call is not None:
            where += f", call {worst.worst_call}"
        made.append(Tile("Worst layer's cosine", f"{worst.cosine:.5f}", where))
    if report.pictures is not None:
        pictures = report.pictures
        sentence = pictures.sentence().partition(": ")[2]
        made.append(Tile("Picture against the exact one", f"SSIM {pictures.ssim:.4f}", sentence))
    made += _times(report)
    return made


def worst_row(rows: tuple[LayerRow, ...]) -> LayerRow | None:
    """The patched layer whose kernel has the lowest cosine; None where none was measured."""
    measured = [row for row in rows if row.cosine is not None and row.replaced_by is None]
    return min(measured, key=lambda row: row.cosine or 0.0, default=None)


def _rest(report: Report, exact: str) -> str:
    counts = report.counts
    others = [f"{counts.fast} fast", f"{counts.safe} safe", exact]
    if counts.left:
        others.append(f"{counts.left} left alone")
    if counts.lost:
        others.append(f"{counts.lost} no longer patched")
    return ", ".join(others)


def _times(report: Report) -> list[Tile]:
    attention = report.attention()
    if attention is None:
        why = (
            "kernels are emulated on this machine: a GPU would tell"
            if report.emulates
            else "no call was like a timed one, or there is no GPU"
        )
        return [Tile("Speed", "not measured", why)]
    timed = f"{counted(attention.layers, 'timed layer')}, {counted(attention.calls, 'call')}"
    made = [Tile("Attention", f"{attention.gain:.2f}x as fast", timed)]
    clock = attention.measured_run_gain
    if attention.share is not None and attention.run_gain is not None:
        predicted = f"{attention.run_gain:.2f}x predicted"
        share = f"attention is {attention.share:.0%} of it"
        if clock is None:
            made.append(Tile("Whole run", predicted, f"{share}; the exact run was not timed"))
        else:
            made.append(Tile("Whole run", f"{clock:.2f}x measured", f"{predicted}; {share}"))
    elif clock is not None:
        made.append(Tile("Whole run", f"{clock:.2f}x measured", "the same run, exact, beside it"))
    return made
