"""Walks all of diffusers: every class and function whose code attends, and every exported model,
built on the meta device, with what a patch reaches in it.

python tests/coverage/diffusers_walk.py    writes diffusers_walk.csv
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from diffusers_families import FAMILIES
from torch import nn

from sagepatch.patchers.code import names_in
from sagepatch.patchers.model import Parts, search

TABLE = Path(__file__).with_name("diffusers_walk.csv")

PACKAGES = ("models", "pipelines", "modular_pipelines", "hooks")
# Whoever names one of these computes attention, or something that looks like it.
SIGNS = frozenset(
    {
        "MultiheadAttention",
        "baddbmm",
        "dispatch_attention_fn",
        "flex_attention",
        "get_attention_scores",
        "memory_efficient_attention",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
        "softmax",
    }
)
# How many layers a model has changes nothing here.
_DEPTH = re.compile(r"n_?layers|(n|num)_(.*_)?(layers|blocks)|(.*_)?depth")
# What exported classes need that have no complete set of defaults, and cheaper geometry of others.
OPTIONS: dict[str, dict[str, Any]] = {
    "AudioLDM2ProjectionModel": {
        "text_encoder_dim": 8,
        "text_encoder_1_dim": 8,
        "langauge_model_dim": 8,
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 16,
    },
    "DreamLiteTransformer2DModel": {"in_channels": 32},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2, "transformer_num_layers": 4},
    "LuminaNextDiT2DModel": {"num_kv_heads": 8},
    "OmniGenTransformer2DModel": {
        "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}
    },
    "RFD4ProteinaAutoencoder": {
        "atom37_mask": [[True] * 37],
        "allowed_residue_types": [[True]],
    },
    "SanaWMTransformer3DModel": {"num_layers": 4},
    "StableAudioProjectionModel": {
        "text_encoder_dim": 8,
        "conditioning_dim": 8,
        "min_value": 0,
        "max_value": 1,
    },
    "Transformer2DModel": {"in_channels": 32, "cross_attention_dim": 16},
    "TransformerTemporalModel": {"in_channels": 32},
    "UniDiffuserTextDecoder": {
        "prefix_length": 7,
        "prefix_inner_dim": 8,
        "prefix_hidden_dim": 8,
        "n_layer": 2,
    },
    "ZImageControlNetModel": {
        "control_layers_places": [0],
        "control_refiner_layers_places": [0],
        "control_in_dim": 16,
    },
}
# Models made of other models alone.
WRAPPERS = frozenset(
    {
        "FluxMultiControlNetModel",
        "HunyuanDiT2DMultiControlNetModel",
        "MultiAdapter",
        "MultiControlNetModel",
        "QwenImageMultiControlNetModel",
        "SD3MultiControlNetModel",
    }
)
# Classes whose own code shows signs of attention and whose instances no patch takes, with why.
UNREACHED = {
    "AttentionPooling": "computes its softmax by hand: one query",
    "HunyuanDiTAttentionPool": "calls torch's multi_head_attention_forward: one query",
    "IPAdapterTimeImageProjectionBlock": "computes its softmax by hand: a few image tokens, once",
    "LDMBertAttention": "computes its softmax by hand: a text encoder",
    "LTX2AudioAttnBlock": "computes its softmax by hand: off by default",
    "PerceiverAttention": "computes its softmax by hand: 32 queries",
    "PerceiverCrossAttention": "computes its softmax by hand: face embeddings",
    "ResidualAttentionBlock": "torch.nn.MultiheadAttention keeps its own fused path",
    "SelfAttention1d": "computes its softmax by hand",
}
# Signs of attention in classes that attend to nothing.
NO_ATTENTION = {
    "MiniMaxMusic3ConditionEncoder": "weighs the layers of a text encoder",
    "MoEGate": "picks experts",
    "NucleusMoELayer": "picks experts",
    "UniDiffuserTextDecoder": "picks tokens",
}
# Processors that are reached in part: other calls of theirs always ask for the flex backend.
IN_PART = {
    "QwenImage21FlexAttnProcessor": "the first step of a kept prefix",
    "WanAnimate2AttnProcessor": "later steps over a kept reference",
}
# Functions outside of classes, by who calls them.
FUNCTIONS = {
    "models.transformers.transformer_flux2._flux2_kv_causal_attention": "its processors, which are "
    "reached",
    "models.transformers.transformer_kandinsky.nablaT_v2": "builds a block mask",
    "models.transformers.transformer_kandinsky6_sr.nabla_block_mask": "builds a block mask",
    "modular_pipelines.minimax_music3.encoders._sample_top_k": "picks tokens",
}


@dataclass(frozen=True, slots=True)
class Walked:
    """One exported model class: its attention layers that a patch reaches and those it leaves.

    `missed` are classes of modules whose own code attends and that were neither reached nor left.
    """

    name: str
    reached: int
    left: int
    reasons: tuple[str, ...]
    missed: tuple[str, ...]

    def row(self) -> dict[str, str]:
        """One line of the table."""
        return {
            "model": self.name,
            "reached": str(self.reached),
            "left": str(self.left),
            "reasons": "; ".join(self.reasons),
            "missed": " ".join(self.missed),
        }


def kept_table() -> dict[str, dict[str, str]]:
    """The lines of the table beside this file, by model."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


