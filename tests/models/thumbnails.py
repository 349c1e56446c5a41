"""Cases of benchmarks/h200_end_to_end.py at thumbnail size, to rehearse it on a CPU; the folder of
that file must be on the path.
"""

from __future__ import annotations

from typing import Any

import torch
from models import diffusers_models, transformers_models
from torch import nn
from true_models import Case, partly_fp32

Inputs = dict[str, Any]


def flux(full: bool) -> nn.Module:
    return diffusers_models.tiny_flux()[0]


def flux_inputs() -> Inputs:
    return _half(diffusers_models.tiny_flux(1, 1)[1])


def cogvideox(full: bool) -> nn.Module:
    return diffusers_models.tiny_cogvideox(3 if full else 2)[0]


def wan(full: bool) -> nn.Module:
    return partly_fp32(diffusers_models.tiny_wan()[0])


def sdxl(full: bool) -> nn.Module:
    return diffusers_models.tiny_sdxl_unet()[0]


def sdxl_inputs() -> Inputs:
    inputs = _half(diffusers_models.tiny_sdxl_unet()[1])
    return inputs | {"added_cond_kwargs": _half(inputs["added_cond_kwargs"])}


def llama(full: bool) -> nn.Module:
    return transformers_models.tiny_llama()[0]


def llama_inputs(tokens: int) -> Inputs:
    return {"input_ids": transformers_models.ids(1, tokens), "logits_to_keep": 1}


def _half(inputs: Inputs) -> Inputs:
    kept = ("timestep", "img_ids", "txt_ids")
    return {
        name: x.bfloat16() if name not in kept and isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }


def _cogvideox_inputs() -> Inputs:
    return _half(diffusers_models.tiny_cogvideox(1)[1])


def broken(full: bool) -> nn.Module:
    torch.empty(1).fill_(0)
    raise RuntimeError("cannot be built")


CASES = (
    Case(
        "flux",
        flux,
        flux_inputs,
        1,
        rounds=3,
        blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    ),
    Case("broken", broken, flux_inputs, 1),
    Case(
        "cogvideox",
        cogvideox,
        _cogvideox_inputs,
        1,
        kept="2",
        whole="3",
        blocks=("CogVideoXBlock",),
    ),
    Case(
        "wan",
        wan,
        lambda: _half(diffusers_models.tiny_wan(1)[1]),
        1,
        blocks=("WanTransformerBlock",),
    ),
    Case("sdxl", sdxl, sdxl_inputs, 1, blocks=("BasicTransformerBlock",)),
    Case(
        "llama_21",
        llama,
        lambda: llama_inputs(21),
        1,
        planned_on="21",
        blocks=("LlamaDecoderLayer",),
    ),
    Case(
        "llama_70",
        llama,
        lambda: llama_inputs(70),
        1,
        plan=lambda: llama_inputs(21),
        planned_on="21",
        blocks=("LlamaDecoderLayer",),
    ),
    Case("endless", llama, lambda: llama_inputs(21), 1e6),
)
