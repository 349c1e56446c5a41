"""Compiles kernels before they are wanted: every condition on calls of given sizes, in processes
of their own, while something else keeps the GPU busy. Triton and our checks keep their results on
disk.

    python -m benchmarks.quality.ahead NUMBER OF SIZES...

is how the processes are started; a size is B,Hq,Hkv,S,D,causal.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from benchmarks.quality.conditions import FAILURES, baselines, recipes, variant_of
from sagepatch.backends import load
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.backends.selfcheck import failure
from sagepatch.spec import Call

PROCESSES = 12


@dataclass(frozen=True, slots=True)
class Geometry:
    """A call by its sizes; `causal` is 0 or 1."""

    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: int

    def call(self, device: torch.device) -> Call:
        """Random tensors of these sizes in bfloat16."""

        def drawn(heads: int) -> torch.Tensor:
            shape = (self.batch, heads, self.length, self.head_dim)
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        k, v = drawn(self.kv_heads), drawn(self.kv_heads)
        scale = self.head_dim**-0.5
        return Call(drawn(self.q_heads), k, v, scale, causal_offset=0 if self.causal else None)


def start(sizes: Sequence[Geometry]) -> list[subprocess.Popen[bytes]]:
    """Processes that compile everything for these sizes."""
    words = [",".join(map(str, astuple(size))) for size in sizes]
    command = [sys.executable, "-m", "benchmarks.quality.ahead"]
    return [
        subprocess.Popen([*command, str(number), str(PROCESSES), *words])
        for number in range(PROCESSES)
    ]


def main() -> None:
    """Run a share of the conditions once on every size."""
    number, of, *words = sys.argv[1:]
    sizes = [Geometry(*map(int, word.split(","))) for word in words]
    device = torch.device("cuda")
    started = time.perf_counter()
    # A calibration also tries these, though others of their recipes serve first.
    everything = [BY_NAME["triton.sage2_8"], BY_NAME["triton.sage1_b"]]
    everything += [variant_of(found, device) for found in (*recipes(device), *baselines())]
    for variant in everything[int(number) :: int(of)]:
        try:
            if variant.name in BY_NAME and (why := failure(variant)) is not None:
                print(f"ahead: {variant.name}: {why}", flush=True)
                continue
            for size in sizes:
                load(variant.entry)(size.call(device), variant.recipe)
            torch.cuda.synchronize()
        except FAILURES as error:
            print(f"ahead: {variant.name}: {error}", flush=True)
    print(f"ahead {number}: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
