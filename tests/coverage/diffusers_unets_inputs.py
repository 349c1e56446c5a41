"""What UNets, ControlNets, audio models and others of diffusers take: inputs for one forward at
any size."""

from __future__ import annotations

from typing import Any

import torch
from diffusers_family import Inputs, Size, grid_ids, kept, noise, steps


def unet(c: Any, size: Size) -> Inputs:
    given: Inputs = {
        "sample": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": noise(size.batch, size.text, c.cross_attention_dim, seed=2),
    }
    if c.addition_embed_type == "text_time":
        pooled = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        given["added_cond_kwargs"] = {
            "text_embeds": noise(size.batch, pooled, seed=3),
            "time_ids": torch.ones(size.batch, 6),
        }
    return given


def controlnet(c: Any, size: Size) -> Inputs:
    return {**unet(c, size), "controlnet_cond": _picture(c, size)}


def _picture(c: Any, size: Size) -> torch.Tensor:
    """The picture that a ControlNet reads; its embedding halves it once a stage but the first."""
    stages = getattr(c, "conditioning_embedding_out_channels", None)
    stages = stages or c.ctrl_conditioning_embedding_out_channels
    scale = 2 ** (len(stages) - 1)
    return noise(size.batch, 3, scale * size.height, scale * size.width, seed=4)


def controlnet_union(c: Any, size: Size) -> Inputs:
    return {
        **unet(c, size),
        "controlnet_cond": [_picture(c, size)],
        "control_type": torch.eye(c.num_control_type)[:1].expand(size.batch, -1),
        "control_type_idx": [0],
    }


def controlnet_xs(c: Any, size: Size) -> Inputs:
    given = {**_unet_plain(c, size), "controlnet_cond": _picture(c, size)}
    return {**given, "conditioning_scale": 0.8}


def _unet_plain(c: Any, size: Size) -> Inputs:
    return {
        "sample": noise(size.batch, 4, size.height, size.width),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": noise(size.batch, size.text, c.cross_attention_dim, seed=2),
    }


def sparse_control(c: Any, size: Size) -> Inputs:
    frames = (size.frames, size.height, size.width)
    return {
        "sample": noise(size.batch, c.in_channels, *frames),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": noise(
            size.batch * size.frames, size.text, c.cross_attention_dim, seed=2
        ),
        "controlnet_cond": noise(size.batch, c.conditioning_channels, *frames, seed=4),
        "conditioning_mask": torch.ones(size.batch, 1, *frames),
    }


def motion(c: Any, size: Size) -> Inputs:
    return {
        "sample": noise(size.batch, c.in_channels, size.frames, size.height, size.width),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": noise(
            size.batch * size.frames, size.text, c.cross_attention_dim, seed=2
        ),
    }


def unet3d(c: Any, size: Size) -> Inputs:
    text = noise(size.batch, size.text, c.cross_attention_dim, seed=2)
    return {**motion(c, size), "encoder_hidden_states": text}


def svd(c: Any, size: Size) -> Inputs:
    return {
        "sample": noise(size.batch, size.frames, c.in_channels, size.height, size.width),
        "timestep": torch.tensor(10.0),
        "encoder_hidden_states": noise(size.batch, 1, c.cross_attention_dim, seed=2),
        "added_time_ids": torch.ones(size.batch, 3),
    }


def i2vgen(c: Any, size: Size) -> Inputs:
    clip = (size.batch, c.in_channels, size.frames, size.height, size.width)
    return {
        "sample": noise(*clip),
        "timestep": torch.tensor(10),
        "fps": torch.full((size.batch,), 4),
        "image_latents": noise(*clip, seed=3),
        "image_embeddings": noise(size.batch, c.cross_attention_dim, seed=4),
        "encoder_hidden_states": noise(size.batch, size.text, c.cross_attention_dim, seed=2),
    }


def kandinsky3(c: Any, size: Size) -> Inputs:
    return {
        "sample": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.encoder_hid_dim, seed=2),
        "encoder_attention_mask": kept(size),
    }


def cascade(c: Any, size: Size) -> Inputs:
    given: Inputs = {
        "sample": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep_ratio": torch.full((size.batch,), 0.5),
        "clip_text_pooled": noise(size.batch, 1, c.clip_text_pooled_in_channels, seed=2),
    }
    if c.clip_text_in_channels:
        given["clip_text"] = noise(size.batch, size.text, c.clip_text_in_channels, seed=3)
        given["clip_img"] = noise(size.batch, 1, c.clip_image_in_channels, seed=4)
    if c.effnet_in_channels:
        given["effnet"] = noise(size.batch, c.effnet_in_channels, 4, 4, seed=5)
    return given


def unidiffuser(c: Any, size: Size) -> Inputs:
    return {
        "latent_image_embeds": noise(size.batch, c.in_channels, c.sample_size, c.sample_size),
        "image_embeds": noise(size.batch, 1, c.clip_img_dim, seed=2),
        "prompt_embeds": noise(size.batch, c.num_text_tokens, c.text_dim, seed=3),
        "timestep_img": steps(size),
        "timestep_text": steps(size),
    }


def uvit(c: Any, size: Size) -> Inputs:
    return {
        "input_ids": torch.arange(size.height * size.width).view(1, size.height, size.width) % 16,
        "encoder_hidden_states": noise(size.batch, size.text, c.encoder_hidden_size, seed=2),
        "pooled_text_emb": noise(size.batch, c.cond_embed_dim, seed=3),
        "micro_conds": torch.ones(size.batch, 5),
    }


def hunyuan_dit(c: Any, size: Size) -> Inputs:
    tokens = size.height * size.width // c.patch_size**2
    angles = noise(tokens, c.attention_head_dim, seed=5)
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, c.text_len, c.cross_attention_dim, seed=2),
        "text_embedding_mask": torch.ones(size.batch, c.text_len),
        "encoder_hidden_states_t5": noise(
            size.batch, c.text_len_t5, c.cross_attention_dim_t5, seed=3
        ),
        "text_embedding_mask_t5": torch.ones(size.batch, c.text_len_t5),
        "image_meta_size": torch.ones(size.batch, 6),
        "style": torch.zeros(size.batch, dtype=torch.long),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def dit(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size).long(),
        "class_labels": torch.ones(size.batch, dtype=torch.long),
    }


def stable_audio(c: Any, size: Size) -> Inputs:
    angles = noise(size.width + 1, c.attention_head_dim // 2, seed=5)
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.width),
        "timestep": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, size.text, c.cross_attention_input_dim, seed=2),
        "global_hidden_states": noise(size.batch, 1, c.global_states_input_dim, seed=3),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


def sd3_control(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "controlnet_cond": noise(size.batch, c.in_channels, size.height, size.width, seed=4),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "pooled_projections": noise(size.batch, c.pooled_projection_dim, seed=3),
        "timestep": steps(size),
    }


def flux_control(c: Any, size: Size) -> Inputs:
    tokens = size.height * size.width
    return {
        "hidden_states": noise(size.batch, tokens, c.in_channels),
        "controlnet_cond": noise(size.batch, tokens, c.in_channels, seed=4),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "pooled_projections": noise(size.batch, c.pooled_projection_dim, seed=3),
        "timestep": steps(size, 0.5),
        "img_ids": grid_ids(size),
        "txt_ids": torch.zeros(size.text, 3),
    }
