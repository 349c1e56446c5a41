"""What a report says, as values: one row a layer, the counts, the machine. Renders nothing itself.

Renderers are loaded by name where they are used, so that building a report costs nothing.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.choose import check_bound
from sagepatch.env import Machine
from sagepatch.errors import InvalidArgument
from sagepatch.layer import PatchedLayer
from sagepatch.ledger import Record
from sagepatch.patchers.site import Left
from sagepatch.plan import Plan, PlanEntry, PlanRange, write_text
from sagepatch.report.printable import printable, printable_deep
from sagepatch.report.summary import AttentionTime, Counts, condensed, headline, why_exact
from sagepatch.spec import AttnSpec

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from sagepatch.calibration.table import Calibration, LayerTable
    from sagepatch.report.pictures import Comparison

EMULATION = "Emulated kernels: slower than exact attention. This shows accuracy, not speed."
TAKEN_BACK = (
    "This patch was taken back: the model's attention runs without it. What follows is how it ran "
    "and what it measured until then."
)
NOT_RUN = "No call was counted yet: run the model, then ask again."
PLAN_ONLY = "Nothing has run on this plan yet: its errors are those that calibration measured."
_MASK = re.compile(r" mask (\w+)")
_UNMEASURED = PlanEntry("", "", "", 0, "")


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One attention layer. Errors are the worst over samples and heads, times in microseconds;
    None: not measured.

    `variant` is what the layer runs, `calls` counts its calls, `fallbacks` maps a reason to the
    calls that ran exact because of it, `replaced_by` names what took our place in the model.
    `shape` and `mask` describe its most frequent call of several queries, `measured_on` the calls
    that were measured, `calls_as_measured` counts the calls that are exactly like one of those.
    `worst_call` is the number of the call with the lowest cosine, `worst_step` its denoising step
    from 1. `ranges` says what runs where in the schedule, empty where `variant` runs throughout.
    `k_offset`, `q_outlier` and `p_entropy` describe the inputs and `remedy` what was tried, as in
    `PlanEntry`.
    """

    name: str
    kind: str
    variant: str
    tier: str
    cosine: float | None
    cosine_mean: float | None
    rel_l1: float | None
    rmse: float | None
    norm_ratio: float | None
    worst_head: int | None
    worst_call: int | None
    worst_step: int | None
    max_abs_v: float | None
    us_exact: float | None
    us_chosen: float | None
    calls: int
    quantised_calls: int
    calls_as_measured: int
    by_variant: dict[str, int]
    fallbacks: dict[str, int]
    shape: str | None
    mask: str | None
    samples: int
    measured_on: tuple[str, ...]
    reason: str
    replaced_by: str | None
    notes: tuple[str, ...]
    ranges: tuple[PlanRange, ...]
    k_offset: float | None
    q_outlier: float | None
    p_entropy: float | None
    remedy: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """The account of one patch. Prints itself; see also `to_json`, `to_html` and `plot`.

    `run_seconds` is the duration of the run that made the counted calls, `exact_run_seconds` that
    of the same run with exact attention, None where unknown. `calibration` is everything that was
    measured, None where that was not kept. `plans` are other plans of the model to compare with, by
    name. `in_force`: the patch was not taken back when the report was made.

    >>> print(patch.report())
    >>> patch.report().to_html("report.html")
    """

    model: str
    layers: tuple[LayerRow, ...]
    left: tuple[Left, ...]
    machine: dict[str, Any]
    threshold: float
    emulated: bool
    warnings: tuple[str, ...]
    pictures: Comparison | None = None
    run_seconds: float | None = None
    exact_run_seconds: float | None = None
    calibration: Calibration | None = None
    plans: tuple[tuple[str, Plan], ...] = ()
    in_force: bool = True

    @property
    def counts(self) -> Counts:
        """How many layers were found, patched by tier, left alone, and lost their patch."""
        return Counts.of(self.layers, len(self.left))

    @property
    def emulates(self) -> bool:
        """Whether a layer runs an emulated kernel, or ran one."""
        return any(
            name.startswith("emulated.")
            for row in self.layers
            for name in (row.variant, *row.by_variant, *(part.variant for part in row.ranges))
        )

    def attention(self) -> AttentionTime | None:
        """Time in attention and what the kernels gain; None where nothing was timed."""
        return (
            None
            if self.emulated
            else AttentionTime.of(self.layers, self.run_seconds, self.exact_run_seconds)
        )

    def headline(self) -> str:
        """One sentence: how many layers were found and what they run, or ran before the patch was
        taken back.
        """
        return headline(self.model, self.counts, self.in_force)

    def remarks(self) -> tuple[str, ...]:
        """What a reader must know before the numbers: that nothing of it is in force, emulation,
        why layers run exact, warnings.
        """
        found = [] if self.in_force else [TAKEN_BACK]
        found += [EMULATION] if self.emulates else []
        why = why_exact(self.layers)
        if why is not None:
            found.append(why)
            if not any(row.tier != "exact" for row in self.layers):
                found += self._problems()
        if self.layers and not any(row.calls for row in self.layers):
            found.append(PLAN_ONLY if any(row.samples for row in self.layers) else NOT_RUN)
        return (*found, *self.warnings)

    def _problems(self) -> list[str]:
        """What keeps kernels from running on this machine, as the machine's description says."""
        told = self.machine.get("problems")
        return [str(one) for one in told] if isinstance(told, list | tuple) else []

    def with_pictures(self, pictures: Comparison) -> Report:
        """This report with the picture of the exact run beside that of the quantised one."""
        return replace(self, pictures=pictures)

    def with_run_time(self, seconds: float, exact_seconds: float | None = None) -> Report:
        """This report with the duration of the run that made the counted calls, every layer being
        settled before: the share of attention and the gain of the whole run follow from it.
        `exact_seconds`, the duration of the same run with exact attention and nothing measured
        meanwhile, gives the measured gain beside the predicted one.
        """
        for one in (seconds, seconds if exact_seconds is None else exact_seconds):
            check_bound("the duration of a run", one)
            if not (one > 0 and math.isfinite(one)):
                raise InvalidArgument(f"a run of {one} s: needs more than 0")
        return replace(self, run_seconds=seconds, exact_run_seconds=exact_seconds)

    def with_calibration(self, calibration: Calibration) -> Report:
        """This report with everything that was measured: steps, heads, and the kernels not taken,
        which the HTML page solves again for other thresholds.

        Raises `InvalidArgument` for measurements of a layer that this report has not.
        """
        known = {row.name for row in self.layers}
        strange = [layer.site for layer in calibration.layers if printable(layer.site) not in known]
        if strange:
            raise InvalidArgument(
                f"the calibration has {len(strange)} layers that this report has not, such as "
                f"{strange[0]}: pass that of the same model"
            )
        tables = {printable(layer.site): layer for layer in calibration.layers}
        rows = tuple(_with_step(row, tables.get(row.name)) for row in self.layers)
        return replace(self, layers=rows, calibration=calibration)

    def with_plan(self, name: str, plan: Plan) -> Report:
        """This report with another plan of the model, to be compared in the HTML page.

        Raises `InvalidArgument` for a plan that names layers which this report has not.
        """
        from sagepatch.report.differences import differences

        differences(self.layers, plan)
        return replace(self, plans=(*self.plans, (printable(name), plan)))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text (schema: docs/report.md), written to `path` if one is given."""
        from sagepatch.report.render_json import render

        return _written(render(self), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one self-contained HTML page, written to `path` if one is given."""
        from sagepatch.report.render_html import render

        return _written(render(self), path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the errors of all layers to a PNG file; needs the extra `plot` (matplotlib)."""
        from sagepatch.report.render_plot import render

        render(self, path)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from sagepatch.report.render_table import render

        yield from render(self, options.max_width)

    def __str__(self) -> str:
        from sagepatch.report.render_table import render_text

        columns = shutil.get_terminal_size(fallback=(120, 24)).columns
        return render_text(self, min(160, max(60, columns)))


def report_of(
    *,
    parts: str,
    layers: Sequence[PatchedLayer],
    left: Sequence[Left],
    entries: Mapping[str, PlanEntry],
    replaced: Mapping[str, str],
    machine: Machine,
    threshold: float,
    emulated: bool,
    warnings: Sequence[str],
    table: Calibration | None = None,
    in_force: bool = True,
) -> Report:
    """Build a report from the state of a patch; every text in it is printable. `table` is what the
    patch has measured itself.
    """
    made = Report(
        printable(parts),
        tuple(row_of(layer, entries[layer.name], replaced.get(layer.name)) for layer in layers),
        tuple(Left(printable(one.name), one.kind, printable(one.reason)) for one in left),
        printable_deep(machine.to_dict()),
        threshold,
        emulated,
        tuple(map(printable, warnings)),
        in_force=in_force,
    )
    return made if table is None or not table.layers else made.with_calibration(table)


def row_of(layer: PatchedLayer, entry: PlanEntry, replaced_by: str | None) -> LayerRow:
    """One layer as of now. A layer whose kernel has served none of its calls runs exact attention,
    whatever it was told to run.
    """
    # Another thread may be running the layer: count on copies.
    record = _copied(layer.record)
    quantised = record.by_variant.total() - record.by_variant[SDPA.name]
    told = layer.runs if record.calls or not entry.ranges else main_variant(entry)
    idle = quantised == 0 and bool(record.fallbacks)
    variant = SDPA.name if idle else told
    measured = entry if variant in entry.variants else _UNMEASURED
    exact = variant == SDPA.name and not measured.ranges
    typical = _typical(record.specs)
    shape = str(typical) if typical is not None else entry.shape
    return LayerRow(
        name=printable(layer.name),
        kind=layer.kind,
        variant=variant,
        tier=BY_NAME[variant].tier,
        cosine=measured.cosine,
        cosine_mean=measured.cosine_mean,
        rel_l1=measured.rel_l1,
        rmse=measured.rmse,
        norm_ratio=measured.norm_ratio,
        worst_head=measured.worst_head,
        worst_call=measured.worst_call,
        worst_step=None,
        max_abs_v=entry.max_abs_v,
        us_exact=entry.us_exact,
        us_chosen=entry.us_exact if exact else measured.us_chosen,
        calls=record.calls,
        quantised_calls=quantised,
        calls_as_measured=sum(n for spec, n in record.specs.items() if str(spec) in entry.shapes),
        by_variant=dict(record.by_variant),
        fallbacks=dict(record.fallbacks),
        shape=shape,
        mask=None if shape is None else _mask(shape),
        samples=entry.samples,
        measured_on=entry.shapes,
        reason=printable(_why(layer, record, told, idle)),
        replaced_by=None if replaced_by is None else printable(replaced_by),
        notes=tuple(map(printable, record.notes)),
        ranges=tuple(replace(one, reason=printable(one.reason)) for one in measured.ranges),
        k_offset=entry.k_offset,
        q_outlier=entry.q_outlier,
        p_entropy=entry.p_entropy,
        remedy=None if entry.remedy is None else printable(entry.remedy),
    )


def main_variant(entry: PlanEntry) -> str:
    """The quantised kernel that runs in most of the schedule, exact attention where none does."""
    parts: Counter[str] = Counter()
    for one in entry.ranges:
        if one.variant != SDPA.name:
            # In whole parts of a million, so that sums have no order.
            parts[one.variant] += round(1e6 * (one.end - one.start))
    if not entry.ranges:
        return entry.variant
    return parts.most_common(1)[0][0] if parts else SDPA.name


def _why(layer: PatchedLayer, record: Record, told: str, idle: bool) -> str:
    if layer.demoted is not None:
        return f"demoted: {layer.demoted}"
    always = record.calls > 0 and record.fallbacks.total() >= record.calls
    if not (idle and (always or told != SDPA.name)):
        return layer.reason
    top = record.fallbacks.most_common(1)[0][0]
    return "; ".join(filter(None, [top, layer.reason]))


def _with_step(row: LayerRow, table: LayerTable | None) -> LayerRow:
    """The row with the denoising step of its worst call."""
    if table is None or row.worst_call is None:
        return row
    name = row.variant
    worst = [
        sample
        for sample in table.completed
        if sample.call == row.worst_call and name in sample.errors
    ]
    # Several samples may have this number, as each process and each run counts its own calls.
    deciding = min(worst, key=lambda sample: min(sample.errors[name].cosine), default=None)
    if deciding is None or deciding.step is None:
        return row
    return replace(row, worst_step=deciding.step + 1)


def _copied(record: Record) -> Record:
    """The record as of now, equal reasons of different kernels taken together."""
    fallbacks: Counter[str] = Counter()
    for reason, count in record.fallbacks.copy().items():
        fallbacks[printable(condensed(reason))] += count
    return Record(
        record.calls,
        record.by_variant.copy(),
        fallbacks,
        record.specs.copy(),
        list(record.notes),
    )


def _typical(specs: Counter[AttnSpec]) -> AttnSpec | None:
    """The most frequent call of several queries, of any where there is none such."""
    several = Counter({spec: count for spec, count in specs.items() if spec.q_len > 1})
    seen = (several or specs).most_common(1)
    return seen[0][0] if seen else None


def _mask(shape: str) -> str:
    found = _MASK.search(shape)
    return found[1] if found else "none"


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        write_text(path, text)
    return text
