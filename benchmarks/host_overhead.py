"""Times what the host spends on one call of the Triton backend, launches apart from the rest.

    python benchmarks/host_overhead.py

A call so small that the GPU waits for the host; nothing is synchronised between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import sagepatch
from sagepatch.backends.triton import attention, prepass
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

CALLS = 300


def microseconds(run: Callable[[], object]) -> float:
    """Host time of one call, the best of five rounds: without what else the machine did."""
    for _ in range(20):
        run()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
    return best / CALLS * 1e6


def main() -> None:
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    recipe = RECIPES["sage2_8"]
    call = Call(q, k, v, 0.125)
    whole = microseconds(lambda: sagepatch.attention(q, k, v, variant="triton.sage2_8"))
    backend = microseconds(lambda: attention.run(call, recipe))
    launches = []
    recorded: list[tuple[object, tuple[object, ...], dict[str, object]]] = []
    # A remembered call bypasses the kernels' own launchers: forget it first.
    attention._REPLAYS.clear()
    kernels = ((prepass, "stats"), (prepass, "quantise"), (attention, "attention"))
    for module, name in kernels:
        kernel = getattr(module, name)
        original = kernel.run

        def record(*args: object, _of: object = original, **kwargs: object) -> object:
            recorded.append((_of, args, kwargs))
            return _of(*args, **kwargs)  # type: ignore[operator]

        kernel.run = record
        attention.run(call, recipe)
        kernel.run = original
    for original, args, kwargs in recorded:
        launches.append(microseconds(lambda o=original, a=args, k=kwargs: o(*a, **k)))
    print(f"sagepatch.attention {whole:.1f} us, attention.run {backend:.1f} us")
    print("launches", [f"{us:.1f}" for us in launches], f"sum {sum(launches):.1f} us")
    print(
        f"beyond the launches {whole - sum(launches):.1f} us, "
        f"backend alone {backend - sum(launches):.1f} us"
    )


if __name__ == "__main__":
    main()
