"""Times one forward of true architectures (random weights, bf16) unpatched, with the safe tier
everywhere and calibrated, in one run, and writes benchmarks/h200_end_to_end.csv row by row.

    python benchmarks/h200_end_to_end.py --out benchmarks/h200_end_to_end.csv [--seconds 200]

Denoisers without text encoder and VAE, a language model's reading of a prompt. All models are built
side by side, a process each, while the kernels are compiled; then they are timed one after the
other, the rest waiting. `speedup` is over torch's default attention in the same process, forwards
of both taking turns. `predicted_speedup` takes, from the unpatched time, what each layer's kernel
saves where it is timed alone on the calls of one forward. "calibrated" is the plan at the default
threshold, of the inputs that the mode names where they are not the model's own. A time is written
only after the output agreed with the unpatched one.

Beside it, in `<out>_parts.csv`: the attention of one forward timed in place and alone, when the
host was free again, the spread of the speedup over rounds, the kernels that served.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

import end_to_end_warm
import torch
from true_models import Case

from sagepatch.env import VERSION, nvidia_driver

COLUMNS = (
    *("model", "mode", "compile", "ms_median", "ms_p20", "ms_p80", "speedup", "predicted_speedup"),
    *("gpu", "driver", "cuda", "torch", "sagepatch", "commit", "command"),
)
PARTS = (
    *("model", "mode", "compile", "forwards", "speedup_p20", "speedup_p80", "attention_ms"),
    *("attention_alone_ms", "host_ms", "calibration_s", "rel_error", "kernels", "fallbacks"),
    *("gpu", "sagepatch", "commit"),
)
HERE = Path(__file__).parent


class Child:
    """One model in a process of its own, which waits until it is told what to time."""

    def __init__(self, names: list[str], options: list[str], heard: Callable[[str], None]) -> None:
        script = str(HERE / "end_to_end_bench.py")
        command = [sys.executable, script, "--only", *names, *options]
        self.name = names[0]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said: Queue[str] = Queue()
        self._heard = heard
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.rstrip() in ("READY", "DONE"):
                self._said.put(line.rstrip())
            else:
                self._heard(line.rstrip())
        self._said.put("END")

    def waits(self, seconds: float) -> bool:
        """Whether it said within `seconds` that it is ready, or done; else it is ended."""
        try:
            if self._said.get(timeout=max(0.0, seconds)) != "END":
                return True
        except Empty:
            pass
        self.end()
        return False

    def time(self, case: str, seconds: float) -> bool:
        """Have a case timed; whether it was done within `seconds`."""
        assert self.process.stdin is not None
        if self.process.poll() is not None:
            return False
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return self.waits(seconds)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Table:
    """A CSV file that takes rows as they come, each with the same facts."""

    def __init__(self, path: Path, columns: tuple[str, ...], facts: dict[str, Any]) -> None:
        is_new = not path.exists()
        self._file: IO[str] = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        self._facts = {name: value for name, value in facts.items() if name in columns}
        if is_new:
            self._writer.writeheader()

    def write(self, row: dict[str, Any]) -> None:
        self._writer.writerow(row | self._facts)
        self._file.flush()


def commit() -> str:
    """The commit that this file is from, "" outside a repository."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200_end_to_end.csv"))
    parser.add_argument("--seconds", type=float, default=900, help="end after so many")
    parser.add_argument("--set-up", type=float, default=120, help="seconds that this may take")
    parser.add_argument(
        *("--only",),
        nargs="*",
        default=[],
        help="cases in this order, by name or its beginning; `name:compile` compiles these alone",
    )
    parser.add_argument("--compile", action="store_true", help="each block by torch.compile")
    parser.add_argument("--full-depth", action="store_true")
    parser.add_argument("--plans", help="a folder that keeps plans, and has those to follow")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--cases", default="true_models", help="the module that holds CASES")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    began = time.monotonic()
    on_gpu = args.device == "cuda"
    facts = {
        "gpu": torch.cuda.get_device_name() if on_gpu else args.device,
        "driver": nvidia_driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "sagepatch": VERSION,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
    }
    tables = {
        "ROW": Table(args.out, COLUMNS, facts),
        "PARTS": Table(args.out.with_name(f"{args.out.stem}_parts.csv"), PARTS, facts),
    }

    def heard(line: str) -> None:
        kind, _, text = line.partition(" ")
        told = f"[{time.monotonic() - began:5.1f}] {line}"
        if kind in tables:
            row = json.loads(text)
            tables[kind].write(row)
            told = f"[{time.monotonic() - began:5.1f}] " + " ".join(map(str, row.values()))
        print(told, flush=True)

    asked = picked(importlib.import_module(args.cases).CASES, args.only, args.compile)
    options = ["--cases", args.cases, "--device", args.device]
    options += ["--full-depth"] if args.full_depth else []
    options += ["--plans", args.plans] if args.plans else []
    names: dict[tuple[Any, bool], list[str]] = {}
    for case, compiled in asked:
        names.setdefault((case.build, compiled), []).append(case.name)
    children = {
        key: Child(some, options + ["--compile"] * key[1], heard) for key, some in names.items()
    }
    if on_gpu:
        processes = min(20, (os.cpu_count() or 1) // 2 + 4)
        for line in end_to_end_warm.compile_all((case for case, _ in asked), processes):
            heard(line)
    ready = {}
    for key, child in children.items():
        ready[key] = child.waits(args.set_up - (time.monotonic() - began))
        if not ready[key]:
            heard(f"{child.name}: did not get ready, left out")
    for case, compiled in asked:
        key, left = (case.build, compiled), args.seconds - (time.monotonic() - began)
        if not ready[key] or left < case.seconds:
            heard(f"{case.name}: left out, {left:.0f} s are left of {args.seconds:g}")
            continue
        heard(f"{case.name}{' compiled' * compiled} begins")
        ready[key] = children[key].time(case.name, left)
    for child in children.values():
        child.end()


def picked(cases: Sequence[Case], wanted: Sequence[str], compiled: bool) -> list[tuple[Case, bool]]:
    """The cases whose names begin as wanted, in that order, each with whether it is compiled."""
    found: dict[tuple[str, bool], tuple[Case, bool]] = {}
    for word in wanted or [""]:
        start, _, how = word.partition(":")
        if how not in ("", "compile"):
            raise SystemExit(f"{word}: after the colon stands 'compile' or nothing")
        for case in cases:
            if case.name.startswith(start):
                found[case.name, compiled or how != ""] = case, compiled or how != ""
    return list(found.values())


if __name__ == "__main__":
    main()
