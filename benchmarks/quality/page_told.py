"""The sentences of docs/quality.md that hold numbers, from the same measurements as its tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality.page_parts import EXACT, demo, models
from benchmarks.quality.tables import HERE, read
from sagepatch.numerics.recipe import RECIPES

SEED, FULL_WIDTH, PLAN, NAIVE = (
    "exact, another seed",
    "exact in FP32",
    "calibrated plan",
    "naive INT8",
)
UNSMOOTHED = ("sage1_t", "sage1_b", "sage1_vb", "sage2_8")


def listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them.

    >>> listed(["a", "b", "c"]), listed([])
    ('a, b and c', 'none')
    """
    if len(names) < 2:
        return names[0] if names else "none"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def quoted(names: Sequence[str]) -> str:
    """Names with commas in them as a sentence lists them."""
    return listed([f'"{name}"' if "," in name else name for name in names])


def bits(name: str, wanted: int) -> bool:
    """Whether a condition is a recipe whose Q and K have so many bits."""
    return name in RECIPES and RECIPES[name].qk_bits == wanted


def pictures() -> str:
    """What the table of pictures shows."""
    rows = {row["condition"]: row for row in read(HERE / demo("pictures"))}
    db = {name: float(row["psnr_db_mean"]) for name, row in rows.items()}
    eight = [value for name, value in db.items() if bits(name, 8)]
    four = [value for name, value in db.items() if bits(name, 4)]
    k_gain = max(abs(db[one] - db[f"{one} without K smoothing"]) for one in UNSMOOTHED)
    pictures_drawn = sorted({int(row["n"]) for row in rows.values()})
    drawn = f"{pictures_drawn[0]} pictures"
    if len(pictures_drawn) > 1:
        most = [name for name, row in rows.items() if int(row["n"]) == pictures_drawn[-1]]
        drawn += f"; over {pictures_drawn[-1]}, all captions with three seeds, for {quoted(most)}"
    wide = ""
    if FULL_WIDTH in db:
        wide = f" The same pipeline in FP32 differs from bfloat16 by {db[FULL_WIDTH]:.1f} dB:"
        wide += " 8-bit attention changes a picture about as much as the width of all the rest."
    return (
        f"8-bit recipes differ from exact by {min(eight):.1f} to {max(eight):.1f} dB (means over "
        f"{drawn}), another seed by {db[SEED]:.1f}: what quantising changes in a picture is far "
        f"below what the seed changes.{wide} Naive INT8 is at {db[NAIVE]:.1f} dB, worse than "
        f"another seed. INT4 stays at {min(four):.1f} to {max(four):.1f} dB, of which smoothing Q "
        f"and K gives `sage2_4` {db['sage2_4'] - db['sage2_4 without smoothing']:.1f} dB. K "
        f"smoothing moves 8-bit recipes by {k_gain:.1f} dB at most here, because the keys of this "
        "pipeline lie near zero (below)."
    )


def steps() -> str:
    """How errors grow over the schedule."""
    errors: dict[str, dict[int, float]] = {}
    for row in read(HERE / demo("steps")):
        errors.setdefault(row["condition"], {})[int(row["step"])] = float(row["error_mean"])
    last = max(max(found) for found in errors.values())
    growth = [found[last] / found[1] for name, found in errors.items() if name in RECIPES]
    falling = [name for name, found in errors.items() if found[last] < found[1]]
    return (
        f"From the first step to the last a recipe's error grows {min(growth):.1f} to "
        f"{max(growth):.1f} times, over {last} steps: nothing runs away. What falls: "
        f"{quoted(falling)}, as all noise of a caption leads to one picture."
    )


