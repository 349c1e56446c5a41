"""Writes the tables of docs/quality.md from the measurements beside this file, between their
markers.

    python -m benchmarks.quality.page
"""

from __future__ import annotations

import math
import re

from benchmarks.quality import page_told
from benchmarks.quality.page_language import language, losses
from benchmarks.quality.page_parts import (
    EXACT,
    about,
    demo,
    models,
    named,
    spread,
    table,
)
from benchmarks.quality.tables import HERE, read

PAGE = HERE.parent.parent / "docs" / "quality.md"
STEPS = ("1", "2", "4", "8")


def pictures() -> str:
    """The demo pipeline's pictures, an even sample of the captions."""
    return _pictures(demo("pictures"))


def all_captions() -> str:
    """The same, of every caption."""
    return _pictures("demo_all_captions.csv")


def _pictures(file: str) -> str:
    rows = [
        (
            named(row),
            spread(row, "psnr_db", 1),
            spread(row, "ssim", 4),
            spread(row, "feature_distance", 4),
            row["frechet_distance"] if row["frechet_distance"] != "nan" else "",
            row["n"],
        )
        for row in read(HERE / file)
    ]
    head = ("attention", "PSNR, dB", "SSIM", "feature distance", "Fréchet", "n")
    return table(head, rows) + "\n\n" + about(file)


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


def decoder() -> str:
    """The pretrained language model."""
    rows = read(HERE / "decoder_perplexity.csv")
    return losses(rows, "length", {rows[0]["length"]: f"{rows[0]['length']} tokens"}) + (
        "\n\n" + about("decoder_perplexity.csv")
    )


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


# The same for language models: S1, table 1, and S2, table 3.
LANGUAGE_PAPERS = (
    (
        "INT8 Q and K per token",
        "S1, Llama 2 7B, WikiText: perplexity 5.823 exact, 5.824",
        ("sage1_t",),
    ),
    (
        "the same without K smoothing",
        "S1, Llama 2 7B: 5.824 per token, 5.825 per block",
        ("sage1_t without K smoothing", "sage1_b without K smoothing"),
    ),
    (
        "all in FP8 (FlashAttention-3)",
        "S1, Llama 2 7B: perplexity 5.850",
        ("E4M3 per tensor",),
    ),
    (
        "INT8 Q and K, FP8 P and V",
        "S2, Llama 3.1 8B, WikiText: perplexity 6.013 exact, 6.019 with FP32 and 6.020 with FP16 "
        "sums; needle in a haystack 0.906, 0.903, 0.901",
        ("sage2_8", "sage2pp_8"),
    ),
    ("INT4 Q and K, FP8 P and V", "S2: not given for language", ("sage2_4", "sage2pp_4")),
)


def language_papers() -> list[tuple[str, str, str]]:
    """Rows of the papers' language models beside ours at its longest context."""
    if not (HERE / "language_perplexity.csv").exists():
        return []
    added = read(HERE / "language_perplexity.csv")
    asked = [
        row
        for row in read(HERE / "language_recall.csv")
        if row["measure"] == "retrieval" and not row["band_end"]
    ]

    def told(name: str) -> str:
        # What takes too long in a long context was measured in shorter ones.
        loss, right = (
            max((r for r in rows if r["condition"] == name), key=lambda row: int(row["length"]))
            for rows in (added, asked)
        )
        percent = 100 * math.expm1(float(loss["minus_exact"]))
        points = 100 * float(right["minus_exact"])
        where = f"{name} at {int(loss['length']) // 1024}k"
        return f"{where}: perplexity {percent:+.2f} %, retrieval {points:+.1f} points"

    return [(kind, theirs, "; ".join(map(told, ours))) for kind, theirs, ours in LANGUAGE_PAPERS]


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
    return table(("what", "theirs", "ours, against exact"), [*rows, *language_papers()])


TABLES = {
    "pictures": pictures,
    "all captions": all_captions,
    "steps": steps,
    "language": language,
    "sentences": sentences,
    "decoder": decoder,
    "decoder told": page_told.decoder,
    "layers": layers,
    "keys": keys,
    "papers": papers,
    "pictures told": page_told.pictures,
    "steps told": page_told.steps,
    "training told": page_told.training,
    "language told": page_told.language,
    "sentences told": page_told.sentences,
    "layers told": page_told.layers,
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
