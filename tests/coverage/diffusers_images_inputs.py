"""What transformers of diffusers that draw images take: inputs for one forward at any size."""

from __future__ import annotations

from typing import Any

import torch
from diffusers_family import Inputs, Size, grid_ids, kept, noise, steps


def _packed(c: Any, size: Size) -> Inputs:
    """Image tokens and text with position ids, as the FLUX line takes them."""
    return {
        "hidden_states": noise(size.batch, size.height * size.width, c.in_channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "timestep": steps(size, 0.5),
        "img_ids": grid_ids(size),
        "txt_ids": torch.zeros(size.text, 3),
    }


def flux(c: Any, size: Size) -> Inputs:
    pooled = noise(size.batch, c.pooled_projection_dim, seed=3)
    return {**_packed(c, size), "pooled_projections": pooled, "guidance": steps(size, 3.5)}


def flux2(c: Any, size: Size) -> Inputs:
    given = _packed(c, size) | {"guidance": steps(size, 3.5)}
    return given | {"img_ids": grid_ids(size, 4), "txt_ids": torch.zeros(size.text, 4)}


def flux3(c: Any, size: Size) -> Inputs:
    return _packed(c, size) | {"img_ids": grid_ids(size, 4), "txt_ids": torch.zeros(size.text, 4)}


def chroma(c: Any, size: Size) -> Inputs:
    image = torch.ones(size.batch, size.height * size.width)
    mask = torch.cat([kept(size, torch.float32), image], dim=1)
    return {**_packed(c, size), "attention_mask": mask}


def longcat(c: Any, size: Size) -> Inputs:
    return _packed(c, size)


def sd3(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "pooled_projections": noise(size.batch, c.pooled_projection_dim, seed=3),
        "timestep": steps(size),
    }


def pixart(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=2),
        "encoder_attention_mask": kept(size, torch.float32),
        "timestep": steps(size),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sana(c: Any, size: Size) -> Inputs:
    given = pixart(c, size)
    del given["added_cond_kwargs"]
    return given


def qwen(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, size.height * size.width, c.in_channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "encoder_hidden_states_mask": kept(size, torch.long),
        "timestep": steps(size, 0.5),
        "img_shapes": [[(1, size.height, size.width)]] * size.batch,
    }


def qwen21(c: Any, size: Size) -> Inputs:
    tokens = size.height * size.width
    # The picture stands after the text, one slot for every four of its tokens. The model reads
    # where they are: these have numbers even where nothing else does.
    slots = torch.arange(size.text + tokens // 4, device="cpu") >= size.text
    return {
        "hidden_states": noise(size.batch, tokens, c.in_channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.context_in_dim, seed=2),
        "encoder_hidden_states_mask": kept(size),
        "timestep": steps(size, 0.5),
        "img_shapes": [[(1, size.height, size.width)]] * size.batch,
        "img_mask": slots.expand(size.batch, -1),
    }


def z_image(c: Any, size: Size) -> Inputs:
    lengths = [size.text, size.valid][: size.batch]
    return {
        "x": [noise(c.in_channels, 1, size.height, size.width, seed=i) for i in range(size.batch)],
        "t": steps(size, 0.5),
        "cap_feats": [noise(n, c.cap_feat_dim, seed=2 + i) for i, n in enumerate(lengths)],
    }


def hidream(c: Any, size: Size) -> Inputs:
    width = c.caption_channels
    given: Inputs = {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timesteps": steps(size),
        "encoder_hidden_states_t5": noise(size.batch, size.text, width[0], seed=2),
        "encoder_hidden_states_llama3": noise(
            max(c.llama_layers) + 1, size.batch, size.text, width[1], seed=3
        ),
        "pooled_embeds": noise(size.batch, c.text_emb_dim, seed=4),
    }
    if not given["timesteps"].is_meta:
        return given
    # The model's own packing writes the picture's size into a tensor and reads it again.
    rows, columns = size.height // c.patch_size, size.width // c.patch_size
    packed = noise(size.batch, rows * columns, c.in_channels * c.patch_size**2)
    return {
        **given,
        "hidden_states": packed,
        "hidden_states_masks": torch.ones(size.batch, rows * columns),
        "img_ids": torch.zeros(size.batch, rows * columns, 3),
        "img_sizes": [(rows, columns)] * size.batch,
    }


def lumina2(c: Any, size: Size) -> Inputs:
    with torch.device("cpu"):  # the model reads how much text is kept
        mask = kept(size)
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, size.text, c.cap_feat_dim, seed=2),
        "encoder_attention_mask": mask,
    }


def auraflow(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "timestep": steps(size, 0.5),
    }


def krea2(c: Any, size: Size) -> Inputs:
    ids = torch.cat([torch.zeros(size.text, 3), grid_ids(size)])
    return {
        "hidden_states": noise(size.batch, size.height * size.width, c.in_channels),
        "encoder_hidden_states": noise(
            size.batch, size.text, c.num_text_layers, c.text_hidden_dim, seed=2
        ),
        "timestep": steps(size, 0.5),
        "position_ids": ids,
        "encoder_attention_mask": kept(size),
    }


def hunyuan_image(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "encoder_attention_mask": kept(size),
    }


def ernie(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size),
        "text_bth": noise(size.batch, size.text, c.text_in_dim, seed=2),
        "text_lens": torch.tensor([size.text, size.valid][: size.batch]),
    }


def glm(c: Any, size: Size) -> Inputs:
    tokens = size.height * size.width // c.patch_size**2
    pixels = torch.tensor([[8.0 * size.height, 8.0 * size.width]] * size.batch)
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "prior_token_id": torch.arange(tokens).expand(size.batch, -1) % 32,
        "prior_token_drop": torch.zeros(size.batch, tokens, dtype=torch.bool),
        "timestep": steps(size),
        "target_size": pixels,
        "crop_coords": torch.zeros(size.batch, 2),
    }


def cogview(c: Any, size: Size) -> Inputs:
    pixels = torch.tensor([[8.0 * size.height, 8.0 * size.width]] * size.batch)
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "timestep": steps(size),
        "original_size": pixels,
        "target_size": pixels,
        "crop_coords": torch.zeros(size.batch, 2),
    }


def ideogram(c: Any, size: Size) -> Inputs:
    tokens = size.height * size.width
    total = size.text + tokens
    # Text first (indicator 3), then the picture (indicator 2); each sample is one segment.
    indicator = torch.tensor([3] * size.text + [2] * tokens).expand(size.batch, -1)
    ids = torch.cat([torch.zeros(size.text, 3), grid_ids(size)]).long()
    return {
        "hidden_states": noise(size.batch, total, c.in_channels),
        "timestep": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, total, c.llm_features_dim, seed=2),
        "position_ids": ids.expand(size.batch, -1, -1),
        "segment_ids": torch.ones(size.batch, total, dtype=torch.long),
        "indicator": indicator,
    }
