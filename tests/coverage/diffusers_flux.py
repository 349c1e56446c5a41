"""The FLUX line of diffusers and its like: the published geometry and a tiny config of each."""

from __future__ import annotations

import diffusers_images_inputs as inputs
from diffusers_family import Family, Size

_TWO = {"num_attention_heads": 2}

FLUX = (
    Family(
        "FLUX.1",
        "FluxPipeline, Kontext, Fill, Redux, Control",
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (8, 12, 12),
            "guidance_embeds": True,
            **_TWO,
        },
        inputs.flux,
        Size(6, 6, text=12),
        {"guidance_embeds": True},
        Size(64, 64, text=512),
    ),
    Family(
        "FLUX.2",
        "Flux2Pipeline, Klein",
        "Flux2Transformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 8, 8, 8),
            **_TWO,
        },
        inputs.flux2,
        Size(6, 6, text=12),
        {},
        Size(64, 64, text=512),
    ),
    Family(
        "FLUX.3",
        "Flux3Pipeline",
        "Flux3Transformer2DModel",
        {
            "in_channels": 4,
            "cond_in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 8, 8, 8),
            **_TWO,
        },
        inputs.flux3,
        Size(6, 6, text=12),
        {},
        Size(64, 64, text=512),
        "reference images go through blocks of their own",
        r"mode_blocks\.image_cond\.",
    ),
    Family(
        "Chroma",
        "ChromaPipeline",
        "ChromaTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "joint_attention_dim": 32,
            "axes_dims_rope": (8, 12, 12),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
            **_TWO,
        },
        inputs.chroma,
        Size(6, 6, text=12, batch=2),
        {},
        Size(64, 64, text=512),
        "the mask is the product of two rows of ones and zeros, added to the scores as diffusers "
        "does",
    ),
    Family(
        "LongCat-Image",
        "LongCatImagePipeline",
        "LongCatImageTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [8, 12, 12],
            **_TWO,
        },
        inputs.longcat,
        Size(6, 6, text=12),
        {},
        Size(64, 64, text=512),
    ),
)
