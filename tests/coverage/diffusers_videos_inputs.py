"""What transformers of diffusers that make videos take: inputs for one forward at any size."""

from __future__ import annotations

from typing import Any

import torch
from diffusers_family import Inputs, Size, kept, noise, steps


def _volume(c: Any, size: Size, channels: int | None = None) -> torch.Tensor:
    width = channels or c.in_channels
    return noise(size.batch, width, size.frames, size.height, size.width)


def cogvideox(c: Any, size: Size) -> Inputs:
    patches = size.height * size.width // c.patch_size**2
    tokens = patches * (size.frames // (c.patch_size_t or 1))
    angles = noise(tokens, c.attention_head_dim, seed=3)
    given = {
        "hidden_states": noise(size.batch, size.frames, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "timestep": steps(size),
    }
    if c.use_rotary_positional_embeddings:
        given["image_rotary_emb"] = (angles.cos(), angles.sin())
    return given


def hunyuan_video(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _volume(c, size),
        "timestep": steps(size).long(),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "encoder_attention_mask": kept(size),
        "pooled_projections": noise(size.batch, c.pooled_projection_dim, seed=3),
        "guidance": steps(size, 1000.0),
    }


def hunyuan_video15(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _volume(c, size),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "encoder_attention_mask": kept(size),
        "encoder_hidden_states_2": noise(size.batch, size.text, c.text_embed_2_dim, seed=3),
        "encoder_attention_mask_2": kept(size),
        "image_embeds": noise(size.batch, 7, c.image_embed_dim, seed=4),
    }


def hunyuan_video15_usual(c: Any, size: Size) -> Inputs:
    """Where shapes are counted, glyphs have 256 tokens and the first picture 729."""
    given = hunyuan_video15(c, size)
    if not given["timestep"].is_meta:
        return given
    return {
        **given,
        "encoder_hidden_states_2": noise(size.batch, 256, c.text_embed_2_dim),
        "encoder_attention_mask_2": torch.ones(size.batch, 256),
        "image_embeds": noise(size.batch, 729, c.image_embed_dim),
    }


def wan(c: Any, size: Size) -> Inputs:
    given = {
        "hidden_states": _volume(c, size),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_dim, seed=2),
    }
    if c.image_dim:
        given["encoder_hidden_states_image"] = noise(size.batch, 257, c.image_dim, seed=3)
    return given


def wan_vace(c: Any, size: Size) -> Inputs:
    control = _volume(c, size, c.vace_in_channels)
    return {**wan(c, size), "control_hidden_states": control}


def wan_animate(c: Any, size: Size) -> Inputs:
    pixels = c.motion_encoder_size
    return {
        **wan(c, size),
        "pose_hidden_states": noise(
            size.batch, c.latent_channels, size.frames - 1, size.height, size.width, seed=4
        ),
        "face_pixel_values": noise(size.batch, 3, 4 * size.frames - 7, pixels, pixels, seed=5),
    }


def ltx(c: Any, size: Size) -> Inputs:
    tokens = size.frames * size.height * size.width
    return {
        "hidden_states": noise(size.batch, tokens, c.in_channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=2),
        "timestep": steps(size),
        "encoder_attention_mask": kept(size),
        "num_frames": size.frames,
        "height": size.height,
        "width": size.width,
    }


def ltx2(c: Any, size: Size) -> Inputs:
    sound = 8 * size.frames
    return {
        **ltx(c, size),
        "audio_hidden_states": noise(size.batch, sound, c.audio_in_channels, seed=3),
        "audio_encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=4),
        "audio_encoder_attention_mask": kept(size),
        "audio_num_frames": sound,
    }


def mochi(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _volume(c, size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "timestep": steps(size),
        "encoder_attention_mask": kept(size),
    }


def kandinsky5(c: Any, size: Size) -> Inputs:
    channels = c.in_visual_dim * 2 + 1 if c.visual_cond else c.in_visual_dim
    return {
        "hidden_states": noise(size.batch, size.frames, size.height, size.width, channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.in_text_dim, seed=2),
        "pooled_projections": noise(size.batch, c.in_text_dim2, seed=3),
        "timestep": steps(size),
        "visual_rope_pos": [
            torch.arange(size.frames),
            torch.arange(size.height // 2),
            torch.arange(size.width // 2),
        ],
        "text_rope_pos": torch.arange(size.text),
    }


def kandinsky6(c: Any, size: Size) -> Inputs:
    channels = c.in_visual_dim * 2 + 1 if c.visual_cond else c.in_visual_dim
    return {
        "hidden_states": noise(size.batch, size.frames, size.height, size.width, channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.in_text_dim, seed=2),
        "pooled_projections": noise(size.batch, c.in_text_dim2, seed=3),
        "timestep": steps(size),
        "audio_hidden_states": noise(size.batch, 8 * size.frames, c.in_audio_dim, seed=4),
        "encoder_attention_mask": kept(size),
    }


def cosmos(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _volume(c, size),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "attention_mask": kept(size),
        "fps": 30,
    }


def allegro(c: Any, size: Size) -> Inputs:
    frames, rows, columns = size.frames, size.height // 2, size.width // 2
    angles = [noise(frames * rows * columns, c.attention_head_dim // 3, seed=i) for i in (3, 4, 5)]
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns))
    freqs = tuple((angle.cos(), angle.sin()) for angle in angles)
    return {
        "hidden_states": _volume(c, size),
        "encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=2),
        "encoder_attention_mask": kept(size, torch.float32),
        "timestep": steps(size),
        "image_rotary_emb": (freqs, tuple(axis[None] for axis in grid.unbind(1))),
    }


def minimax_h3(c: Any, size: Size) -> Inputs:
    rows, columns = size.height // c.patch_size[1], size.width // c.patch_size[2]
    video, sound = size.frames * rows * columns, 4 * size.frames
    total = size.text + video + sound
    order = torch.arange(total)
    text, picture, audio = order.split([size.text, video, sound])
    patch = c.in_channels * c.patch_size[0] * c.patch_size[1] * c.patch_size[2]
    tags = torch.cat([torch.full_like(text, 0), torch.full_like(picture, 1), audio * 0 + 2])
    return {
        "hidden_states": noise(size.batch, video, patch),
        "audio_hidden_states": noise(size.batch, sound, c.audio_in_channels, seed=3),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_dim, seed=2),
        "timestep": torch.tensor([500.0]),
        "timestep_indices": torch.zeros(total, dtype=torch.long),
        "token_tags": tags,
        "position_ids": order[:, None].expand(-1, 3).float(),
        "video_indices": picture,
        "audio_indices": audio,
        "text_indices": text,
    }


def latte(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _volume(c, size),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=2),
    }


def easyanimate(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": _volume(c, size),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
    }
