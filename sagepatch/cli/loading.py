"""Loads a source whole: a diffusers pipeline, or a causal language model with its tokenizer."""

from __future__ import annotations

import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from sagepatch.backends.catalogue import SDPA
from sagepatch.cli.console import quiet_libraries
from sagepatch.cli.failures import gated_sentence, loading
from sagepatch.cli.sources import Source
from sagepatch.errors import InvalidArgument, MachineError, ModelError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OFFLOADS = ("none", "model", "sequential")
Library = Literal["pipeline", "diffusers", "transformers"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model runs; `offload` moves parts to the GPU only while they are needed."""

    device: torch.device
    dtype: torch.dtype
    offload: str = "none"

    @classmethod
    def of(cls, device: str, dtype: str, offload: str) -> Placement:
        """Check the options as given: "auto" takes a GPU where there is one, and bf16 on it."""
        if offload not in OFFLOADS:
            raise InvalidArgument(f"--offload is {offload!r}, needs {', '.join(OFFLOADS)}")
        where = _device(device)
        if dtype != "auto" and dtype not in DTYPES:
            raise InvalidArgument(f"--dtype is {dtype!r}, needs auto, {', '.join(DTYPES)}")
        if offload != "none" and where.type == "cpu":
            raise InvalidArgument(f"--offload {offload} needs a GPU: leave it out on the CPU")
        chosen = DTYPES.get(dtype) or (torch.float32 if where.type == "cpu" else torch.bfloat16)
        return cls(where, chosen, offload)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model and the tokenizer that goes with it."""

    model: Any
    tokenizer: Any


def load(source: Source, where: Placement) -> Any:
    """The pipeline or `LanguageModel`, placed; safetensors only, no code from the hub."""
    quiet_libraries()
    if source.is_demo:
        from sagepatch import demo

        with loading(source):
            pipeline = demo.load_pipeline(where.dtype, where.device)
            pipeline.set_progress_bar_config(disable=True)
            return pipeline
    check_access(source)
    library = library_of(source)
    if library == "diffusers":
        raise ModelError(
            f"{source.asked} is one part of a pipeline: give the whole pipeline's folder or id"
        )
    with loading(source):
        return _pipeline(source, where) if library == "pipeline" else _language_model(source, where)


def library_of(source: Source) -> Library:
    """Which loader the model wants, by the one config file at its top."""
    if config_file(source, "model_index.json") is not None:
        return "pipeline"
    top = config_file(source, "config.json")
    if top is None:
        raise ModelError(
            f"{source.asked} holds neither model_index.json nor config.json: "
            "not a diffusers pipeline, not a transformers model"
        )
    return "diffusers" if "_class_name" in read_json(source, top) else "transformers"


def config_file(source: Source, name: str) -> Path | None:
    """The local path of a small file of the model, fetched where needed; None if it has none."""
    if source.is_local:
        path = Path(source.location, name)
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    folder, _, file = name.rpartition("/")
    with loading(source):
        try:
            return Path(
                hf_hub_download(
                    source.location,
                    file,
                    subfolder=folder or None,
                    local_files_only=_hub_has_no_address(),
                )
            )
        except RemoteEntryNotFoundError:
            return None


@cache
def _hub_has_no_address() -> bool:
    """Whether the hub's name does not resolve here, as without a network: its client would try
    again and again, for most of a minute. Where a proxy resolves names, or offline mode is on, that
    is for the client to find.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


def read_json(source: Source, path: Path) -> dict[str, Any]:
    """A config file's object; raises `ModelError` for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{source.asked}: {path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{source.asked}: {path.name} holds {type(found).__name__}, not an object")
    return found


def check_access(source: Source) -> None:
    """Say at once how to get access to a gated preset that nobody has logged in for."""
    preset = source.preset
    if preset is None or not preset.gated or source.is_local:
        return
    from huggingface_hub import get_token, try_to_load_from_cache

    names = ("model_index.json", "config.json")
    cached = any(isinstance(try_to_load_from_cache(source.location, n), str) for n in names)
    if not cached and get_token() is None:
        raise ModelError(gated_sentence(source.location))


def _pipeline(source: Source, where: Placement) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(
        source.location, dtype=where.dtype, use_safetensors=True
    )
    pipeline.set_progress_bar_config(disable=True)
    movers: dict[str, Callable[[], object]] = {
        "none": lambda: pipeline.to(where.device),
        "model": lambda: pipeline.enable_model_cpu_offload(device=where.device),
        "sequential": lambda: pipeline.enable_sequential_cpu_offload(device=where.device),
    }
    movers[where.offload]()
    return pipeline


def _language_model(source: Source, where: Placement) -> LanguageModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if source.task == "features":
        raise ModelError(
            f"{source.asked} writes no text and draws no pictures: "
            "see `sagepatch inspect`, and examples/ for its use from Python"
        )
    if where.offload != "none":
        raise InvalidArgument(f"--offload {where.offload} is for pipelines, not language models")
    tokenizer = AutoTokenizer.from_pretrained(source.location)
    model = AutoModelForCausalLM.from_pretrained(
        source.location, dtype=where.dtype, use_safetensors=True
    )
    return LanguageModel(model.to(where.device).eval(), tokenizer)


def _device(text: str) -> torch.device:
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InvalidArgument(f"--device is {text!r}, needs cpu, cuda or cuda:N") from error
    if device.type not in SDPA.devices:  # "meta" holds no numbers
        raise InvalidArgument(f"--device is {text!r}, needs cpu, cuda or cuda:N")
    own = getattr(torch, device.type, None)
    if device.type in ("mps", "xpu") and not (own is not None and own.is_available()):
        raise MachineError(f"--device is {text}, which torch does not have here: use --device cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise MachineError(
                f"--device is {text}, and torch sees {count or 'no'} GPU here: "
                "see `sagepatch info`, or use --device cpu"
            )
    return device
