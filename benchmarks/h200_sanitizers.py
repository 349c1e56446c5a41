"""Every form of call on every Hopper kernel under compute-sanitizer's memcheck, racecheck and
synccheck: one row a tool and recipe, and one for each fault put in on purpose.

    python benchmarks/h200_sanitizers.py --out benchmarks/h200_sanitizers.csv [--seconds 300]

Runs the kernels alone, on small calls; tests/backends/test_cuda_*.py say whether results are right.
Only our kernels are instrumented. Racecheck follows what threads read and write in shared memory;
what the copy engine and the tensor cores do there it does not see (the row `no wait for a copy`):
for that there is h200_schedule.py. `complete`: the tool came to its summary, and the process,
unless it has a fault, to its end. Ends with 1 where a tool had a word on a kernel without a fault.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from signal import SIGKILL
from typing import Any

import torch

import sagepatch
from sagepatch.backends.cuda import attention, attention_tiles, build
from sagepatch.env import Machine
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

KERNELS = ("attention", "key_tiles", "queries", "keys_and_values")
TOOLS = ("memcheck", "racecheck", "synccheck")
FIELDS = (
    *("tool", "recipe", "calls", "errors", "complete"),
    *("gpu", "driver", "torch", "sanitizer", "sagepatch", "commit", "command"),
)
LINES_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault put in on purpose: what a source file says, and what instead."""

    tool: str
    source: str = ""
    said: str = ""
    instead: str = ""


FAULTS = {
    "control: keys end too early": Fault("memcheck"),
    "control: no barrier in statistics": Fault("racecheck", "statistics.cuh", "__syncthreads();"),
    "control: no wait for a copy": Fault(
        "racecheck",
        "attention.cu",
        "      wait(full_q, q_phase);\n      q_phase ^= 1;\n      quantise_queries",
        "      q_phase ^= 1;\n      quantise_queries",
    ),
}


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    """A call of shape (B, Hq, Hkv, Sq, Skv, D)."""
    B, Hq, Hkv, Sq, Skv, D = shape
    q, k, v = (
        torch.randn(B, heads, tokens, D, device="cuda", dtype=dtype)
        for heads, tokens in ((Hq, Sq), (Hkv, Skv), (Hkv, Skv))
    )
    return Call(q, k, v, D**-0.5, **options)


