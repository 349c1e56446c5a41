"""The Hopper kernels with pseudo-random delays around every wait, arrival, copy and barrier
(schedule_noise.py) on this machine's GPU: outputs must be those of the kernels that serve, to the
bit, whatever the order of events. And the same with one synchronisation taken out at a time, which
must be seen. One row a recipe, head size and form, and one a fault.

    python benchmarks/h200_schedule.py --out benchmarks/h200_schedule.csv [--seeds 48]

`differs` counts seeds whose output was another; `gave_up` those where a wait took half a second,
which ends all waits; `quiet_*` the same of runs of the same machine code with delays of 0, and
`unlike_quiet` seeds whose output was not that of such a run. A fault is `seen` if any run was
either, or if its process died or hung once its kernels were loaded. Recipe, size and form of a
fault are the call that it was put into. Ends with 1 where a form differed, gave up
or died, or one with nothing taken out was seen.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import schedule_noise
import torch
from schedule_calls import DIMS, FORMS, WAYS, runs
from torch import Tensor

import sagepatch
from sagepatch.backends import prepared
from sagepatch.backends.cuda import attention, attention_tiles, build, launch, prepass
from sagepatch.backends.cuda.raw_operands import raw_strides
from sagepatch.env import Machine
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

FIELDS = (
    *("kind", "what", "recipe", "dim", "form", "seeds", "differs", "unlike_quiet"),
    *("gave_up", "quiet_runs", "quiet_differs", "quiet_gave_up", "seen", "outcome"),
    *("gpu", "driver", "torch", "nvrtc", "sagepatch", "commit", "command"),
)
# What must not be seen.
NO_FAULT = "nothing taken out"


@contextmanager
def delayed(folder: Path, shared: bool, noisy: bool) -> Iterator[None]:
    """Serve by the kernels with delays, if `noisy`, and with shared blocks, or without."""
    before = attention.load, prepass.load, attention.splits, build.BESIDE

    def load(program: build.Program, *args: Any, **options: Any) -> launch.Kernel:
        if noisy and program.source in schedule_noise.PROGRAMS:
            program = replace(program, source=schedule_noise.name_of(program.source))
        return launch.load(program, *args, **options)

    attention.load = prepass.load = load  # type: ignore[assignment]
    attention.splits = lambda *facts: shared  # type: ignore[assignment]
    build.BESIDE = (*build.BESIDE, folder)
    forget()
    try:
        yield
    finally:
        attention.load, prepass.load, attention.splits, build.BESIDE = before  # type: ignore
        forget()


def forget() -> None:
    """Forget how calls were served."""
    prepared._PREPARED.clear()
    attention.launch_of.cache_clear()
    prepass.plan_of.cache_clear()


class Words:
    """A global word of every loaded program with delays."""

    def __init__(self, name: str) -> None:
        from cuda.bindings import driver

        self.addresses = []
        for program, (library, _) in launch._LIBRARIES.items():
            if "_noise" in program.source:
                address, size = launch._values(driver.cuLibraryGetGlobal(library, name.encode()))
                assert size == 4, name
                self.addresses.append(int(address))

    def set(self, value: int) -> None:
        """Behind what is on the current stream."""
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        for address in self.addresses:
            launch._values(driver.cuMemsetD32Async(address, value, 1, stream))

    def any(self) -> bool:
        """Whether one is not 0, when all that is on the device has ended."""
        from cuda.bindings import driver

        torch.cuda.synchronize()
        found = ctypes.c_uint32()
        for address in self.addresses:
            launch._values(driver.cuMemcpyDtoH(ctypes.addressof(found), address, 4))
            if found.value:
                return True
        return False


def bits(call: Call, recipe: str) -> list[Tensor]:
    """Output and log-sum-exp as integers."""
    out, lse = attention.run(call, RECIPES[recipe])
    return [out.view(torch.int16), *([] if lse is None else [lse.view(torch.int32)])]


def differ(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """Whether they do, on the device."""
    return torch.stack([(a != b).any() for a, b in zip(ours, theirs, strict=True)]).any()


def of_form(form: str, recipe: str, dim: int, seeds: int, folder: Path) -> dict[str, Any]:
    """One form of call with delays against itself without."""
    torch.manual_seed(0)
    call, shared = FORMS[form](dim), form == "shared"
    with delayed(folder, shared, noisy=False):
        served = bits(call, recipe)
    with delayed(folder, shared, noisy=True):
        quiet = bits(call, recipe)
        seed, gave_up = Words("noise_seed"), Words("noise_gave_up")
        gave_up.set(0)
        found = []
        for value in range(1, seeds + 1):
            seed.set(value)
            noisy = bits(call, recipe)
            found.append(torch.stack([differ(noisy, served), differ(noisy, quiet)]))
        differs, unlike_quiet = torch.stack(found).sum(0).tolist()
        row = {
            **{"differs": differs, "unlike_quiet": unlike_quiet, "gave_up": int(gave_up.any())},
            **{"quiet_runs": 1, "quiet_differs": int(differ(quiet, served)), "quiet_gave_up": 0},
        }
        seed.set(0)
    return {"seeds": seeds, **row}


def of_fault(job: dict[str, Any], seeds: int, quiet: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row of a fault after every run, so that the last one stands if the process dies."""
    recipe, dim, form = job["recipe"], job["dim"], job["form"]
    torch.manual_seed(0)
    call, shared = FORMS[form](dim), form == "shared"
    with delayed(folder, shared, noisy=False):
        served = bits(call, recipe)
        torch.cuda.synchronize()
    names = ("seeds", "differs", "gave_up", "quiet_runs", "quiet_differs", "quiet_gave_up")
    row: dict[str, Any] = dict.fromkeys(names, 0)
    with delayed(folder, shared, noisy=True):
        # Loads the programs.
        attention.launch_of(
            attention.Shape.of(
                call,
                RECIPES[recipe],
                call.empty_out(),
                raw_strides(call, RECIPES[recipe]),
            )
        )
        raw_q = raw_strides(call, RECIPES[recipe]) is not None
        _ = prepass.plan_of(attention.form_of(call, RECIPES[recipe], raw_q=raw_q)).kernels
        seed, gave_up = Words("noise_seed"), Words("noise_gave_up")
        yield row
        for value in [0] * quiet + list(range(1, seeds + 1)):
            seed.set(value)
            other = differ(bits(call, recipe), served)
            ended = gave_up.any()
            row["seeds" if value else "quiet_runs"] += 1
            row["differs" if value else "quiet_differs"] += int(other)
            if ended:
                row["gave_up" if value else "quiet_gave_up"] += 1
                break
            yield row
    yield row


