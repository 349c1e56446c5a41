"""Fuzzes every GPU kernel on this machine's GPU (tests/backends/test_fuzz.py, many processes) and
writes what ran, what failed and how near the bounds it came, one row a kernel.

    python benchmarks/h200_fuzz.py --out benchmarks/h200_fuzz.csv [--lanes 3] [--examples 200]

Needs pytest, pytest-xdist and hypothesis. A lane is one set of head sizes, types and options of a
kernel; the first lanes of all kernels run before the second ones, so that `--seconds` may cut the
end off. Ends with 1 where a call missed its bound.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sagepatch
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.env import Machine

TEST = Path(__file__).parents[1] / "tests" / "backends" / "test_fuzz.py"
FIELDS = (
    *("toolchain", "recipe", "lanes", "examples", "failures", "worst_of_bound"),
    *("gpu", "driver", "torch", "triton", "hypothesis", "sagepatch", "commit", "command"),
)


def fuzz(args: argparse.Namespace, tally: Path) -> None:
    """Run the lanes; each leaves a line in `tally`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SAGEPATCH_FUZZ": str(args.examples),
        "SAGEPATCH_FUZZ_LANES": str(args.lanes),
        "SAGEPATCH_FUZZ_FIRST": str(args.first),
        "SAGEPATCH_FUZZ_SECONDS": str(args.lane_seconds),
        "SAGEPATCH_FUZZ_TALLY": str(tally),
    }
    command = [sys.executable, "-m", "pytest", str(TEST), "-p", "no:cacheprovider", "--tb=line"]
    command += ["-q", "--timeout", "0", *args.pytest.split()]
    if args.workers > 1:
        command += ["-n", str(args.workers)]
    if args.only:
        command += ["-k", args.only]
    # Workers must not outlive it: a group of their own, told to stop.
    running = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        running.wait(args.seconds)
    except subprocess.TimeoutExpired:
        print(f"{args.seconds:g} s are over: lanes that had not ended do not count", flush=True)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def rows(tally: Path) -> list[dict[str, Any]]:
    """One row a kernel, in the order of the catalogue; prints what failed."""
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in tally.read_text().splitlines():
        lane = json.loads(line)
        lanes[lane["kernel"]].append(lane)
        for failed in lane["failed"]:
            print(f"{lane['kernel']}: {failed}")
    made = []
    for name, found in sorted(lanes.items(), key=lambda item: list(BY_NAME).index(item[0])):
        toolchain, recipe = name.split(".")
        made.append(
            {
                "toolchain": toolchain,
                "recipe": recipe,
                "lanes": len(found),
                "examples": sum(lane["examples"] for lane in found),
                "failures": sum(lane["failures"] for lane in found),
                "worst_of_bound": f"{max(lane['worst'] for lane in found):.3f}",
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/h200_fuzz.csv")
    parser.add_argument("--lanes", type=int, default=3, help="of each kernel")
    parser.add_argument("--first", type=int, default=0, help="number of the first lane")
    parser.add_argument("--examples", type=int, default=200, help="of each lane")
    parser.add_argument("--lane-seconds", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--only", default="", help="kernels, as pytest -k takes them")
    parser.add_argument("--pytest", default="", help="more options for pytest")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    machine = Machine.here()
    facts = {
        "gpu": machine.gpu_name,
        "driver": machine.driver,
        "torch": machine.versions["torch"],
        "triton": machine.versions.get("triton"),
        "hypothesis": version("hypothesis"),
        "sagepatch": sagepatch.__version__,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
    }
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "lanes.jsonl"
        tally.touch()
        fuzz(args, tally)
        found = rows(tally)
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows({**row, **facts} for row in found)
    for toolchain in dict.fromkeys(row["toolchain"] for row in found):
        mine = [row for row in found if row["toolchain"] == toolchain]
        print(
            f"{toolchain}: {sum(row['examples'] for row in mine)} calls of {len(mine)} kernels, "
            f"{sum(row['failures'] for row in mine)} failed, at most "
            f"{max(float(row['worst_of_bound']) for row in mine):.3f} of a bound"
        )
    sys.exit(1 if any(row["failures"] for row in found) else 0)


if __name__ == "__main__":
    main()
