"""Times every attention of this project against torch's and SageAttention 1.0.6 on this GPU, whole
call, bf16 in and out, in one run, and writes benchmarks/h200_attention.csv.

    python benchmarks/h200_attention.py --out benchmarks/h200_attention.csv [--rounds 3]
    [--shape NAME ...]

Peers of one shape run interleaved, in random order, `--rounds` times; a time is the median of all
rounds. A variant is timed only after its result agreed with exact attention; where one did not, the
script ends with 1. SageAttention is used where it is installed. Toolchain "cuda" joins by itself
once its records are in the catalogue.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagepatch
from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.backends.triton import prepass
from sagepatch.numerics.attention import exact
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call

COLUMNS = [
    "shape",
    "variant",
    "b",
    "hq",
    "hkv",
    "sq",
    "skv",
    "d",
    "causal",
    "mask",
    "dtype",
    "ms_median",
    "ms_p20",
    "ms_p80",
    "tflops",
    "prepass_ms",
    "cos",
    "rel_l1",
    "gpu",
    "driver",
    "cuda",
    "torch",
    "triton",
    "sagepatch",
    "commit",
    "command",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """One self-attention shape, [B, H, S, D]."""

    name: str
    batch: int
    heads: int
    length: int
    dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.dim
        return whole / 2 if self.causal else whole


SHAPES = (
    Shape("flux_1024", 1, 24, 4608, 128),
    Shape("d128_4k", 4, 32, 4096, 128),
    Shape("d64_8k_causal", 2, 32, 8192, 64, True),
    Shape("d128_1k", 8, 32, 1024, 128),
    Shape("d128_16k", 1, 32, 16384, 128),
    Shape("d64_16k", 1, 32, 16384, 64),
    Shape("llama_8k_causal", 4, 32, 8192, 128, True),
    Shape("cogvideox_2b", 2, 30, 17776, 64),
    Shape("hunyuan_33k", 1, 24, 32768, 128),
)
QUICK = (
    *("sage2_8b_k128", "sage2_8", "sage2_8b", "sage2pp_8", "sage2pp_8_d4", "sage2pp_8_d6"),
    *("sage2_8_bf16", "sage1_b", "sage1_b_f32", "sage1_t", "sage1_vb"),
)
ROWS_CHECKED = 256


def sdpa(backend: SDPBackend, call: Call) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, is_causal=call.causal_offset is not None
        )


def peers(call: Call, recipes: tuple[str, ...]) -> dict[str, Callable[[], Tensor]]:
    """Every attention that can serve `call` here, by the name of its CSV row."""
    found: dict[str, Callable[[], Tensor]] = {
        "sdpa_flash2": partial(sdpa, SDPBackend.FLASH_ATTENTION, call),
        "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, call),
    }
    if find_spec("sageattention"):
        from sageattention import sageattn

        half = [t.half() for t in (call.q, call.k, call.v)]
        causal = call.causal_offset is not None
        found["sageattention_1_0_6"] = lambda: sageattn(*half, is_causal=causal)
    if find_spec("cudnn"):
        try:
            found["cudnn_fp8"] = CudnnFp8(call)
        except Exception as error:  # noqa: BLE001  whatever cuDNN has against this shape
            print(f"cudnn_fp8: left out, {type(error).__name__}: {str(error)[:200]}", flush=True)
    spec = call.spec()
    for variant in CATALOGUE:
        wanted = not recipes or variant.recipe.name in recipes
        if variant.toolchain in ("triton", "cuda", "cuda_mma") and wanted:
            if variant.rejects(spec) or unusable(variant):
                continue
            kernel = load(variant.entry)
            found[variant.name] = lambda k=kernel, r=variant.recipe: k(call, r)[0]
    return found


class CudnnFp8:
    """cuDNN FP8 attention, E4M3 in and out: the cast of the inputs is timed beside it."""

    def __init__(self, call: Call) -> None:
        import cudnn

        self.call = call
        self.quantise()
        q, k, v = self.codes
        kind = cudnn.data_type
        handle = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph = cudnn.pygraph(
            io_data_type=kind.FP8_E4M3,
            intermediate_data_type=kind.FLOAT,
            compute_data_type=kind.FLOAT,
            handle=handle,
        )

        def given(t: Tensor, data_type: Any) -> Any:
            return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=data_type)

        one = torch.ones(1, 1, 1, 1, device="cuda")
        inputs = {name: given(t, kind.FP8_E4M3) for name, t in zip("qkv", (q, k, v), strict=True)}
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = {name: given(one, kind.FLOAT) for name in names}
        out, _, amax_s, amax_o = graph.sdpa_fp8(
            **inputs,
            **scales,
            is_inference=True,
            attn_scale=call.scale,
            use_causal_mask=call.causal_offset is not None,
        )
        self.out = torch.empty_like(q)
        peaks = torch.zeros(2, 1, 1, 1, 1, device="cuda")
        out.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
        out.set_data_type(kind.FP8_E4M3)
        for amax in (amax_s, amax_o):
            amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
            amax.set_data_type(kind.FLOAT)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        given_scales = {
            "descale_q": self.descale[0],
            "descale_k": self.descale[1],
            "descale_v": self.descale[2],
            "descale_s": one / 448,
            "scale_s": one * 448,
            "scale_o": one * 448,
        }
        self.given = {scales[name]: value.view(1, 1, 1, 1) for name, value in given_scales.items()}
        self.given |= dict(zip(inputs.values(), (q, k, v), strict=True))
        self.given |= {out: self.out, amax_s: peaks[0], amax_o: peaks[1]}
        self.workspace = torch.empty(
            max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda"
        )
        self.graph, self.handle = graph, handle

    def quantise(self) -> None:
        """One scale a tensor."""
        self.codes, self.descale = [], []
        for t in (self.call.q, self.call.k, self.call.v):
            amax = t.abs().amax().float()
            self.codes.append((t * (448 / amax)).to(torch.float8_e4m3fn))
            self.descale.append(amax / 448)

    def __call__(self) -> Tensor:
        self.graph.execute(self.given, self.workspace, handle=self.handle)
        return self.out

    def result(self) -> Tensor:
        """The output in its own units: scale_o is 448."""
        return self().float() / 448


def make(shape: Shape) -> Call:
    gen = torch.Generator("cuda").manual_seed(0)
    size = (shape.batch, shape.heads, shape.length, shape.dim)
    q, k, v = (
        torch.randn(size, generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    return Call(q, k, v, shape.dim**-0.5, causal_offset=0 if shape.causal else None)


def errors(call: Call, outs: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Cosine and relative L1 of two heads against FP32, on the last rows."""
    start = call.q.shape[2] - ROWS_CHECKED
    offset = None if call.causal_offset is None else start
    part = Call(
        call.q[:1, :2, start:], call.k[:1, :2], call.v[:1, :2], call.scale, causal_offset=offset
    )
    reference, _ = exact(part)
    found = {}
    for name, out in outs.items():
        worst = compare(out[:1, :2, start:].float(), reference).worst
        found[name] = (worst.cosine, worst.rel_l1)
    return found