def training() -> str:
    """What the language model was trained on, and how far."""
    if not (HERE / "language_training.csv").exists():
        return ""
    rows = read(HERE / "language_training.csv")
    last = rows[-1]
    lengths = list(dict.fromkeys(int(row["length"]) for row in rows))
    shown = listed([f"{length}" for length in lengths])
    sources = read(HERE / "language_sources.csv")
    return (
        f"This one was trained for {float(last['seconds']):.0f} s on one {last['device']}: "
        f"{int(last['step']):,} steps, {int(last['tokens']) / 1e6:.1f} M tokens, in rows of "
        f"{shown} tokens one after the other, on the sources of {len(sources)} packages."
    )


def language() -> str:
    """What the tables of the language model show."""
    if not (HERE / "language_perplexity.csv").exists():
        return ""
    losses: dict[str, dict[int, dict[str, str]]] = {}
    for row in read(HERE / "language_perplexity.csv"):
        losses.setdefault(row["condition"], {})[int(row["length"])] = row
    lengths = sorted(losses[EXACT])
    short, long = lengths[0], lengths[-1]

    def added(name: str, length: int) -> float:
        return 1000 * float(losses[name][length]["minus_exact"])

    eight = [name for name in losses if bits(name, 8)]
    worst = max((added(name, length), name, length) for name in eight for length in lengths)
    plan_low, plan_high = (
        1000 * float(losses[PLAN][long][f"minus_exact_{e}"]) for e in ("low", "high")
    )
    asked = {
        (row["condition"], int(row["length"])): row
        for row in read(HERE / "language_recall.csv")
        if row["measure"] == "retrieval" and not row["band_end"]
    }

    def points(name: str, length: int) -> float:
        return 100 * float(asked[name, length]["minus_exact"])

    most_lost = min((points(name, long), name) for name in (*eight, PLAN))
    right = [100 * float(asked[EXACT, length]["mean"]) for length in sorted({k[1] for k in asked})]
    return (
        f"No 8-bit recipe adds more than {worst[0]:.1f} thousandths of a nat at any length "
        f"(`{worst[1]}` at {worst[2] // 1024}k), and the calibrated plan adds "
        f"{added(PLAN, long):.1f} [{plan_low:.1f}, {plan_high:.1f}] at {long // 1024}k. INT4 costs "
        f"more the longer the context: `sage2_4` {added('sage2_4', short):.1f} at "
        f"{short // 1024}k, {added('sage2_4', long):.1f} at {long // 1024}k; without its smoothing "
        f"{added('sage2_4 without smoothing', long):.1f}, without that of Q alone "
        f"{added('sage2_4 without Q smoothing', long):.1f}. Exact attention retrieves "
        f"{min(right):.1f} to {max(right):.1f} % of the values; of the 8-bit recipes and the plan "
        f"none loses more than {max(0.0, -most_lost[0]):.1f} points at {long // 1024}k, where "
        f"`sage2_4` loses {-points('sage2_4', long):.1f} and without smoothing "
        f"{-points('sage2_4 without smoothing', long):.1f}."
    )


def error_model() -> str:
    """How well the error model of plans ranks what was measured on the language model."""
    path = HERE / "language_error_model.csv"
    if not path.exists():
        return ""
    *rows, last = read(path)
    guesses = [float(row["predicted"]) for row in rows]
    losses = [1000 * float(row["minus_exact"]) for row in rows]
    eight = [guess for guess in guesses if guess <= 0.5]
    four = [guess for guess in guesses if guess > 0.5]
    most = max(loss for guess, loss in zip(guesses, losses, strict=True) if guess <= 0.5)
    least = min(loss for guess, loss in zip(guesses, losses, strict=True) if guess > 0.5)
    return (
        "The error model of plans ([calibration](calibration.md)), from the errors of the layers "
        f"below, against the loss added at {int(rows[0]['length']) // 1024}k, over {len(rows)} "
        "conditions that run one kernel throughout: rank correlation "
        f"{float(last['predicted']):.2f}. It tells INT4 (predicted {min(four):.2f} and more, "
        f"measured {least:.0f} thousandths and more) from 8 bits ({min(eight):.2f} to "
        f"{max(eight):.2f}; at most {most:.1f}), and among the latter, whose intervals overlap, "
        "hardly anything (`benchmarks/quality/language_error_model.csv`)."
    )


