"""Compiles the kernels that some cases of true_models.py will ask for, several at a time, into the
cache on disk: so that no measurement waits for a compiler.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from functools import partial

from true_models import Case, Shape

# What calibration tries on a Hopper GPU, and what the safe tier takes there. Tiles do not depend on
# lengths, so the longest calls are left to those kernels that a plan is likely to take.
KERNELS = (
    *("cuda.sage2_8", "cuda.sage2pp_8_d4", "cuda.sage1_b_f32", "cuda.sage1_b"),
    *("triton.sage2_8b_k128", "triton.sage2_8", "triton.sage1_b"),
)
LONGEST = 40_000


def jobs(cases: Iterable[Case]) -> list[tuple[str, tuple[Shape, ...]]]:
    """Kernels with the calls that share their machine code, the slowest compilers first."""
    kinds: dict[tuple[int, bool, bool, bool], list[Shape]] = {}
    for shape in dict.fromkeys(shape for case in cases for shape in case.shapes):
        kind = (shape.head_dim, shape.causal, shape.masked, shape.q_len == shape.kv_len)
        kinds.setdefault(kind, []).append(shape)
    found = []
    for name in sorted(KERNELS, reverse=True):
        for shapes in kinds.values():
            some = [s for s in shapes if name.startswith("cuda.") or s.q_len < LONGEST]
            found += [(name, tuple(some))] if some else []
    return found


def run(job: tuple[str, tuple[Shape, ...]], began: float) -> str:
    """Run one kernel, with its guard and the check of its known answer, on each call."""
    import torch

    from sagepatch.backends import unusable
    from sagepatch.dispatch import Request
    from sagepatch.layer import PatchedLayer, Policy
    from sagepatch.ops import run_layer
    from sagepatch.spec import Call

    name, shapes = job
    layer = PatchedLayer(name, "self", Policy(), Request(name), unusable)
    try:
        for shape in shapes:
            heads, keys = (shape.heads, shape.kv_heads or shape.heads)
            how = {"device": "cuda", "dtype": torch.bfloat16}
            q = torch.randn(shape.batch, shape.q_len, heads, shape.head_dim, **how).transpose(1, 2)
            k = torch.randn(shape.batch, shape.kv_len, keys, shape.head_dim, **how).transpose(1, 2)
            offset = 0 if shape.causal else None
            mask = torch.ones(1, 1, 1, shape.kv_len, dtype=torch.bool, device="cuda")
            call = Call(
                *(q, k, k, shape.head_dim**-0.5, mask if shape.masked else None),
                causal_offset=offset,
                bshd_out=True,
            )
            run_layer(layer, call)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        why = "; ".join(layer.record.fallbacks)
    except Exception as error:  # noqa: BLE001  the benchmark meets it again and says more
        why = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{name} {shapes[0]}: {time.time() - began:.1f} s, {why or 'checked'}"


def compile_all(cases: Iterable[Case], processes: int) -> list[str]:
    """Compile everything; a line a job."""
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(partial(run, began=began), jobs(cases), chunksize=1)
