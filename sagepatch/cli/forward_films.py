"""What one forward of a denoiser of films takes, one function a class: its config and the size in
latents in, arguments out; and the usual pixels where the config tells them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sagepatch.cli.forward_sizes import Inputs, Size, film, guidance, kept, text_states, timestep


def wan(c: Any, size: Size) -> Inputs:
    given = {
        "hidden_states": film(c, size),
        "timestep": timestep(),
        "encoder_hidden_states": text_states(size, c.text_dim),
    }
    if c.image_dim:
        given["encoder_hidden_states_image"] = torch.empty(1, 257, c.image_dim)
    return given


def cogvideox(c: Any, size: Size) -> Inputs:
    frames = -(-size.frames // (c.patch_size_t or 1)) * (c.patch_size_t or 1)
    patches = size.height * size.width // c.patch_size**2
    angles = torch.empty(patches * (frames // (c.patch_size_t or 1)), c.attention_head_dim)
    given: Inputs = {
        "hidden_states": torch.empty(1, frames, c.in_channels, size.height, size.width),
        "encoder_hidden_states": text_states(size, c.text_embed_dim),
        "timestep": timestep(),
    }
    if c.use_rotary_positional_embeddings:
        given["image_rotary_emb"] = (angles, angles)
    return given


def cogvideox_pixels(c: Any) -> tuple[int, int, int]:
    return 8 * c.sample_height, 8 * c.sample_width, c.sample_frames


def hunyuan_video(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": film(c, size),
        "timestep": timestep().long(),
        "encoder_hidden_states": text_states(size, c.text_embed_dim),
        "encoder_attention_mask": kept(size),
        "pooled_projections": torch.empty(1, c.pooled_projection_dim),
        "guidance": guidance(c),
    }


def hunyuan_video15(c: Any, size: Size) -> Inputs:
    # Glyphs are 256 tokens of ByT5, a first picture 729 of SigLIP: zeros where there is none.
    return {
        "hidden_states": film(c, size),
        "timestep": timestep(),
        "encoder_hidden_states": text_states(size, c.text_embed_dim),
        "encoder_attention_mask": kept(size),
        "encoder_hidden_states_2": torch.empty(1, 256, c.text_embed_2_dim),
        "encoder_attention_mask_2": torch.ones(1, 256, dtype=torch.bool),
        "image_embeds": torch.zeros(1, 729, c.image_embed_dim),
    }


def hunyuan_video15_pixels(c: Any) -> tuple[int, int, int] | None:
    sides = {640: (480, 848), 960: (720, 1280)}.get(c.target_size)
    return None if sides is None else (*sides, 121)


def ltx(c: Any, size: Size) -> Inputs:
    tokens = size.frames * size.height * size.width
    return {
        "hidden_states": torch.empty(1, tokens, c.in_channels),
        "encoder_hidden_states": text_states(size, c.caption_channels),
        "timestep": timestep(),
        "encoder_attention_mask": kept(size),
        "num_frames": size.frames,
        "height": size.height,
        "width": size.width,
    }


def ltx2(c: Any, size: Size) -> Inputs:
    # At 24 frames a second, 25 latents of sound a second.
    sound = 8 * size.frames
    return {
        **ltx(c, size),
        "audio_hidden_states": torch.empty(1, sound, c.audio_in_channels),
        "audio_encoder_hidden_states": text_states(size, c.caption_channels),
        "audio_encoder_attention_mask": kept(size),
        "audio_num_frames": sound,
    }


def mochi(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": film(c, size),
        "encoder_hidden_states": text_states(size, c.text_embed_dim),
        "timestep": timestep(),
        "encoder_attention_mask": kept(size),
    }


def cosmos(c: Any, size: Size) -> Inputs:
    # Cosmos 1 has an autoencoder of its own, of 8 frames a latent; the later ones have Wan's, of 4.
    first = c.extra_pos_embed_type is not None
    frames = (size.frames - 1) // 2 + 1 if first else size.frames
    width = c.crossattn_proj_in_channels if c.use_crossattn_projection else c.text_embed_dim
    text: Any = text_states(size, width)
    if c.img_context_dim_in:
        text = text, torch.empty(1, c.img_context_num_tokens, c.img_context_dim_in)
    given: Inputs = {
        "hidden_states": film(c, replace(size, frames=frames)),
        # A film that goes on from given frames has a time for each frame.
        "timestep": timestep()
        if first or c.in_channels == c.out_channels
        else torch.full((1, 1, frames, 1, 1), 0.5),
        "encoder_hidden_states": text,
        "fps": 30 if frames > 1 else None,
    }
    if c.concat_padding_mask:
        given["padding_mask"] = torch.zeros(1, 1, 8 * size.height, 8 * size.width)
    return given


def cosmos_pixels(c: Any) -> tuple[int, int, int]:
    if c.extra_pos_embed_type is not None:
        return 704, 1280, 121
    return (768, 1360, 1) if c.in_channels == c.out_channels else (704, 1280, 93)


def kandinsky5(c: Any, size: Size) -> Inputs:
    channels = 2 * c.in_visual_dim + 1 if c.visual_cond else c.in_visual_dim
    axes = size.frames, size.height // 2, size.width // 2
    return {
        "hidden_states": torch.empty(1, size.frames, size.height, size.width, channels),
        "encoder_hidden_states": text_states(size, c.in_text_dim),
        "pooled_projections": torch.empty(1, c.in_text_dim2),
        "timestep": timestep(),
        "visual_rope_pos": [torch.arange(extent) for extent in axes],
        "text_rope_pos": torch.arange(size.text),
    }