def prepass_ms(call: Call, name: str, run: Callable[[], Tensor]) -> float | None:
    """Time of what comes before the attention kernel, alone: a pre-pass, or a peer's cast."""
    bench = triton.testing.do_bench_cudagraph
    if isinstance(run, CudnnFp8):
        return float(bench(run.quantise, 20))
    variant = next((v for v in CATALOGUE if v.name == name), None)
    if variant is None or variant.toolchain not in ("triton", "cuda"):
        return None
    if variant.toolchain == "triton":
        return float(bench(lambda: prepass.prepare(call, variant.recipe, None), 20))
    from sagepatch.backends.cuda import prepass as cuda_prepass
    from sagepatch.backends.cuda.raw_operands import raw_strides, raw_value_strides

    raw_q = raw_strides(call, variant.recipe) is not None
    raw_v = raw_value_strides(call, variant.recipe) is not None
    form = cuda_prepass.form_of(call, variant.recipe, raw_q=raw_q, raw_v=raw_v)
    plan = cuda_prepass.plan_of(form)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda")
    return float(bench(lambda: plan.launch(call, scratch.data_ptr()), 20))


def shell(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def measure(
    shape: Shape, recipes: tuple[str, ...], rounds: int, only: list[str]
) -> tuple[list[dict[str, Any]], int]:
    """The rows of one shape, and how many variants were wrong and so not timed."""
    call = make(shape)
    runs = peers(call, recipes)
    runs = {name: run for name, run in runs.items() if any(word in name for word in only)}
    outs = {
        name: run.result() if isinstance(run, CudnnFp8) else run() for name, run in runs.items()
    }
    found = errors(call, outs)
    del outs
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for turn in range(rounds):
        random.Random(turn).shuffle(order)
        for name in order:
            if found[name][0] < 0.9:
                continue
            times[name] += triton.testing.do_bench(runs[name], warmup=8, rep=40, return_mode="all")
    rows = []
    for name in runs:
        cosine, rel_l1 = found[name]
        if not times[name]:
            print(f"{shape.name} {name}: wrong (cosine {cosine:.4f}), not timed", flush=True)
            continue
        ms = torch.tensor(times[name])
        p20, median, p80 = torch.quantile(ms, torch.tensor([0.2, 0.5, 0.8])).tolist()
        before = prepass_ms(call, name, runs[name])
        rows.append(
            {
                "shape": shape.name,
                "variant": name,
                "b": shape.batch,
                "hq": shape.heads,
                "hkv": shape.heads,
                "sq": shape.length,
                "skv": shape.length,
                "d": shape.dim,
                "causal": shape.causal,
                "mask": "none",
                "dtype": {"sageattention_1_0_6": "fp16", "cudnn_fp8": "e4m3"}.get(name, "bf16"),
                "ms_median": f"{median:.4f}",
                "ms_p20": f"{p20:.4f}",
                "ms_p80": f"{p80:.4f}",
                "tflops": f"{shape.flops / median / 1e9:.1f}",
                "prepass_ms": "" if before is None else f"{before:.4f}",
                "cos": f"{cosine:.6f}",
                "rel_l1": f"{rel_l1:.5f}",
            }
        )
        print(
            f"{shape.name:16s} {name:22s} {median:8.3f} ms {rows[-1]['tflops']:>7s} TFLOPS  "
            f"pre {rows[-1]['prepass_ms']:>7s}  cos {cosine:.5f} l1 {rel_l1:.4f}",
            flush=True,
        )
    return rows, len(runs) - len(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/h200_attention.csv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--all-recipes", action="store_true")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", nargs="+", choices=names, default=names, help="these alone")
    parser.add_argument("--only", default="", help="variants whose name holds one of these words")
    parser.add_argument("--commit", default=shell("git", "rev-parse", "--short", "HEAD"))
    args = parser.parse_args()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "driver": shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sagepatch": sagepatch.__version__,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
    }
    start = time.monotonic()
    wrong = 0
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for shape in (shape for shape in SHAPES if shape.name in args.shape):
            if time.monotonic() - start > args.seconds:
                print(f"{shape.name}: left out, {args.seconds:g} s are over", flush=True)
                continue
            recipes = () if args.all_recipes else QUICK
            rows, untimed = measure(shape, recipes, args.rounds, args.only.split(","))
            writer.writerows({**row, **facts} for row in rows)
            wrong += untimed
            file.flush()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
