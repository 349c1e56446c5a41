"""Writes the tables of docs/quality.md from the measurements beside this file, between their
markers.

    python -m benchmarks.quality.page
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from benchmarks.quality.tables import HERE, read

PAGE = HERE.parent.parent / "docs" / "quality.md"
EXACT = "exact"
STEPS = ("1", "2", "4", "8")

Rows = list[dict[str, str]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def named(row: dict[str, str]) -> str:
    """A condition's name as the page writes it: recipes as code."""
    return f"`{row['condition']}`" if row["group"] == "recipe" else row["condition"]


def about(*files: str) -> str:
    """Where the numbers of some tables are from, each different source once."""
    found: dict[str, None] = {}
    for name in files:
        row = read(HERE / name)[0]
        told = f"{row['device']}, {row['versions']}, commit {row['commit']}, `{row['command']}`"
        found.setdefault(told)
    listed = ", ".join(f"`benchmarks/quality/{name}`" for name in files)
    return f"*{listed}: {'; '.join(found)}.*"


def spread(row: dict[str, str], name: str, digits: int) -> str:
    """Mean and deviation with so many digits, and the worst."""
    mean, sd, worst = (float(row[f"{name}_{part}"]) for part in ("mean", "sd", "worst"))
    if math.isinf(mean):
        return "equal"
    return f"{mean:.{digits}f} ± {sd:.{digits}f} ({worst:.{digits}f})"


def pictures() -> str:
    """The demo pipeline's pictures."""
    rows = [
        (
            named(row),
            spread(row, "psnr_db", 1),
            spread(row, "ssim", 4),
            spread(row, "feature_distance", 4),
            row["frechet_distance"] if row["frechet_distance"] != "nan" else "",
            row["n"],
        )
        for row in read(HERE / "demo_pictures.csv")
    ]
    head = ("attention", "PSNR, dB", "SSIM", "feature distance", "Fréchet", "n")
    return table(head, rows) + "\n\n" + about("demo_pictures.csv")


def steps() -> str:
    """Error of the latents over the denoising steps."""
    by_name: dict[str, dict[str, dict[str, str]]] = {}
    for row in read(HERE / "demo_steps.csv"):
        by_name.setdefault(row["condition"], {})[row["step"]] = row
    rows = [
        (
            named(found["1"]),
            *(
                f"{float(found[step]['error_mean']):.4f} ± {float(found[step]['error_sd']):.4f}"
                for step in STEPS
            ),
        )
        for found in by_name.values()
    ]
    head = ("attention", *(f"after step {step}" for step in STEPS))
    return table(head, rows) + "\n\n" + about("demo_steps.csv")


def _by_condition(rows: Rows, key: str) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["condition"], {})[row[key]] = row
    return found


def _thousandths(row: dict[str, str]) -> str:
    value, low, high = (1000 * float(row[f"minus_exact{part}"]) for part in ("", "_low", "_high"))
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def _losses(rows: Rows, key: str, heads: dict[str, str]) -> str:
    found = []
    for by_key in _by_condition(rows, key).values():
        first = next(iter(by_key.values()))
        if first["condition"] == EXACT:
            cells = [
                f"{float(by_key[k]['perplexity']):.3f} "
                f"[{math.exp(float(by_key[k]['mean_low'])):.2f}, "
                f"{math.exp(float(by_key[k]['mean_high'])):.2f}]"
                for k in heads
            ]
            found.append((f"{EXACT}: perplexity", *cells))
        else:
            found.append((named(first), *(_thousandths(by_key[k]) for k in heads)))
    return table(("attention", *heads.values()), found)


def perplexity() -> str:
    """Perplexity by length of context."""
    rows = read(HERE / "language_perplexity.csv")
    lengths = sorted({int(row["length"]) for row in rows})
    heads = {str(length): f"{length // 1024}k" for length in lengths}
    return _losses(rows, "length", heads) + "\n\n" + about("language_perplexity.csv")


def positions() -> str:
    """Loss by position in the longest context."""
    rows = read(HERE / "language_positions.csv")
    ends = sorted({int(row["band_end"]) for row in rows})
    starts = [0, *ends[:-1]]
    heads = {
        str(end): f"{start // 1024}k to {end // 1024}k"
        for start, end in zip(starts, ends, strict=True)
    }
    return _losses(rows, "band_end", heads) + "\n\n" + about("language_positions.csv")


