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

NOT_YET = "Not measured yet: `python -m benchmarks.quality.language` writes these tables on a GPU."

PERPLEXITY_TOLD = (
    "Perplexity of exact attention with its 95 % interval over documents; below it how many "
    "*thousandths of a nat per token* each other way to run attention adds, with the interval of "
    "that difference (documents drawn again, 2,000 times). A thousandth of a nat is 0.1 % of "
    "perplexity."
)
POSITIONS_TOLD = (
    "By position in the longest context, in the same units: a drift with length would show as a "
    "rise to the right."
)
RECALL_TOLD = (
    "Percent right of exact attention with its interval; below it percentage points more or less."
)

Rows = list[dict[str, str]]


def demo(part: str) -> str:
    """The demo pipeline's table: from a GPU, or where there is none from a CPU."""
    on_gpu = f"demo_{part}.csv"
    return on_gpu if (HERE / on_gpu).exists() else f"demo_cpu_{part}.csv"


def models() -> dict[str, str]:
    """The tables of layers that are there, by what a reader calls the model."""
    files = {
        "demo pipeline": demo("layers"),
        "language model": "language_layers.csv",
        "sentence encoder": "sentences_layers.csv",
    }
    return {label: name for label, name in files.items() if (HERE / name).exists()}


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
    for row in (row for name in files for row in read(HERE / name)):
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
        for row in read(HERE / demo("pictures"))
    ]
    head = ("attention", "PSNR, dB", "SSIM", "feature distance", "Fréchet", "n")
    return table(head, rows) + "\n\n" + about(demo("pictures"))


def recipes() -> str:
    """Every recipe on the pictures of benchmarks/demo_recipes.py."""
    found = read(HERE.parent / "demo_recipes.csv")
    rows = [
        (f"`{r['recipe']}`", r["tier"], r["psnr_db_mean"], r["psnr_db_worst"], r["ssim_worst"])
        for r in found
    ]
    first = found[0]
    told = f"*`benchmarks/demo_recipes.csv`: {first['device']}, {first['versions']}, "
    told += f"`{first['command']}`; {first['prompts']}, seed 0, n 3.*"
    head = ("recipe", "tier", "PSNR, dB: mean", "worst", "worst SSIM")
    return table(head, rows) + "\n\n" + told


def steps() -> str:
    """Error of the latents over the denoising steps."""
    by_name: dict[str, dict[str, dict[str, str]]] = {}
    for row in read(HERE / demo("steps")):
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
    return table(head, rows) + "\n\n" + about(demo("steps"))


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
            "![Loss by length and by position, and retrieval](../benchmarks/quality/language.png)",
        )
    )


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
    files = models()
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
    files = models()
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


# End-task numbers of SageAttention (S1, tables 1, 8 and 11) and SageAttention2++ (S2, table 3), and
# which of our conditions are of that kind.
PAPERS = (
    (
        "INT8 Q and K per token",
        "S1, Unidiffuser: FID 163.33 exact, 166.52; UltraPixel: 179.78, 179.79",
        ("sage1_t",),
    ),
    (
        "the same without K smoothing",
        "S1, Unidiffuser: FID 221.18; UltraPixel: 193.36",
        ("sage1_t without K smoothing",),
    ),
    (
        "all in FP8 (FlashAttention-3)",
        "S1, Unidiffuser: FID 394.13; UltraPixel: 383.61",
        ("E4M3 per tensor",),
    ),
    (
        "INT8 Q and K, FP8 P and V",
        "S2, Flux: FID 163.185 with FP32 sums, 163.555 with FP16 sums",
        ("sage2_8", "sage2pp_8"),
    ),
    (
        "INT4 Q and K, FP8 P and V",
        "S2, Flux: FID 164.170 with FP32 and with FP16 sums",
        ("sage2_4", "sage2pp_4"),
    ),
    (
        "a kernel chosen by layer",
        "S1, CogVideoX: CLIPSIM 0.1837 exact, 0.1827 one kernel, 0.1835 chosen",
        ("calibrated plan",),
    ),
)


def papers() -> str:
    """The papers' end-task numbers beside ours of the same kind."""
    found = {row["condition"]: row for row in read(HERE / demo("pictures"))}
    rows = [
        (
            kind,
            theirs,
            "; ".join(
                f"{name}: {float(found[name]['psnr_db_mean']):.1f} dB, "
                f"SSIM {float(found[name]['ssim_mean']):.4f}"
                for name in ours
                if name in found
            ),
        )
        for kind, theirs, ours in PAPERS
    ]
    return table(("what", "theirs", "ours, against exact"), rows)


TABLES = {
    "pictures": pictures,
    "recipes": recipes,
    "steps": steps,
    "language": language,
    "sentences": sentences,
    "layers": layers,
    "keys": keys,
    "papers": papers,
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
