"""What the units of the GPU do during one attention kernel, counted by Nsight Compute, and appends
a row to benchmarks/h200_counters.csv.

    python -m benchmarks.h200_counters --variant triton.sage1_b
        --shape 1x33x8192x64 [--causal]

Needs `ncu` on the path and the right to read counters. The kernel is compiled before ncu looks, in
a process of its own; then it is called once. Everything that ncu counted is left beside the table,
in `<variant>-<shape>[-causal].ncu.txt`. `way` is "serves", or "serves, causal".
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from benchmarks.quality.tables import head
from sagepatch.backends import load
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.env import Machine
from sagepatch.spec import Call

SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats"),
    *("SchedulerStats", "InstructionStats", "LaunchStats"),
)
_ACTIVE, _ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
# Tensor cores are asked for by name: not every version of ncu has them in a section.
TENSOR = f"sm__pipe_tensor_cycles_active{_ACTIVE}"
# By column: the first of these that ncu wrote.
COUNTERS = {
    "tensor_pct": (TENSOR,),
    "issue_pct": (f"sm__inst_issued{_ACTIVE}", f"smsp__issue_active{_ACTIVE}"),
    "xu_pct": (f"sm__inst_executed_pipe_xu{_ACTIVE}", f"sm__pipe_xu_cycles_active{_ACTIVE}"),
    "alu_pct": (f"sm__pipe_alu_cycles_active{_ACTIVE}", f"sm__inst_executed_pipe_alu{_ACTIVE}"),
    "fma_pct": (f"sm__pipe_fma_cycles_active{_ACTIVE}", f"sm__inst_executed_pipe_fma{_ACTIVE}"),
    "dram_pct": (f"gpu__dram_throughput{_ELAPSED}", f"dram__throughput{_ELAPSED}"),
    "registers": ("launch__registers_per_thread",),
    **{
        f"stall_{column}": (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",)
        for column, reason in (
            *(("barrier", "barrier"), ("dispatch", "dispatch_stall")),
            *(("long_scoreboard", "long_scoreboard"), ("wait", "wait")),
            *(("math_pipe", "math_pipe_throttle"), ("mio", "mio_throttle")),
            ("not_selected", "not_selected"),
        )
    },
}
DURATION = "gpu__time_duration.sum"
COLUMNS = (
    *("kernel", "way", "b", "h", "s", "d", *COUNTERS),
    *("gpu", "driver", "torch", "triton", "commit", "command"),
)


def counted(lines: Iterable[str]) -> dict[str, str]:
    """The raw counters of the longest kernel in what ncu wrote with `--page raw --csv`: a line of
    names, one of units, and one a kernel, after whatever else it had to say.

    Raises `ValueError` where there is no kernel.
    """
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    kernels = [dict(zip(table[0], row, strict=False)) for row in table[2:]]
    if not kernels:
        raise ValueError("ncu counted no kernel")
    return max(kernels, key=lambda kernel: number(kernel.get(DURATION, "")))


def number(text: str) -> float:
    """A number as ncu writes it, with commas between thousands; 0 where there is none.

    >>> number("1,234.5")
    1234.5
    """
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def columns(kernel: Mapping[str, str]) -> dict[str, str]:
    """The counters by column, rounded; empty where ncu has none of the names."""
    found = {}
    for column, names in COUNTERS.items():
        said = next((kernel[name] for name in names if kernel.get(name)), None)
        form = ".0f" if column == "registers" else ".2f"
        found[column] = "" if said is None else format(number(said), form)
    return found


def call_once(variant: str, shape: tuple[int, int, int, int], causal: bool) -> None:
    """What ncu looks at."""
    B, H, S, D = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = BY_NAME[variant]
    call = Call(q, k, v, D**-0.5, causal_offset=0 if causal else None)
    load(found.entry)(call, found.recipe)
    torch.cuda.synchronize()


def sizes(text: str) -> tuple[int, int, int, int]:
    """B x H x S x D."""
    B, H, S, D = map(int, text.split("x"))
    return B, H, S, D


def main() -> None:
    """Compile, count, append."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--variant", required=True, choices=list(BY_NAME), metavar="KERNEL")
    parser.add_argument("--shape", required=True, help="B x H x S x D, as 1x33x8192x64")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--commit", default=head())
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        call_once(args.variant, sizes(args.shape), args.causal)
        return
    inside = [sys.executable, "-m", "benchmarks.h200_counters", "--inside"]
    inside += ["--variant", args.variant, "--shape", args.shape] + ["--causal"] * args.causal
    subprocess.run(inside, check=True)
    name = f"{args.variant}-{args.shape}{'-causal' * args.causal}"
    raw = args.out.with_name(f"{name}.ncu.txt")
    options = ["-k", "regex:^attention", "--metrics", f"{TENSOR},{DURATION}"]
    options += [word for section in SECTIONS for word in ("--section", section)]
    options += ["--page", "raw", "--csv"]
    subprocess.run(["ncu", *options, "--log-file", str(raw), *inside], check=True)
    found = columns(counted(raw.read_text(encoding="utf-8").splitlines()))
    missing = [column for column, said in found.items() if not said]
    if missing:
        print("not counted by this version of ncu:", *missing, flush=True)
    machine = Machine.here()
    facts = {
        "gpu": machine.gpu_name,
        "driver": machine.driver,
        "torch": machine.versions["torch"],
        "triton": machine.versions.get("triton"),
        "commit": args.commit,
        "command": f"python -m benchmarks.h200_counters --variant {args.variant} "
        f"--shape {args.shape}{' --causal' * args.causal}",
    }
    call = dict(zip("bhsd", sizes(args.shape), strict=True))
    way = "serves, causal" if args.causal else "serves"
    is_new = not args.out.exists()
    with args.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow({"kernel": args.variant, "way": way, **call, **found, **facts})
    print(args.variant, way, args.shape, *(f"{k}={v}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
