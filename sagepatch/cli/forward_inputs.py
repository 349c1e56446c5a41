"""What one forward of a denoiser takes at its pipeline's usual size, by the denoiser's class, as
shapes for a device that holds no numbers. Knows no weights and no pipelines.

Sizes are the defaults of the pipelines' calls in diffusers 0.42; the downscaling of pictures and
frames is that of the autoencoder each pipeline comes with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """What is drawn or filmed: pixels, frames, and tokens of text. One sample: classifier-free
    guidance doubles everything alike.
    """

    height: int
    width: int
    frames: int
    text: int

    def __str__(self) -> str:
        film = f" x {self.frames} frames" if self.frames > 1 else ""
        return f"{self.width} x {self.height}{film}, {self.text} tokens of text"


@dataclass(frozen=True, slots=True)
class Forward:
    """How to run a class of denoiser. `inputs(config, latent)` takes a `Size` in latents; a latent
    stands for `scale` x `scale` pixels and `frame_scale` frames but the first, which has its own.
    `text` is the usual number of tokens of text, `pixels` the usual height, width and frames:
    numbers, or a function of the config that gives None where that does not say.
    """

    inputs: Callable[[Any, Size], Inputs]
    scale: int
    text: int
    pixels: tuple[int, int, int] | Callable[[Any], tuple[int, int, int] | None]
    frame_scale: int = 1

    def size(self, config: Any) -> Size | None:
        """The usual size, None where the config does not say."""
        pixels = self.pixels(config) if callable(self.pixels) else self.pixels
        return None if pixels is None else Size(*pixels, self.text)

    def latent(self, size: Size, vae_scale: int | None = None) -> Size:
        """The size in latents; `vae_scale` where the autoencoder does not shrink 8 times."""
        scale = self.scale if vae_scale is None else self.scale * vae_scale // 8
        return replace(
            size,
            height=max(1, size.height // scale),
            width=max(1, size.width // scale),
            frames=(size.frames - 1) // self.frame_scale + 1,
        )


def _sampled(scale: int) -> Callable[[Any], tuple[int, int, int] | None]:
    """The config's own size in latents."""

    def pixels(config: Any) -> tuple[int, int, int] | None:
        side = config.sample_size
        return (side * scale, side * scale, 1) if isinstance(side, int) else None

    return pixels


def _time() -> Tensor:
    return torch.full((1,), 500.0)


def _guidance(c: Any) -> Tensor | None:
    return _time() if c.guidance_embeds else None


def _image(c: Any, size: Size) -> Tensor:
    return torch.empty(1, c.in_channels, size.height, size.width)


def _film(c: Any, size: Size) -> Tensor:
    return torch.empty(1, c.in_channels, size.frames, size.height, size.width)


def _text(size: Size, width: int) -> Tensor:
    return torch.empty(1, size.text, width)


def _kept(size: Size) -> Tensor:
    return torch.ones(1, size.text, dtype=torch.bool)


def _packed(c: Any, size: Size) -> Inputs:
    """Image tokens and text with position ids, as the FLUX line takes them."""
    tokens = size.height * size.width
    return {
        "hidden_states": torch.empty(1, tokens, c.in_channels),
        "encoder_hidden_states": _text(size, c.joint_attention_dim),
        "timestep": _time(),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(size.text, 3),
    }


def _flux(c: Any, size: Size) -> Inputs:
    pooled = torch.empty(1, c.pooled_projection_dim)
    return {**_packed(c, size), "pooled_projections": pooled, "guidance": _guidance(c)}


def _chroma(c: Any, size: Size) -> Inputs:
    mask = torch.ones(1, size.text + size.height * size.width)
    return {**_packed(c, size), "attention_mask": mask}


def _sd3(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _image(c, size),
        "encoder_hidden_states": _text(size, c.joint_attention_dim),
        "pooled_projections": torch.empty(1, c.pooled_projection_dim),
        "timestep": _time(),
    }


def _auraflow(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _image(c, size),
        "encoder_hidden_states": _text(size, c.joint_attention_dim),
        "timestep": _time(),
    }


def _pixart(c: Any, size: Size) -> Inputs:
    return {
        **_sana(c, size),
        "added_cond_kwargs": {
            "resolution": torch.empty(1, 2),
            "aspect_ratio": torch.empty(1, 1),
        },
    }


