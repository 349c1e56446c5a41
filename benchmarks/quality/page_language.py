"""The language model's part of docs/quality.md."""

from __future__ import annotations

import itertools
import math

from benchmarks.quality import page_told
from benchmarks.quality.page_parts import EXACT, Rows, about, by_condition, named, table
from benchmarks.quality.tables import HERE, read

NOT_YET = "Not measured yet: `python -m benchmarks.quality.language` writes these tables on a GPU."

PERPLEXITY_TOLD = (
    "Perplexity of exact attention with its 95 % interval over documents; below it how many "
    "*thousandths of a nat per token* each other way to run attention adds, with the interval of "
    "that difference (documents drawn again, 2,000 times); n documents of 32k tokens. Every length "
    "is judged by the last 8,192 tokens of each. A thousandth of a nat is 0.1 % of perplexity."
)
POSITIONS_TOLD = (
    "By position in the longest context, in the same units: a drift with length would show as a "
    "rise to the right."
)
RECALL_TOLD = (
    "Percent right of exact attention with its interval; below it percentage points more or less."
)


def _thousandths(row: dict[str, str]) -> str:
    value, low, high = (1000 * float(row[f"minus_exact{part}"]) for part in ("", "_low", "_high"))
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def losses(rows: Rows, key: str, heads: dict[str, str]) -> str:
    """Perplexity of exact attention and what each condition adds to the loss, by a column."""
    found = []
    for by_key in by_condition(rows, key).values():
        first = next(iter(by_key.values()))
        if first["condition"] == EXACT:
            cells = [
                f"{float(by_key[k]['perplexity']):.3f} "
                f"[{math.exp(float(by_key[k]['mean_low'])):.2f}, "
                f"{math.exp(float(by_key[k]['mean_high'])):.2f}]"
                for k in heads
            ]
            found.append((f"{EXACT}: perplexity", *cells, first["documents"]))
        else:
            # What takes too long in a long context is measured in short ones.
            cells = [_thousandths(by_key[k]) if k in by_key else "" for k in heads]
            found.append((named(first), *cells, first["documents"]))
    return table(("attention", *heads.values(), "n"), found)


def language() -> str:
    """Everything about the language model, or that it is not there yet."""
    if not (HERE / "language_perplexity.csv").exists():
        return NOT_YET
    return "\n\n".join(
        (
            PERPLEXITY_TOLD,
            perplexity(),
            POSITIONS_TOLD,
            positions(),
            RECALL_TOLD,
            recall(),
            page_told.error_model(),
            "![Loss by length and by position, and retrieval](../benchmarks/quality/language.png)",
        )
    )


def perplexity() -> str:
    """Perplexity by length of context."""
    rows = read(HERE / "language_perplexity.csv")
    lengths = sorted({int(row["length"]) for row in rows})
    heads = {str(length): f"{length // 1024}k" for length in lengths}
    return losses(rows, "length", heads) + "\n\n" + about("language_perplexity.csv")


def positions() -> str:
    """Loss by position in the longest context."""
    rows = read(HERE / "language_positions.csv")
    ends = sorted({int(row["band_end"]) for row in rows})
    starts = [0, *ends[:-1]]
    heads = {
        str(end): f"{start // 1024}k to {end // 1024}k"
        for start, end in zip(starts, ends, strict=True)
    }
    return losses(rows, "band_end", heads) + "\n\n" + about("language_positions.csv")


def recall() -> str:
    """Retrieval and copying by length."""
    rows = [row for row in read(HERE / "language_recall.csv") if not row["band_end"]]
    lengths = sorted({int(row["length"]) for row in rows})
    found = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        cells: list[str] = []
        of = {(r["measure"], int(r["length"])): r for r in rows if r["condition"] == condition}
        for key in itertools.product(("retrieval", "copy"), lengths):
            if key not in of:
                cells.append("")
            elif condition == EXACT:
                low, high = (100 * float(of[key][f"mean_{end}"]) for end in ("low", "high"))
                cells.append(f"{100 * float(of[key]['mean']):.1f} [{low:.0f}, {high:.0f}]")
            else:
                value, low, high = (
                    100 * float(of[key][f"minus_exact{part}"]) for part in ("", "_low", "_high")
                )
                cells.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]")
        row = next(iter(of.values()))
        found.append((named(row), *cells))
    heads = [f"{task} {length // 1024}k" for task in ("retrieval", "copy") for length in lengths]
    counts = {
        f"{row['count']} {'answers' if row['measure'] == 'retrieval' else 'tokens'} at "
        f"{int(row['length']) // 1024}k"
        for row in rows
        if row["condition"] == EXACT
    }
    told = f"*n: {', '.join(sorted(counts))}.*"
    return "\n\n".join((table(("attention", *heads), found), told, about("language_recall.csv")))
