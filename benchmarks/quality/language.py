"""A language model trained on the spot, and what each way to run its attention does to it.

    python -m benchmarks.quality.language [--train-seconds 140] [--measure-seconds 70]

On one H200 about four minutes: trains a Llama of 38 M parameters from random weights on Python
sources under open licences (`corpus`), with retrieval and copying tasks woven in, up to 32k tokens
a row; then perplexity at 1k to 32k on folders that were held out, by position, retrieval and
copying, for exact attention, every recipe's kernel, the calibrated plan and the baselines, all
through `sagepatch.apply`, on as many documents as the time allows, the most for what matters most.
Writes language_*.csv beside this file, or under --out, after each round of documents. `--tiny`
proves on a CPU that the script runs; its numbers mean nothing. `--keep FOLDER` leaves the model
there, and `--model FOLDER` measures one that is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.quality import ahead, tables
from benchmarks.quality.conditions import FAILURES, Condition
from benchmarks.quality.language_model import Trainer, train
from benchmarks.quality.language_rounds import (
    FULL_SCALE,
    TINY_SCALE,
    Scale,
    calibrated,
    measure,
    rehearsal,
    say,
    started,
)

# In the model's folder when it is whole.
TRAINED = "trained"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--train-seconds", type=float, default=140)
    parser.add_argument("--measure-seconds", type=float, default=70)
    parser.add_argument("--train-until", type=float, help="train no longer than until then")
    parser.add_argument("--until", type=float, help="begin no turn that would end after so long")
    parser.add_argument("--most-megabytes", type=float, default=120)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--command", help="what its rows say that made them")
    parser.add_argument("--deadline", type=float, help="as --until, in seconds of Unix time")
    return parser.parse_args()


def main() -> None:
    """Train in this process and measure in another, which makes its kernels ready meanwhile."""
    options = parsed()
    scale = TINY_SCALE if options.tiny else FULL_SCALE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ahead.share_cache()
    about = tables.provenance(tables.command_of("language", sys.argv[1:]), options.commit)
    if ahead.is_rehearsal():
        ahead.rehearse(rehearsal(scale, device))
        return
    if options.model is not None:
        measure_model(options, scale, device, about)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "model"
        (folder / TRAINED).unlink(missing_ok=True)
        corpus = start_corpus(options, folder, about)
        # The backward of cuDNN's attention has given NaN (torch 2.11, H200).
        torch.backends.cuda.enable_cudnn_sdp(False)
        trainer = Trainer(scale.size, device, not options.no_compile and device.type == "cuda")
        trainer.warm()
        say("compiled")
        measurer = start_measurer(options, folder, about)
        try:
            trained(options, trainer, corpus, folder, about)
        except BaseException:
            measurer.terminate()
            raise
        del trainer
        torch.cuda.empty_cache()
        raise SystemExit(measurer.wait())


def start_measurer(
    options: argparse.Namespace, folder: Path, about: dict[str, str]
) -> subprocess.Popen[bytes]:
    """This script again, for the model that will be in `folder`; its rows are those of this
    command.
    """
    words = ["--model", str(folder), "--out", str(options.out), "--commit", about["commit"]]
    words += ["--command", about["command"], "--measure-seconds", str(options.measure_seconds)]
    words += ["--tiny"] if options.tiny else []
    if options.until:
        ends = time.time() + options.until - (time.perf_counter() - started)
        words += ["--deadline", str(ends)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.quality.language", *words])


def measure_model(
    options: argparse.Namespace, scale: Scale, device: torch.device, about: dict[str, str]
) -> None:
    """Everything after the training: `rehearsal` once, so that every kernel is there, then the
    model, when it is there.
    """
    if options.command:
        about = {**about, "command": options.command}
    if device.type == "cuda":
        words = ["--tiny"] if options.tiny else []
        helpers = ahead.start("benchmarks.quality.language", words)
        say("compiled ahead:", [helper.wait() for helper in helpers])
        for _, run in rehearsal(scale, device):
            try:
                run()
            except FAILURES:
                traceback.print_exc()
        say("every kernel was run")
    while not (options.model / TRAINED).exists():
        time.sleep(0.1)
    model, held, text = loaded(options.model, device)
    say("model loaded")
    try:
        plan = calibrated(model, text, scale, device)
        plan.save(options.out / "language_plan.json")
        chosen = [Condition("calibrated plan", "plan", plan)]
    except FAILURES:
        traceback.print_exc()
        chosen = []
    measure(model, held, text, scale, device, chosen, options, about)


def start_corpus(
    options: argparse.Namespace, folder: Path, about: dict[str, str]
) -> subprocess.Popen[bytes]:
    """The corpus is made while the model compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.quality.corpus", "--out", str(folder)),
            *("--most-megabytes", str(options.most_megabytes), "--commit", about["commit"]),
        ]
    )


def trained(
    options: argparse.Namespace,
    trainer: Trainer,
    corpus: subprocess.Popen[bytes],
    folder: Path,
    about: dict[str, str],
) -> None:
    """Train, and leave the model beside its corpus."""
    device = trainer.device
    parameters = sum(weight.numel() for weight in trainer.weights)
    say(f"{parameters / 1e6:.1f} M parameters; waiting for the corpus")
    if corpus.wait():
        raise RuntimeError("the corpus could not be made")
    tokens = torch.from_numpy(np.load(folder / "tokens.npz")["train"].astype(np.int32)).to(device)
    say(f"training on {len(tokens) / 1e6:.1f} M tokens")
    rows = []
    seconds = options.train_seconds
    if options.train_until:
        seconds = min(seconds, options.train_until - (time.perf_counter() - started))
    for row in train(trainer, tokens, seconds):
        rows.append({**row, "parameters": parameters})
        say(row)
    tables.write(options.out / "language_training.csv", rows, about)
    sources = tables.read(folder / "sources.csv")
    tables.write(options.out / "language_sources.csv", sources, {})
    trainer.model.save_pretrained(folder)
    (folder / TRAINED).touch()


def loaded(
    folder: Path, device: torch.device
) -> tuple[Any, NDArray[np.uint16], NDArray[np.uint16]]:
    """The model as a user loads it, the tokens that were held out and those it was trained on."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokens = np.load(folder / "tokens.npz")
    return model.to(device).eval(), tokens["held"], tokens["train"]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