def child(job: dict[str, Any], seeds: int, quiet: int, to: Path) -> None:
    """One process: a recipe and head size with all forms, or one fault. Leaves rows in a file."""
    log = os.open(to.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    folder = to.with_suffix(".src")
    folder.mkdir()
    with to.open("a", buffering=1) as file:
        if job["kind"] == "fault":
            schedule_noise.write(folder, schedule_noise.FAULTS.get(job["what"]))
            for row in of_fault(job, seeds, quiet, folder):
                file.write(json.dumps({**job, **row}) + "\n")
            return
        schedule_noise.write(folder)
        for form in job["forms"]:
            if runs(form, job["recipe"], job["dim"]):
                row = of_form(form, job["recipe"], job["dim"], seeds, folder)
                kept = {name: job[name] for name in ("kind", "what", "recipe", "dim")}
                file.write(json.dumps({**kept, "form": form, **row}) + "\n")


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What processes are to do, in order."""
    found = []
    if args.faults:
        put = [(name, fault.way) for name, fault in schedule_noise.FAULTS.items()]
        for name, way in [*((NO_FAULT, way) for way in WAYS), *put]:
            recipe, dim, form = WAYS[way]
            found.append(
                {"kind": "fault", "what": name, "recipe": recipe, "dim": dim, "form": form}
            )
    forms = [form for form in FORMS if not args.forms or form in args.forms.split(";")]
    for dim in DIMS:
        for recipe in attention_tiles.SERVED:
            if attention_tiles.refusal(RECIPES[recipe], dim, dim) is None and args.whole:
                whole = {"kind": "whole", "what": "", "recipe": recipe, "dim": dim}
                found.append({**whole, "forms": forms})
    return found


def run_all(wanted: list[dict[str, Any]], args: argparse.Namespace, folder: Path) -> list[Any]:
    """Run the jobs, each in a process forked from this one, which has not touched the GPU."""
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(wanted))
    running: dict[int, Any] = {}
    outcomes: dict[int, str] = {}
    until = args.until or time.time() + args.seconds
    while (waiting or running) and time.time() < until:
        while waiting and len(running) < args.workers:
            number, job = waiting.pop(0)
            to = folder / f"{number}.jsonl"
            to.touch()
            running[number] = context.Process(target=child, args=(job, args.seeds, args.quiet, to))
            running[number].start()
        time.sleep(0.02)
        for number, process in list(running.items()):
            if time.time() - (folder / f"{number}.jsonl").stat().st_mtime > args.stall:
                outcomes[number] = "hung"
                process.kill()
                process.join()
            if process.exitcode is not None:
                outcomes.setdefault(number, "died" if process.exitcode else "ended")
                del running[number]
    for process in running.values():
        process.kill()
    return [
        rows_of(job, folder / f"{number}.jsonl", outcomes.get(number, "cut off"))
        for number, job in enumerate(wanted)
    ]


def rows_of(job: dict[str, Any], file: Path, outcome: str) -> list[dict[str, Any]]:
    """What a process left, one row a form, or the last one of a fault; prints what it said."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    log = file.with_suffix(".log")
    said = log.read_text()[-800:] if log.exists() else ""
    if job["kind"] == "whole":
        wanted = {f for f in job["forms"] if runs(f, job["recipe"], job["dim"])}
        missing = wanted - {row["form"] for row in rows}
        if missing:
            print(job["recipe"], job["dim"], outcome, "before", *sorted(missing), said, flush=True)
        ended = [{**row, "outcome": "ended"} for row in rows]
        if outcome == "cut off":
            return ended
        # Those that did not run because a process died or hung are rows too: nothing else tells.
        kept = {name: job[name] for name in ("kind", "what", "recipe", "dim")}
        none = dict.fromkeys(("seeds", "differs", "unlike_quiet", "gave_up", "quiet_differs"), 0)
        return ended + [
            {**kept, "form": form, **none, "outcome": outcome} for form in sorted(missing)
        ]
    if outcome != "ended":
        print(job["what"], outcome, said, flush=True)
    # Without a row its kernels were not even loaded.
    found = {**(rows[-1] if rows else job), "outcome": outcome if rows else "not run"}
    numbers = ("differs", "gave_up", "quiet_differs", "quiet_gave_up")
    found["seen"] = found["outcome"] in ("died", "hung") or any(found.get(n) for n in numbers)
    return [found]


def tell(to: Path) -> None:
    """Write down what machine this is."""
    machine = Machine.here()
    facts = {
        "gpu": machine.gpu_name,
        "driver": machine.driver,
        "torch": machine.versions["torch"],
        "nvrtc": ".".join(map(str, build.nvrtc_version() or ())),
        "sagepatch": sagepatch.__version__,
    }
    to.with_suffix(".new").write_text(json.dumps(facts))
    to.with_suffix(".new").rename(to)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/h200_schedule.csv")
    parser.add_argument("--seeds", type=int, default=48)
    parser.add_argument("--quiet", type=int, default=8, help="runs of a fault without delays")
    parser.add_argument("--forms", default="", help="some of them, with semicolons between")
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    parser.add_argument("--faults-only", dest="whole", action="store_false")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 8)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--until", type=float, help="UNIX time, in place of --seconds")
    parser.add_argument("--stall", type=float, default=40, help="seconds without a row")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    # Memory that nobody wrote is full of ones: what an earlier run left there must not help.
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        told = Path(folder) / "facts.json"
        # By a process of its own, as all that asks the GPU.
        asking = multiprocessing.get_context("fork").Process(target=tell, args=(told,))
        asking.start()
        found = [row for rows in run_all(jobs(args), args, Path(folder)) for row in rows]
        asking.join(5)
        facts = json.loads(told.read_text()) if told.exists() else {}
    facts |= {"commit": args.commit, "command": "python " + " ".join(sys.argv)}
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in found)
    sys.exit(summarise(found))