def sentences() -> str:
    """What the sentence encoder's table shows."""
    rows = read(HERE / "sentences_retrieval.csv")
    apart = [
        f"`{row['condition']}`" if row["group"] == "recipe" else row["condition"]
        for row in rows
        for name in ("right", "reciprocal_rank")
        if row["condition"] != EXACT
        and not float(row[f"{name}_minus_exact_low"]) <= 0 <= float(row[f"{name}_minus_exact_high"])
    ]
    cosine = {row["condition"]: float(row["cosine_mean"]) for row in rows}
    eight = [value for name, value in cosine.items() if bits(name, 8)]
    four = [value for name, value in cosine.items() if bits(name, 4)]
    return (
        f"Of {2 * (len(rows) - 1)} differences at n = {rows[0]['n']}, each with its own 95 % "
        f"interval, those that exclude zero: {listed(list(dict.fromkeys(apart)))}. Where calls are "
        "at most 256 tokens long even naive INT8 does no harm that this task shows. The "
        f"embeddings keep a cosine of {min(eight):.5f} or more with 8 bits, {min(four):.4f} to "
        f"{max(four):.4f} with INT4, {cosine[NAIVE]:.4f} with naive INT8."
    )


def decoder() -> str:
    """What the pretrained language model's table shows."""
    rows = {row["condition"]: row for row in read(HERE / "decoder_perplexity.csv")}
    added = {name: 1000 * float(row["minus_exact"]) for name, row in rows.items()}
    eight = [value for name, value in added.items() if bits(name, 8)]
    four = [value for name, value in added.items() if bits(name, 4)]
    return (
        f"8-bit recipes change its loss by {min(eight):+.1f} to {max(eight):+.1f} thousandths of a "
        f"nat, INT4 by {min(four):+.0f} to {max(four):+.0f}, INT4 without smoothing by "
        f"{added['sage2_4 without smoothing']:+.0f}, naive INT8 by {added[NAIVE]:+.1f}, 8 bits "
        f"without K smoothing (`sage2_8`) by {added['sage2_8 without K smoothing']:+.1f}."
    )


def layers() -> str:
    """What keys and layers show."""
    worst: dict[str, dict[str, float]] = {}
    means: list[float] = []
    for label, name in models().items():
        found = worst.setdefault(label, {})
        for row in read(HERE / name):
            one = row["condition"]
            found[one] = max(found.get(one, 0.0), 1 - float(row["cosine_worst_head"]))
            if one == EXACT:
                means.append(float(row["k_mean_over_spread"]))
    q_gain = "; ".join(
        f"{label} {of['sage2_4']:.3f} to {of['sage2_4 without Q smoothing']:.3f}"
        for label, of in worst.items()
    )
    p_cost = [of["sage1_vb"] / of["sage2_8"] for of in worst.values()]
    k_gain = [
        of[f"{one} without K smoothing"] / of[one] for of in worst.values() for one in UNSMOOTHED
    ]
    naive = max((of[NAIVE], label) for label, of in worst.items())
    return (
        f"The keys of all these models are tame: no channel's mean is more than {max(means):.1f} "
        "times the spread, and at 8 bits taking K smoothing away moves 1 - cosine of the worst "
        f"head by factors of {min(k_gain):.2f} to {max(k_gain):.2f} only, as in the first paper's "
        "Llama 2. It pays where keys lie far off zero: the gallery below has such keys. Q "
        f"smoothing earns its place at INT4: without it 1 - cosine of the worst head rises "
        f"({q_gain}). INT8 P (`sage1_vb`) costs the worst head {min(p_cost):.1f} to "
        f"{max(p_cost):.1f} times what E4M3 P (`sage2_8`) does. Naive INT8's worst head has a "
        f"cosine of {1 - naive[0]:.2f} ({naive[1]})."
    )
