"""What rotary embeddings cost beside an attention call on this GPU, as the models compute them:
diffusers' FLUX and transformers' Llama, eager and under torch.compile; writes a CSV.

    python benchmarks/rotary_cost.py benchmarks/h200_rotary.csv --commit abc1234

An attention that rotates Q and K while it reads them can save no more than `norm and rotary` minus
`norm` (FLUX normalises Q and K first, and a compiler does both in one kernel), or `rotary` where no
norm stands before it.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.h200_attention import sdpa, shell
from sagepatch.backends.cuda import attention
from sagepatch.backends.cuda.prepass import plan_of
from sagepatch.backends.cuda.prepass_form import form_of
from sagepatch.backends.cuda.raw_operands import raw_strides, raw_value_strides
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

COLUMNS = (
    *("model", "what", "mode", "ms_median", "ms_p20", "ms_p80"),
    *("gpu", "driver", "torch", "commit", "command"),
)
EAGER, COMPILED = "eager", "torch.compile"
Pair = tuple[Tensor, Tensor]


def flux() -> tuple[dict[str, Callable[[Tensor, Tensor], Pair]], Pair, Call]:
    """Steps on Q and K [1, 4608, 24, 128] as diffusers' FLUX has them, and the call behind."""
    from diffusers.models.embeddings import apply_rotary_emb

    tokens, heads, dim = 4608, 24, 128
    q, k, v = (random((1, tokens, heads, dim)) for _ in range(3))
    angles = torch.rand(tokens, dim // 2, device="cuda").repeat_interleave(2, 1)
    table = (angles.cos(), angles.sin())
    norms = [torch.nn.RMSNorm(dim, eps=1e-6, device="cuda", dtype=torch.bfloat16) for _ in "qk"]

    def norm(q: Tensor, k: Tensor) -> Pair:
        return norms[0](q), norms[1](k)

    def rotary(q: Tensor, k: Tensor) -> Pair:
        return tuple(apply_rotary_emb(x, table, sequence_dim=1) for x in (q, k))  # type: ignore[return-value]

    def both(q: Tensor, k: Tensor) -> Pair:
        return rotary(*norm(q, k))

    call = Call(*(x.transpose(1, 2) for x in (q, k, v)), dim**-0.5, bshd_out=True)
    return {"norm": norm, "rotary": rotary, "norm and rotary": both}, (q, k), call


def llama() -> tuple[dict[str, Callable[[Tensor, Tensor], Pair]], Pair, Call]:
    """As `flux`: Q [1, 32, 8192, 128] and K [1, 8, 8192, 128] of transformers' Llama, views of what
    the projections leave; `norm` is nothing there.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    tokens, dim = 8192, 128
    q, k, v = (random((1, tokens, heads, dim)).transpose(1, 2) for heads in (32, 8, 8))
    angles = torch.rand(1, tokens, dim // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotary(q: Tensor, k: Tensor) -> Pair:
        return apply_rotary_pos_emb(q, k, cos, sin)

    return {"rotary": rotary}, (q, k), Call(q, k, v, dim**-0.5, causal_offset=0, bshd_out=True)


def random(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def attention_parts(call: Call) -> dict[str, Callable[[], object]]:
    """Our whole calls and pre-passes, and torch's attention."""
    found: dict[str, Callable[[], object]] = {
        "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, repeated(call))
    }
    for name in ("sage2pp_8_d4", "sage2_8_bf16"):
        recipe = RECIPES[name]
        raw_q = raw_strides(call, recipe) is not None
        raw_v = raw_value_strides(call, recipe) is not None
        plan = plan_of(form_of(call, recipe, raw_q=raw_q, raw_v=raw_v))
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda")
        found[f"cuda.{name}"] = partial(attention.run, call, recipe)
        found[f"cuda.{name}, pre-pass"] = partial(launch_plan, plan, call, scratch)
    return found


def launch_plan(plan: object, call: Call, scratch: Tensor) -> None:
    plan.launch(call, scratch.data_ptr())  # type: ignore[attr-defined]


def repeated(call: Call) -> Call:
    """With as many key heads as query heads, which cuDNN is given by torch."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (call.k, call.v))
    return Call(call.q, k, v, call.scale, causal_offset=call.causal_offset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ms", type=int, default=30)
    parser.add_argument("--commit", default=shell("git", "rev-parse", "--short", "HEAD"))
    args = parser.parse_args()
    start = time.monotonic()
    facts = (
        torch.cuda.get_device_name(),
        shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        torch.__version__,
        args.commit,
        "python " + " ".join(sys.argv),
    )
    runs: dict[tuple[str, str, str], Callable[[], object]] = {}
    for model, made in (("flux_1024", flux()), ("llama_8k", llama())):
        steps, (q, k), call = made
        for what, step in steps.items():
            compiled = torch.compile(step)
            near = [a.float().sub(b.float()).abs().max() for a, b in zip(step(q, k), compiled(q, k), strict=True)]  # fmt: skip  # noqa: E501
            assert max(x.item() for x in near) < 0.1, (model, what)
            runs[model, what, EAGER] = partial(step, q, k)
            runs[model, what, COMPILED] = partial(compiled, q, k)
        for what, run in attention_parts(call).items():
            run()
            runs[model, what, EAGER] = run
    print(f"{time.monotonic() - start:.1f} s to compile", flush=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for key, run in runs.items():
            taken = triton.testing.do_bench(run, warmup=5, rep=args.ms, return_mode="all")
            spread = torch.quantile(torch.tensor(taken), torch.tensor([0.5, 0.2, 0.8])).tolist()
            writer.writerow((*key, *(f"{ms:.4f}" for ms in spread), *facts))
            print(*key, f"{spread[0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
