"""Writes docs/coverage-diffusers.md from what the coverage tests find and count.

python tests/coverage/diffusers_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import diffusers
from diffusers_families import FAMILIES
from diffusers_family import Family
from diffusers_others import OTHERS
from diffusers_rows import Row, row_of
from diffusers_shares import Published
from diffusers_shares import kept_table as published
from diffusers_walk import (
    IN_PART,
    NO_ATTENTION,
    UNREACHED,
    WRAPPERS,
    everything,
)
from diffusers_walk import kept_table as models

from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.patchers.diffusers_processors import Route, call_of, class_way

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "coverage-diffusers.md"

TOP = """\
# What a patch reaches in diffusers {version}
Written by `python tests/coverage/diffusers_page.py` from what the tests in `tests/coverage` build,
patch, run and count; a test fails when this page is out of date. Every family below is a tiny
model of the true class with random weights. For each of them, on every push: every call of torch's
SDPA goes through a patched layer, a patch with exact kernels changes no bit of the output,
quantised ones (INT8 Q and K with half-precision P and V, and all four in 8 bits) stay within the
error of their recipe and run at every call, and restore brings back every bit.

{families} families of {classes} model classes; of the {exported} model classes that diffusers
exports, {attending} hold attention, {whole} of these are reached in every layer and {part} in
some.

FLUX.1, Wan 2.1, HunyuanVideo, CogVideoX 2B and SDXL were also run in their true size, with random
weights, unpatched and patched on an H200: [whole models timed](end-to-end.md).

## Families
- **reached**: attention layers of the published geometry that a patch takes, of all.
- **by**: `dispatcher`, `processor's SDPA` or `module's SDPA`, the ways in of [how patching
  works](patching.md).
- **masks**: what arrives in the tiny runs, with padded text where a family masks it. Kernels take
  every kind.
- **heads**: query heads x head size of the published geometry, and the largest call at the
  pipeline's usual size, as queries x keys. Kernels take head sizes from 8 to 256.
- **attention**: its part of a forward's floating point operations at that size: the most that
  faster attention can touch. Counted on shapes alone; what part of the *time* it is, the report of
  a run on a GPU measures. An empty cell: the test knows no published geometry.

"""

NOTES = """
Every layer that is reached may still run exact attention, and the report says why: calibration
keeps what errs too much or is no faster here (few tokens, as in text refiners, motion layers and
cross-attention over a short text), a single query is exact by rule, and a call that no kernel
takes (a head size above 256, gradients, dropout, another function mode) runs as before, counted by
reason.

## Other exported models
What no family above covers, built with its class's defaults, cut to two layers where those say how
many; **left** are layers that stay as they are. Those marked as **run** are run tiny like the
families above. A VAE or a text encoder is patched only where `components` names it.

"""

LAST = """
## What stays as it is, by class
Found by reading the code of every class and function of diffusers; a new one fails a test.

"""


def page() -> str:
    """The whole page."""
    rows = [(family, row_of(family)) for family in FAMILIES]
    counted = published()
    every = models()
    attending = [row for row in every.values() if int(row["reached"]) + int(row["left"])]
    whole = [row for row in attending if row["left"] == "0"]
    covered = {family.model for family in FAMILIES}
    text = TOP.format(
        version=diffusers.__version__,
        families=len(FAMILIES),
        classes=len(covered),
        exported=len(every) + len(WRAPPERS),
        attending=len(attending),
        whole=len(whole),
        part=sum(row["left"] != "0" and row["reached"] != "0" for row in attending),
    )
    text += table(
        (
            "family",
            "class",
            "reached",
            "by",
            "kinds",
            "masks",
            "heads",
            "largest call",
            "attention",
            "left exact, remarks",
        ),
        (family_cells(family, row, counted.get(family.name)) for family, row in rows),
    )
    text += NOTES
    others = [row for row in attending if row["model"] not in covered]
    text += table(
        ("class", "reached", "left", "run", "why"),
        (other_cells(row) for row in others),
    )
    none = [row["model"] for row in every.values() if row not in attending]
    text += (
        f"\nWithout attention, as built by default: {', '.join(f'`{name}`' for name in none)}.\n"
    )
    text += (
        f"\nMade of other models alone: {', '.join(f'`{name}`' for name in sorted(WRAPPERS))}.\n"
    )
    text += LAST
    text += table(("class", "why"), sorted(left_classes()))
    return text


def family_cells(family: Family, row: Row, counted: Published | None) -> tuple[str, ...]:
    """One line of the families' table."""
    remarks = [*row.left, *too_wide(counted), *filter(None, [family.remark])]
    share = counted and counted.attention_percent
    return (
        family.name,
        f"`{family.model}` ({family.used_by})",
        f"{counted.reached} of {counted.layers}" if counted else "all" if not row.left else "some",
        ", ".join(row.ways),
        ", ".join(row.kinds),
        ", ".join(name.replace("_", " ") for name in row.masks),
        counted.heads if counted else "",
        counted.longest if counted else "",
        f"{share} %" if share else "",
        "; ".join(remarks),
    )


def other_cells(row: dict[str, str]) -> tuple[str, ...]:
    """One line of the other models' table."""
    run = any(other.model == row["model"] for other in OTHERS)
    return f"`{row['model']}`", row["reached"], row["left"], "yes" if run else "", row["reasons"]


def too_wide(counted: Published | None) -> list[str]:
    """A remark on layers whose heads are wider than any kernel on a GPU takes."""
    kernels = (kernel for kernel in CATALOGUE if kernel.toolchain not in ("sdpa", "emulated"))
    widest = max(kernel.head_dims[1] for kernel in kernels)
    heads = counted.heads.split(", ") if counted and counted.heads else []
    return [f"heads of {h} stay exact" for h in heads if int(h.rpartition(" ")[2]) > widest]


def left_classes() -> Iterable[tuple[str, str]]:
    """Classes that attend and that no patch takes, or not always, with why."""
    for owner in everything():
        name = owner.__name__
        if "Processor" in name and call_of(owner) is not None:
            way = class_way(owner)
            if way.route is Route.NONE and owner.__module__.startswith("diffusers.models."):
                yield f"`{name}`", way.reason.removeprefix(f"{name} ")
    for name, why in UNREACHED.items():
        yield f"`{name}`", why
    for name, why in IN_PART.items():
        yield f"`{name}`", f"in part: flex is always asked for in {why}"
    for name, why in NO_ATTENTION.items():
        yield f"`{name}`", f"no attention: {why}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    PAGE.write_text(page(), encoding="utf-8")
