"""Inputs of one forward for tiny models of transformers: tokens, sound, pictures, films."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from models.transformers_models import ids, noise
from torch import Tensor, nn

LENGTH, IMAGE, FRAMES, MEL = 21, 32, 2, 8


def usual_inputs(model: nn.Module) -> dict[str, Any]:
    """Tokens, sound or pictures, by the names of the forward's arguments."""
    names = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    if "input_ids" in names:
        inputs["input_ids"] = ids(length=LENGTH)
    elif "input_values" in names:
        inputs["input_values"] = noise(2, 2000)
    elif "input_features" in names:
        inputs["input_features"] = noise(2, MEL, 80)
    elif "pixel_values" in names:
        inputs["pixel_values"] = pictures(model)
    elif "pixel_values_videos" in names:
        inputs["pixel_values_videos"] = videos(model)["pixel_values_videos"]
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids(length=9, seed=2)
    return inputs


def _picture_config(model: nn.Module) -> Any:
    config = model.config
    parts = (getattr(config, name, None) for name in ("vision_config", "backbone_config"))
    return next((part for part in parts if part is not None), config)


def pictures(model: nn.Module) -> Tensor:
    """[2, channels, H, W] of the size that the model's config asks for."""
    config = _picture_config(model)
    size = getattr(config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", None) or 3
    return noise(2, channels if isinstance(channels, int) else channels[0], height, width)


def videos(model: nn.Module, name: str = "pixel_values_videos") -> dict[str, Any]:
    """{name: [1, frames, channels, H, W]}."""
    still = pictures(model)
    return {name: noise(1, getattr(model.config, "num_frames", FRAMES), *still.shape[1:])}


def with_pictures(model: nn.Module) -> dict[str, Any]:
    """Tokens and pictures, for models that need both."""
    return usual_inputs(model) | {"pixel_values": pictures(model)}


def as_video(model: nn.Module) -> dict[str, Any]:
    return videos(model, "pixel_values")


def patches(model: nn.Module) -> dict[str, Any]:
    """One picture of 8 x 8 flattened patches, as vision towers of language models take it."""
    config = model.config
    time = getattr(config, "temporal_patch_size", 1)
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    width = channels * time * config.patch_size**2
    return {"hidden_states": noise(64, width), "grid_thw": torch.tensor([[1, 8, 8]])}


def mel(length: int, *, time_first: bool = False, bins: int = MEL) -> Callable[..., dict[str, Any]]:
    """Sound as log-mel features, [2, bins, length] or [2, length, bins]."""

    def inputs(model: nn.Module) -> dict[str, Any]:
        shape = (2, length, bins) if time_first else (2, bins, length)
        return usual_inputs(model) | {"input_features": noise(*shape)}

    return inputs


def named(**shapes: Any) -> Callable[..., dict[str, Any]]:
    """Usual inputs and tensors of noise by name and shape; a tensor is passed as it is."""

    def inputs(model: nn.Module) -> dict[str, Any]:
        made = {k: v if isinstance(v, Tensor) else noise(*v) for k, v in shapes.items()}
        return usual_inputs(model) | made

    return inputs
