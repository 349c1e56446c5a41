"""From a preset, path or hub id to a loaded pipeline or language model; every failure is one
sentence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sagepatch.cli.presets import PRESETS, Preset
from sagepatch.errors import InvalidArgument, MachineError, ModelError

Offload = Literal["none", "model", "sequential"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: a diffusers pipeline, or a language model with its tokenizer."""

    name: str
    model: Any
    preset: Preset | None
    tokenizer: Any = None

    @property
    def is_text(self) -> bool:
        return self.tokenizer is not None


def repository(name: str) -> str:
    """The path or hub id that a preset, a path or a hub id stands for."""
    preset = PRESETS.get(name)
    if preset is not None:
        return preset.repo
    if Path(name).exists() or name.count("/") == 1:
        return name
    known = ", ".join(["demo", *PRESETS])
    raise ModelError(
        f"no model named {name!r}: give a preset ({known}), "
        "the path of a model or a hub id owner/name"
    )


def pick_device(device: str) -> str:
    """The device to run on; "auto" takes a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError(f"--device {device}, but torch sees no GPU here (see `sagepatch info`)")
    return device


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype to load in; "auto" is bf16 on a GPU and fp32 on a CPU."""
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise InvalidArgument(f"--dtype is {dtype!r}, needs auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load(name: str, *, device: str, dtype: torch.dtype, offload: Offload = "none") -> Loaded:
    """Load a model by preset, path or hub id; "demo" is the bundled one and needs no network."""
    preset = PRESETS.get(name)
    if name == "demo":
        from sagepatch.demo import load_pipeline

        return Loaded(name, load_pipeline(dtype=dtype, device=device), None)
    source = repository(name)
    if preset is not None and preset.medium == "text":
        return _load_text(name, source, preset, device, dtype)
    if Path(source).is_dir() and not (Path(source) / "model_index.json").exists():
        return _load_text(name, source, preset, device, dtype)
    return Loaded(name, _load_pipeline(source, preset, device, dtype, offload), preset)


def skeleton(name: str) -> Any:
    """The pipeline or model of `name` without weights, from its configs alone."""
    from accelerate import init_empty_weights

    if name == "demo":
        from sagepatch.demo.loader import FOLDER

        source = str(FOLDER)
    else:
        source = repository(name)
    index = _read_json(source, "model_index.json")
    if index is None:
        return _text_skeleton(source)
    import diffusers

    components: dict[str, Any] = {}
    for part, declared in index.items():
        if not (isinstance(declared, list) and declared[:1] == ["diffusers"]):
            continue
        cls = getattr(diffusers, str(declared[1]), None)
        if cls is None or not issubclass(cls, torch.nn.Module):
            continue
        config = _read_json(source, f"{part}/config.json")
        if config is not None:
            with init_empty_weights():
                components[part] = cls.from_config(config)
    return _Skeleton(str(index.get("_class_name", source)), components)


def _Skeleton(label: str, components: dict[str, Any]) -> Any:
    """An object that looks like a pipeline of that class name to `parts_of`."""
    return type(label, (), {"components": components})()


def _text_skeleton(source: str) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel

    with _one_sentence(source, None):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with init_empty_weights():
            return AutoModel.from_config(config)


def _load_pipeline(
    source: str, preset: Preset | None, device: str, dtype: torch.dtype, offload: Offload
) -> Any:
    from diffusers import DiffusionPipeline

    with _one_sentence(source, preset):
        pipe = DiffusionPipeline.from_pretrained(source, torch_dtype=dtype, use_safetensors=True)
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)
    return pipe


def _load_text(
    name: str, source: str, preset: Preset | None, device: str, dtype: torch.dtype
) -> Loaded:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _one_sentence(source, preset):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    return Loaded(name, model.to(device).eval(), preset, tokenizer)


def _read_json(source: str, path: str) -> Any:
    """A JSON file of a model folder or hub repository; None where the model has no such file."""
    if Path(source).is_dir():
        local = Path(source) / path
        return json.loads(local.read_text(encoding="utf-8")) if local.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _one_sentence(source, None):
        try:
            return json.loads(Path(hf_hub_download(source, path)).read_text(encoding="utf-8"))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None


class _one_sentence:
    """Turns what the hub and the loaders raise into a `ModelError` with what to do next."""

    def __init__(self, source: str, preset: Preset | None) -> None:
        self.source = source
        self.preset = preset

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, OSError | ValueError | ImportError):
            return
        if self.preset is not None and self.preset.gated is not None:
            advice = self.preset.gated
        elif Path(self.source).exists():
            advice = "check that the folder holds a whole model with safetensors weights"
        else:
            advice = "check the name, the network (or HF_HUB_OFFLINE and HF_HOME) and your access"
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else kind.__name__
        raise ModelError(f"cannot load {self.source}: {first} ({advice})") from error