@functools.cache
def everything() -> tuple[type, ...]:
    """Every class that a module of diffusers defines, all its modules imported."""
    for package in PACKAGES:
        root = importlib.import_module(f"diffusers.{package}")
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            # Some want packages that nobody needs for a model: cv2, PyAV, note-seq.
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    return tuple(value for _, value in _defined() if isinstance(value, type))


def hands_to_processor(owner: type) -> bool:
    """Whether a class's signs of attention are in what it keeps for its processor to call."""
    return issubclass(owner, Attention | AttentionModuleMixin)


def attending_functions() -> dict[str, frozenset[str]]:
    """Functions outside of classes whose code attends, and the signs of it; not the dispatcher's
    own, which are what processors reach.
    """
    everything()
    found = {}
    for where, value in _defined():
        if isinstance(value, types.FunctionType):
            signs = _signs(value)
            if signs and where != "diffusers.models.attention_dispatch":
                found[f"{where.removeprefix('diffusers.')}.{value.__name__}"] = signs
    return found


@functools.cache
def attends(owner: type) -> frozenset[str]:
    """Signs of attention in the methods that a class defines itself."""
    functions = (
        inspect.unwrap(value) for value in vars(owner).values() if inspect.isfunction(value)
    )
    return frozenset(sign for function in functions for sign in _signs(function))


def exported() -> tuple[str, ...]:
    """Names of all model classes that diffusers exports."""
    values = ((name, getattr(diffusers, name, None)) for name in dir(diffusers))
    return tuple(
        name
        for name, value in values
        if isinstance(value, type) and issubclass(value, ModelMixin) and value is not ModelMixin
    )


@functools.cache
def walked(name: str) -> Walked:
    """Build an exported model class on the meta device and look for attention in it."""
    with torch.device("meta"):
        model = _built(getattr(diffusers, name))
    found = search(Parts(name, {"": model}))
    known = {layer.name for layer in (*found.sites, *found.left)}
    missed = {
        type(module).__name__
        for path, module in model.named_modules()
        if attends(type(module)) and path.removesuffix(".processor") not in known
    }
    reasons = dict.fromkeys(layer.reason for layer in found.left)
    return Walked(name, len(found.sites), len(found.left), tuple(reasons), tuple(sorted(missed)))


def _built(owner: type) -> nn.Module:
    tiny = {family.model: family.tiny for family in FAMILIES}
    options = tiny.get(owner.__name__, OPTIONS.get(owner.__name__, {}))
    signature = inspect.signature(owner.__init__)
    shallow = {
        key: 2
        for key, parameter in signature.parameters.items()
        if _DEPTH.fullmatch(key) and isinstance(parameter.default, int) and parameter.default > 2
    }
    made: nn.Module
    try:
        made = owner(**{**shallow, **options})
    except RuntimeError as error:
        if "expected device meta" not in str(error):
            raise
        # Once torch's decompositions are loaded, some tables of filters mix devices there.
        with torch.device("cpu"):
            made = owner(**{**shallow, **options})
    return made


def _defined() -> Iterator[tuple[str, Any]]:
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where.startswith(tuple(f"diffusers.{package}." for package in PACKAGES)):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == where:
                    yield where, value


def _signs(function: types.FunctionType) -> frozenset[str]:
    names = set(names_in(function.__code__))
    sdpa = F.scaled_dot_product_attention
    if any(function.__globals__.get(name) is sdpa for name in names):
        names.add("scaled_dot_product_attention")
    return frozenset(names & SIGNS)


if __name__ == "__main__":
    lines = [walked(name).row() for name in exported() if name not in WRAPPERS]
    with TABLE.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