def forms(dim: int, other: int, packs: bool) -> Iterator[tuple[str, Call]]:
    """One small call of each form, in turns of two head sizes."""
    ends_q = torch.tensor([0, 5, 5, 205, 333], dtype=torch.int32, device="cuda")
    ends_kv = torch.tensor([0, 130, 200, 205, 500], dtype=torch.int32, device="cuda")
    keep = torch.rand(3, 1, 1, 515, device="cuda") < 0.5
    keep[:, ..., 130:260] = False
    keep[:, ..., 260:420] = True
    keep[1] = False
    masked = {"attn_mask": keep}
    yield "plain", make((2, 4, 2, 129, 191, dim))
    yield "log-sum-exp", make((1, 2, 1, 65, 129, other), return_lse=True)
    yield "shared blocks", make((2, 4, 2, 333, 700, dim))
    yield "causal", make((1, 2, 1, 300, 333, other), causal_offset=33)
    yield "window", make((1, 2, 1, 200, 430, dim), causal_offset=230, window=90)
    yield "keys", _hidden_nan(make((3, 2, 1, 130, 515, other), **masked))
    yield "keys, causal", _hidden_nan(make((3, 2, 1, 130, 515, dim), causal_offset=385, **masked))
    if packs:
        packed = {"cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv}
        yield "packed", make((1, 4, 2, 333, 500, other), **packed)
        both = {"cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_q}
        yield "packed, causal", make((1, 4, 2, 333, 333, dim), causal_offset=0, **both)
    yield "fp16, [B, S, H, D]", make((1, 4, 2, 100, 150, other), torch.float16, bshd_out=True)
    yield "head size 40", make((1, 2, 1, 100, 150, 40))
    call = make((1, 2, 1, 100, 150, dim))
    odd = [torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (call.q, call.k, call.v)]
    yield "addresses off 16 bytes", replace(call, q=odd[0], k=odd[1], v=odd[2])
    yield "one query, one key", make((1, 2, 2, 1, 1, other))
    for d in (64, 128):
        # In every other row scores far over those of the first tile: a warp has both kinds.
        call = make((1, 2, 1, 200, 1500, d))
        k = call.k * torch.linspace(0.05, 8, 1500, device="cuda", dtype=call.k.dtype)[:, None]
        q = call.q.clone()
        q[:, :, ::2] /= 64
        yield f"rows of two sizes, {d}", replace(call, q=q, k=k)
        # Whole tiles alone, and a warpgroup without rows.
        ends = torch.tensor([1500, 128, 640], device="cuda")[:, None, None, None]
        keep = torch.arange(1500, device="cuda") < ends
        yield f"keys, whole tiles, {d}", _hidden_nan(make((3, 2, 1, 300, 1500, d), attn_mask=keep))


def _hidden_nan(call: Call) -> Call:
    assert call.attn_mask is not None
    hidden = ~call.attn_mask[:, 0, 0, :, None, None].transpose(1, 2)
    nan = float("nan")
    return replace(call, k=call.k.masked_fill(hidden, nan), v=call.v.masked_fill(hidden, nan))


def inside(name: str, fault: Fault | None) -> None:
    """What the sanitizer watches: all forms of one recipe, or one call with a fault."""
    torch.manual_seed(0)
    recipe = RECIPES[name]
    if fault is not None:
        call = make((1, 2, 2, 300, 1 << 17, 128))
        if fault.source:
            read = build._read

            def faulty(file: str) -> str:
                text = read(file)
                if file == fault.source:
                    assert fault.said in text, f"{file} no longer says {fault.said!r}"
                    text = text.replace(fault.said, fault.instead)
                return text

            build._read = faulty
            call = make((1, 2, 2, 300, 500, 128))
        else:
            call.k.untyped_storage().resize_(4096)
        attention.run(call, recipe)
        torch.cuda.synchronize()
        print("called control", flush=True)
        return
    at = attention_tiles.SERVED.index(name) % 2
    dim, other = (64, 128) if at else (128, 64)
    packs = all(attention_tiles.pick(recipe, d, d).block_n <= 128 for d in (64, 128))
    splits = attention.splits
    for form, call in forms(dim, other, packs):
        attention.splits = (lambda *facts: True) if form == "shared blocks" else splits
        attention.run(call, recipe)
        torch.cuda.synchronize()
        print("called", form, flush=True)


def watched(tool: str | None, recipe: str, until: float, fault: str = "") -> tuple[str, bool]:
    """What one process printed, and whether it ended by itself."""
    command = [sys.executable, __file__, "--inside", recipe, "--fault", fault]
    if tool is not None:
        kernels = [word for name in KERNELS for word in ("--kernel-name", f"kns={name}")]
        command = [
            *("compute-sanitizer", "--tool", tool, "--report-api-errors", "no"),
            *("--print-limit", str(LINES_SHOWN), *kernels, *command),
        ]
    # Allocations of their own, so that a byte too far is one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = threading.Timer(max(1.0, until - time.monotonic()), os.killpg, (running.pid, SIGKILL))
    late.start()
    said = running.communicate()[0]
    late.cancel()
    return said, running.returncode == 0


def row(tool: str, name: str, said: str, ended: bool) -> dict[str, Any]:
    """One line of the table from what a tool printed."""
    # Behind the summary the tool may say how many of its errors it did not print.
    summary = re.findall(r"SUMMARY: (\d+)(?! errors were not printed)\b", said)
    shown = len(re.findall(r"^========= (?:Error|Warning|Invalid)", said, re.MULTILINE))
    return {
        "tool": tool,
        "recipe": name,
        "calls": said.count("\ncalled ") + said.startswith("called "),
        "errors": int(summary[-1]) if summary else shown,
        "complete": bool(summary) and (ended or name in FAULTS),
    }


def wrong(found: dict[str, Any]) -> bool:
    """Whether a tool had a word on a kernel that has no fault."""
    return found["recipe"] not in FAULTS and found["errors"] > 0


def of_recipe(recipe: str, until: float) -> list[dict[str, Any]]:
    """All tools on one recipe, after a run of its own that compiles."""
    watched(None, recipe, until)
    rows = []
    for tool in TOOLS:
        said, ended = watched(tool, recipe, until)
        rows.append(row(tool, recipe, said, ended))
        print(*rows[-1].values(), flush=True)
        if rows[-1]["errors"] or not rows[-1]["calls"]:
            print(said[-3000:], flush=True)
    return rows


def of_fault(name: str, until: float) -> list[dict[str, Any]]:
    """One fault under the tool that is to see it."""
    said, ended = watched(FAULTS[name].tool, "sage2_8", until, name)
    found = row(FAULTS[name].tool, name, said, ended)
    print(*found.values(), flush=True)
    if not found["complete"]:
        print(said[-1500:], flush=True)
    return [found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/h200_sanitizers.csv")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--faults-only", action="store_true")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, FAULTS.get(args.fault))
        return
    machine = Machine.here()
    shown = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True)
    facts = {
        "gpu": machine.gpu_name,
        "driver": machine.driver,
        "torch": machine.versions["torch"],
        "sanitizer": (re.findall(r"Version (\S+)", shown.stdout) or ["unknown"])[0],
        "sagepatch": sagepatch.__version__,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
    }
    until = time.monotonic() + args.seconds
    with ThreadPoolExecutor(len(attention_tiles.SERVED) + len(FAULTS)) as pool:
        recipes = () if args.faults_only else attention_tiles.SERVED
        jobs = [pool.submit(of_recipe, name, until) for name in recipes]
        jobs += [pool.submit(of_fault, name, until) for name in FAULTS]
        rows = [found for job in jobs for found in job.result()]
    rows.sort(key=lambda found: TOOLS.index(found["tool"]))
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows({**found, **facts} for found in rows)
    sys.exit(1 if any(wrong(found) for found in rows) else 0)


if __name__ == "__main__":
    main()