def _sana(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _image(c, size),
        "encoder_hidden_states": _text(size, c.caption_channels),
        "encoder_attention_mask": torch.ones(1, size.text),
        "timestep": _time(),
    }


def _qwen(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": torch.empty(1, size.height * size.width, c.in_channels),
        "encoder_hidden_states": _text(size, c.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(1, size.text, dtype=torch.long),
        "timestep": _time(),
        "img_shapes": [[(1, size.height, size.width)]],
    }


def _unet(c: Any, size: Size) -> Inputs:
    given: Inputs = {
        "sample": _image(c, size),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": _text(size, c.cross_attention_dim),
    }
    if c.addition_embed_type == "text_time":
        pooled = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        given["added_cond_kwargs"] = {
            "text_embeds": torch.empty(1, pooled),
            "time_ids": torch.empty(1, 6),
        }
    return given


def _wan(c: Any, size: Size) -> Inputs:
    given = {
        "hidden_states": _film(c, size),
        "timestep": _time(),
        "encoder_hidden_states": _text(size, c.text_dim),
    }
    if c.image_dim:
        given["encoder_hidden_states_image"] = torch.empty(1, 257, c.image_dim)
    return given


def _cogvideox(c: Any, size: Size) -> Inputs:
    frames = -(-size.frames // (c.patch_size_t or 1)) * (c.patch_size_t or 1)
    patches = size.height * size.width // c.patch_size**2
    angles = torch.empty(patches * (frames // (c.patch_size_t or 1)), c.attention_head_dim)
    given: Inputs = {
        "hidden_states": torch.empty(1, frames, c.in_channels, size.height, size.width),
        "encoder_hidden_states": _text(size, c.text_embed_dim),
        "timestep": _time(),
    }
    if c.use_rotary_positional_embeddings:
        given["image_rotary_emb"] = (angles, angles)
    return given


def _cogvideox_pixels(c: Any) -> tuple[int, int, int]:
    return 8 * c.sample_height, 8 * c.sample_width, c.sample_frames


def _hunyuan_video(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _film(c, size),
        "timestep": _time().long(),
        "encoder_hidden_states": _text(size, c.text_embed_dim),
        "encoder_attention_mask": _kept(size),
        "pooled_projections": torch.empty(1, c.pooled_projection_dim),
        "guidance": _guidance(c),
    }


def _ltx(c: Any, size: Size) -> Inputs:
    tokens = size.frames * size.height * size.width
    return {
        "hidden_states": torch.empty(1, tokens, c.in_channels),
        "encoder_hidden_states": _text(size, c.caption_channels),
        "timestep": _time(),
        "encoder_attention_mask": _kept(size),
        "num_frames": size.frames,
        "height": size.height,
        "width": size.width,
    }


_SQUARE = (1024, 1024, 1)
FORWARDS: dict[str, Forward] = {
    "FluxTransformer2DModel": Forward(_flux, 16, 512, _SQUARE),
    "ChromaTransformer2DModel": Forward(_chroma, 16, 512, _SQUARE),
    # CLIP's 77 tokens and 256 of T5.
    "SD3Transformer2DModel": Forward(_sd3, 8, 333, _SQUARE),
    "AuraFlowTransformer2DModel": Forward(_auraflow, 8, 256, _SQUARE),
    "PixArtTransformer2DModel": Forward(_pixart, 8, 300, _sampled(8)),
    "SanaTransformer2DModel": Forward(_sana, 32, 300, _sampled(32)),
    "QwenImageTransformer2DModel": Forward(_qwen, 16, 512, _SQUARE),
    "UNet2DConditionModel": Forward(_unet, 8, 77, _sampled(8)),
    "WanTransformer3DModel": Forward(_wan, 8, 512, (480, 832, 81), 4),
    "CogVideoXTransformer3DModel": Forward(_cogvideox, 8, 226, _cogvideox_pixels, 4),
    "HunyuanVideoTransformer3DModel": Forward(_hunyuan_video, 8, 256, (720, 1280, 129), 4),
    "LTXVideoTransformer3DModel": Forward(_ltx, 32, 128, (512, 704, 161), 8),
}
