"""What one forward of a denoiser of pictures takes, one function a class: its config and the size
in latents in, arguments out.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from sagepatch.cli.forward_sizes import Inputs, Size, guidance, picture, text_states, timestep


def _packed(c: Any, size: Size) -> Inputs:
    """Image tokens and text with position ids, as the FLUX line takes them."""
    tokens = size.height * size.width
    return {
        "hidden_states": torch.empty(1, tokens, c.in_channels),
        "encoder_hidden_states": text_states(size, c.joint_attention_dim),
        "timestep": timestep(),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(size.text, 3),
    }


def flux(c: Any, size: Size) -> Inputs:
    pooled = torch.empty(1, c.pooled_projection_dim)
    return {**_packed(c, size), "pooled_projections": pooled, "guidance": guidance(c)}


def chroma(c: Any, size: Size) -> Inputs:
    mask = torch.ones(1, size.text + size.height * size.width)
    return {**_packed(c, size), "attention_mask": mask}


def flux2(c: Any, size: Size) -> Inputs:
    ids = {
        "img_ids": torch.zeros(size.height * size.width, 4),
        "txt_ids": torch.zeros(size.text, 4),
    }
    return {**_packed(c, size), **ids, "guidance": guidance(c)}


def z_image(c: Any, size: Size) -> Inputs:
    return {
        "x": [torch.empty(c.in_channels, 1, size.height, size.width)],
        "t": timestep(),
        "cap_feats": [torch.empty(size.text, c.cap_feat_dim)],
    }


def cogview(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": picture(c, size),
        "encoder_hidden_states": text_states(size, c.text_embed_dim),
        "timestep": timestep(),
        "original_size": torch.empty(1, 2),
        "target_size": torch.empty(1, 2),
        "crop_coords": torch.empty(1, 2),
    }


def unidiffuser(c: Any, size: Size) -> Inputs:
    return {
        "latent_image_embeds": picture(c, size),
        "image_embeds": torch.empty(1, 1, c.clip_img_dim),
        "prompt_embeds": text_states(size, c.text_dim),
        "timestep_img": timestep(),
        "timestep_text": timestep(),
    }


def sd3(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": picture(c, size),
        "encoder_hidden_states": text_states(size, c.joint_attention_dim),
        "pooled_projections": torch.empty(1, c.pooled_projection_dim),
        "timestep": timestep(),
    }


def lumina2(c: Any, size: Size) -> Inputs:
    # The model reads how long the text is.
    mask = torch.ones(1, size.text, dtype=torch.bool, device="cpu")
    return {
        "hidden_states": picture(c, size),
        "timestep": timestep(),
        "encoder_hidden_states": text_states(size, c.cap_feat_dim),
        "encoder_attention_mask": mask,
    }


def hidream(c: Any, size: Size) -> Inputs:
    # Packed, as a picture that is not square is: then padded to as many tokens as a model takes.
    patch = c.patch_size
    rows, columns = size.height // patch, size.width // patch
    tokens = rows * columns
    if rows != columns:
        tokens = c.max_resolution[0] * c.max_resolution[1] // patch**2
    t5, llama = c.caption_channels
    return {
        "hidden_states": torch.empty(1, tokens, patch**2 * c.in_channels),
        "timesteps": timestep(),
        "encoder_hidden_states_t5": text_states(size, t5),
        "encoder_hidden_states_llama3": torch.empty(max(c.llama_layers) + 1, 1, size.text, llama),
        "pooled_embeds": torch.empty(1, c.text_emb_dim),
        "img_ids": torch.zeros(1, tokens, 3),
        "img_sizes": [(rows, columns)],
        "hidden_states_masks": torch.ones(1, tokens),
    }


def auraflow(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": picture(c, size),
        "encoder_hidden_states": text_states(size, c.joint_attention_dim),
        "timestep": timestep(),
    }


def pixart(c: Any, size: Size) -> Inputs:
    return {
        **sana(c, size),
        "added_cond_kwargs": {
            "resolution": torch.empty(1, 2),
            "aspect_ratio": torch.empty(1, 1),
        },
    }


def sana(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": picture(c, size),
        "encoder_hidden_states": text_states(size, c.caption_channels),
        "encoder_attention_mask": torch.ones(1, size.text),
        "timestep": timestep(),
    }


def qwen(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": torch.empty(1, size.height * size.width, c.in_channels),
        "encoder_hidden_states": text_states(size, c.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(1, size.text, dtype=torch.long),
        "timestep": timestep(),
        "img_shapes": [[(1, size.height, size.width)]],
    }


def unet(c: Any, size: Size) -> Inputs:
    given: Inputs = {
        "sample": picture(c, size),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": text_states(size, c.cross_attention_dim),
    }
    if c.addition_embed_type == "text_time":
        pooled = c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim
        given["added_cond_kwargs"] = {
            "text_embeds": torch.empty(1, pooled),
            "time_ids": torch.empty(1, 6),
        }
    return given


def cascade(c: Any, size: Size) -> Inputs:
    # Here a latent of `size` is a pixel: the prior shrinks 42.67 times, and the decoder stretches
    # what the prior made 10.67 times.
    rows, columns = ceil(size.height / 42.67), ceil(size.width / 42.67)
    given: Inputs = {
        "timestep_ratio": torch.full((1,), 0.5),
        "clip_text_pooled": torch.empty(1, 1, c.clip_text_pooled_in_channels),
    }
    if c.effnet_in_channels:
        given["effnet"] = torch.empty(1, c.effnet_in_channels, rows, columns)
        rows, columns = int(rows * 10.67), int(columns * 10.67)
    if c.clip_text_in_channels:
        given["clip_text"] = text_states(size, c.clip_text_in_channels)
        given["clip_img"] = torch.empty(1, 1, c.clip_image_in_channels)
    return {"sample": torch.empty(1, c.in_channels, rows, columns), **given}
