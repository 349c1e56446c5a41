"""The error model of plans held against the language model: what it predicts for each condition
from the errors of its layers, beside the loss that was measured.

    python -m benchmarks.quality.predicted

Writes language_error_model.csv from language_layers.csv and language_perplexity.csv: a row a
condition that runs one kernel throughout, and last the rank correlation.
"""

from __future__ import annotations

from scipy.stats import spearmanr

from benchmarks.quality.tables import HERE, Row, head, read, write
from sagepatch.calibration.solve import combined, relative_error

EXACT = "exact"


def rows() -> list[Row]:
    """One row a condition: its predicted error, and what it adds to the loss at each length."""
    cosines: dict[str, list[float]] = {}
    for row in read(HERE / "language_layers.csv"):
        cosines.setdefault(row["condition"], []).append(float(row["cosine"]))
    losses: dict[str, dict[int, dict[str, str]]] = {}
    for row in read(HERE / "language_perplexity.csv"):
        losses.setdefault(row["condition"], {})[int(row["length"])] = row
    longest = max(losses[EXACT])
    found: list[Row] = []
    for name, listed in cosines.items():
        # What was measured in short contexts only says nothing of the longest.
        if name != EXACT and longest in losses[name]:
            row = losses[name][longest]
            found.append(
                {
                    "condition": name,
                    "predicted": f"{combined([relative_error(one) for one in listed]):.5f}",
                    "length": longest,
                    "documents": row["documents"],
                    "minus_exact": row["minus_exact"],
                }
            )
    return found


def correlation(made: list[Row]) -> float:
    """Spearman's rank correlation of predicted errors and added losses."""
    pairs = [(float(str(row["predicted"])), float(str(row["minus_exact"]))) for row in made]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def main() -> None:
    """Write the table."""
    made = rows()
    last: Row = {
        "condition": f"rank correlation of {len(made)}",
        "predicted": f"{correlation(made):.3f}",
        "length": made[0]["length"],
        "documents": "",
        "minus_exact": "",
    }
    source = read(HERE / "language_layers.csv")[0]
    about = {
        "device": source["device"],
        "versions": source["versions"],
        "commit": head(),
        "command": "python -m benchmarks.quality.predicted",
    }
    write(HERE / "language_error_model.csv", [*made, last], about)
    print(last["condition"], last["predicted"])


if __name__ == "__main__":
    main()
