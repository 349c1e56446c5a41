"""What a report says, as values: one row a layer, the headline, the machine. Renders nothing
itself.

Renderers are loaded by name where they are used, so that building a report costs nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.env import Machine
from sagepatch.layer import PatchedLayer
from sagepatch.patchers.site import Left
from sagepatch.plan import PlanEntry, write_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from sagepatch.report.pictures import Comparison


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One attention layer. Errors are the worst over samples and heads, times in microseconds;
    None: not measured.

    `variant` is what the layer runs, `calls` counts its calls, `fallbacks` maps a reason to the
    calls that ran exact because of it, `replaced_by` names what took our place in the model.
    """

    name: str
    kind: str
    variant: str
    tier: str
    cosine: float | None
    rel_l1: float | None
    rmse: float | None
    norm_ratio: float | None
    worst_head: int | None
    us_exact: float | None
    us_chosen: float | None
    calls: int
    quantised_calls: int
    by_variant: dict[str, int]
    fallbacks: dict[str, int]
    shape: str | None
    mask: str
    samples: int
    reason: str
    replaced_by: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The account of one patch. Prints itself; see also `to_json`, `to_html` and `plot`."""

    model: str
    layers: tuple[LayerRow, ...]
    left: tuple[Left, ...]
    machine: dict[str, Any]
    threshold: float
    emulated: bool
    warnings: tuple[str, ...]
    pictures: Comparison | None = None

    def headline(self) -> str:
        """One sentence: how many layers were found and what they run."""
        tiers = Counter(row.tier for row in self.layers)
        shares = ", ".join(f"{tiers[tier]} {tier}" for tier in ("fast", "safe", "exact"))
        found = len(self.layers) + len(self.left)
        text = (
            f"{self.model}: {found} attention layers found, {len(self.layers)} patched ({shares})"
        )
        if self.left:
            text += f", {len(self.left)} left alone"
        lost = sum(row.replaced_by is not None for row in self.layers)
        if lost:
            text += f"; {lost} no longer patched, apply again to repair"
        return text

    def remarks(self) -> tuple[str, ...]:
        """What a reader must know before the numbers: emulation, warnings, layers that lost their
        patch.
        """
        found: list[str] = []
        if self.emulated:
            found.append(
                "Emulated kernels: slower than exact attention. This shows accuracy, not speed."
            )
        elif self.layers and all(row.variant == SDPA.name for row in self.layers):
            found.append("Every layer runs exact attention; the last column says why.")
        return (*found, *self.warnings)

    def with_pictures(self, pictures: Comparison) -> Report:
        """This report with the picture of the exact run beside that of the quantised one."""
        return replace(self, pictures=pictures)

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

        return render_text(self)


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
) -> Report:
    """Build a report from the state of a patch."""
    rows = tuple(_row(layer, entries[layer.name], replaced.get(layer.name)) for layer in layers)
    return Report(
        parts,
        rows,
        tuple(left),
        machine.to_dict(),
        threshold,
        emulated,
        tuple(warnings),
    )


def _row(layer: PatchedLayer, entry: PlanEntry, replaced_by: str | None) -> LayerRow:
    record = layer.record
    variant = layer.runs
    exact_calls = record.by_variant[SDPA.name]
    seen = record.specs.most_common(1)
    reason = layer.reason if layer.demoted is None else f"demoted: {layer.demoted}"
    measured = variant == entry.variant
    return LayerRow(
        name=layer.name,
        kind=layer.kind,
        variant=variant,
        tier=BY_NAME[variant].tier,
        cosine=entry.cosine if measured else None,
        rel_l1=entry.rel_l1 if measured else None,
        rmse=entry.rmse if measured else None,
        norm_ratio=entry.norm_ratio if measured else None,
        worst_head=entry.worst_head if measured else None,
        us_exact=entry.us_exact,
        us_chosen=entry.us_chosen if measured else None,
        calls=record.calls,
        quantised_calls=sum(record.by_variant.values()) - exact_calls,
        by_variant=dict(record.by_variant),
        fallbacks=dict(record.fallbacks),
        shape=str(seen[0][0]) if seen else entry.shape,
        mask=seen[0][0].mask.value if seen else "unknown",
        samples=entry.samples,
        reason=reason,
        replaced_by=replaced_by,
        notes=tuple(record.notes),
    )


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        write_text(path, text)
    return text