def recall() -> str:
    """Retrieval and copying by length."""
    rows = [row for row in read(HERE / "language_recall.csv") if not row["band_end"]]
    lengths = sorted({int(row["length"]) for row in rows})
    found = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        cells = []
        for task in ("retrieval", "copy"):
            for length in lengths:
                (row,) = (
                    r
                    for r in rows
                    if (r["condition"], r["measure"], int(r["length"])) == (condition, task, length)
                )
                if condition == EXACT:
                    low, high = (100 * float(row[f"mean_{end}"]) for end in ("low", "high"))
                    cells.append(f"{100 * float(row['mean']):.1f} [{low:.0f}, {high:.0f}]")
                else:
                    value, low, high = (
                        100 * float(row[f"minus_exact{part}"]) for part in ("", "_low", "_high")
                    )
                    cells.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}]")
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


def sentences() -> str:
    """The sentence encoder."""
    rows = []
    for row in read(HERE / "sentences_retrieval.csv"):
        cells = []
        for name in ("right", "reciprocal_rank"):
            value, low, high = (float(row[f"{name}{part}"]) for part in ("", "_low", "_high"))
            apart = [float(row[f"{name}_minus_exact{part}"]) for part in ("", "_low", "_high")]
            cells.append(
                f"{value:.3f} [{low:.3f}, {high:.3f}]"
                if row["condition"] == EXACT
                else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*apart)
            )
        rows.append((named(row), *cells, row["cosine_mean"], row["cosine_worst"], row["n"]))
    head = ("attention", "right first", "reciprocal rank", "cosine", "worst cosine", "n")
    return table(head, rows) + "\n\n" + about("sentences_retrieval.csv")


def layers() -> str:
    """The worst layer of each model under each condition."""
    files = {
        "demo pipeline": "demo_layers.csv",
        "language model": "language_layers.csv",
        "sentence encoder": "sentences_layers.csv",
    }
    by_model = {label: read(HERE / name) for label, name in files.items()}
    names = list(dict.fromkeys(row["condition"] for row in by_model["demo pipeline"]))
    found = []
    for name in names:
        cells: list[str] = []
        for rows in by_model.values():
            of = [row for row in rows if row["condition"] == name]
            if not of:
                cells += ["", ""]
                continue
            worst = min(of, key=lambda row: float(row["cosine_worst_head"]))
            cosines = sorted(float(row["cosine"]) for row in of)
            cells += [
                f"{cosines[len(cosines) // 2]:.5f}",
                f"{float(worst['cosine_worst_head']):.5f}",
            ]
        group = next(row["group"] for row in by_model["demo pipeline"] if row["condition"] == name)
        found.append((named({"condition": name, "group": group}), *cells))
    heads = [f"{label}, {what}" for label in files for what in ("median", "worst")]
    return table(("attention", *heads), found) + "\n\n" + about(*files.values())


def keys() -> str:
    """How far from zero the keys of each model lie."""
    files = {
        "demo pipeline": "demo_layers.csv",
        "language model": "language_layers.csv",
        "sentence encoder": "sentences_layers.csv",
    }
    found = []
    for label, name in files.items():
        rows = [row for row in read(HERE / name) if row["condition"] == EXACT]
        means = sorted(float(row["k_mean_over_spread"]) for row in rows)
        peaks = sorted(float(row["k_peak_over_spread"]) for row in rows)
        layers_seen = len({row["layer"] for row in rows})
        found.append(
            (
                label,
                str(layers_seen),
                f"{means[0]:.1f} to {means[-1]:.1f}",
                f"{peaks[0]:.1f} to {peaks[-1]:.1f}",
            )
        )
    head = ("model", "layers", "K mean over spread", "K peak over spread")
    return table(head, found)


TABLES = {
    "pictures": pictures,
    "steps": steps,
    "perplexity": perplexity,
    "positions": positions,
    "recall": recall,
    "sentences": sentences,
    "layers": layers,
    "keys": keys,
}


def filled(text: str) -> str:
    """The page with every table as the measurements say."""
    for name, made in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(
            pattern, lambda m, t=made: f"{m[1]}{t()}\n{m[2]}", text, flags=re.DOTALL
        )
        if found != 1:
            raise SystemExit(f"{PAGE.name} holds the markers of {name} {found} times, needs one")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