def summarise(found: list[dict[str, Any]]) -> int:
    """Say what was found; 1 where kernels that serve, or those with nothing taken out, differ."""
    whole = [row for row in found if row["kind"] == "whole"]
    faults = [row for row in found if row["kind"] == "fault" and row["what"] != NO_FAULT]
    sound = [row for row in found if row["what"] == NO_FAULT and row["outcome"] != "not run"]
    bad = [
        row
        for row in whole
        if row["outcome"] != "ended" or row["differs"] or row["gave_up"] or row["quiet_differs"]
    ]
    print(
        f"{len(whole)} forms, {sum(row['seeds'] for row in whole)} runs with delays, "
        f"{len(bad)} forms that differ, gave up or did not end"
    )
    for row in bad[:8]:
        print(*(row[n] for n in ("recipe", "dim", "form", "differs", "unlike_quiet", "gave_up")))
    seen = [row for row in faults if row["seen"]]
    unseen = [f"{row['what']} ({row['outcome']})" for row in faults if not row["seen"]]
    print(f"{len(seen)} of {len(faults)} faults seen; not:", "; ".join(unseen))
    quiet = [
        row
        for row in seen
        # One that died or hung before the first seed did so without delays.
        if row["quiet_differs"] or row["quiet_gave_up"] or not (row["differs"] or row["seeds"])
    ]
    print(f"{len(quiet)} of those without delays, too")
    wrong = [f"{row['form']} {row['dim']}" for row in sound if row["seen"]]
    print(
        f"with nothing taken out {len(sound) - len(wrong)} of {len(sound)} as they should; not:",
        *wrong,
    )
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    main()
