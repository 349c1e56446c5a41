"""Files of `sagepatch bench --json` as one table: a row an attention and shape that was timed, with
the GPU and the versions that made it.

    python benchmarks/bench_table.py --out TABLE.csv --commit HASH BENCH.json [...]

`--commit` is for files made where git was not at hand.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

NUMBERS = {"ms_median": 4, "ms_p20": 4, "ms_p80": 4, "tflops": 1, "speedup": 3, "cosine": 6}


def rows(found: dict[str, Any], commit: str | None) -> list[dict[str, Any]]:
    """The timed rows of one file."""
    shapes = {shape["name"]: shape for shape in found["shapes"]}
    versions, gpu = found["machine"]["versions"], found["gpu"]
    made = []
    for row in found["rows"]:
        if row["ms_median"] is None:
            continue
        shape = shapes[row["shape"]]
        load = shape["load"] or {}
        made.append(
            {
                "shape": row["shape"],
                "dims": "x".join(
                    str(shape[name])
                    for name in ("batch", "q_heads", "kv_heads", "length", "head_dim")
                ),
                "causal": shape["causal"],
                "variant": row["variant"],
                "dtype": row["dtype"],
                **{name: round(row[name], digits) for name, digits in NUMBERS.items()},
                "rel_l1": round(row["rel_l1"], 6),
                "runs": row["runs"],
                "gpu": gpu["name"],
                "driver": gpu["driver"],
                "clock_mhz": load.get("clock_mhz"),
                "power_w": load.get("power_w"),
                "torch": versions["torch"],
                "triton": versions["triton"],
                "sources": found["code"]["sources"],
                "commit": found["code"]["commit"] or commit,
                "date": found["made"],
                "command": "sagepatch bench --json",
            }
        )
    return made


def main() -> None:
    """Read, flatten, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    given = parser.parse_args()
    found = [
        row
        for file in given.files
        for row in rows(json.loads(file.read_text(encoding="utf-8")), given.commit)
    ]
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
