"""ControlNets of diffusers: the published geometry and a tiny config of each."""

from __future__ import annotations

import diffusers_unets_inputs as inputs
from diffusers_family import Family, Size
from diffusers_unets import BLOCKS, DOWN_2D, XL

_HINT = {"conditioning_embedding_out_channels": (8, 8)}

CONTROLS = (
    Family(
        "ControlNet",
        "every pipeline with ControlNet in its name",
        "ControlNetModel",
        {**BLOCKS, **DOWN_2D, **_HINT, "attention_head_dim": (2, 4)},
        inputs.controlnet,
        Size(8, 8, text=7),
        {"cross_attention_dim": 768},
    ),
    Family(
        "ControlNet union",
        "StableDiffusionXLControlNetUnionPipeline",
        "ControlNetUnionModel",
        {
            **BLOCKS,
            **DOWN_2D,
            **_HINT,
            **XL,
            "num_trans_channel": 32,
            "num_trans_head": 2,
            "num_proj_channel": 32,
        },
        inputs.controlnet_union,
        Size(8, 8, text=7),
        {
            "block_out_channels": (320, 640, 1280),
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "transformer_layers_per_block": (1, 2, 10),
            "cross_attention_dim": 2048,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    Family(
        "ControlNet-XS",
        "StableDiffusionControlNetXSPipeline",
        "UNetControlNetXSModel",
        {
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
            "transformer_layers_per_block": 1,
            "num_attention_heads": 2,
            "ctrl_block_out_channels": (8, 16),
            "ctrl_num_attention_heads": 2,
            "ctrl_conditioning_embedding_out_channels": (8, 8),
            "ctrl_max_norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        inputs.controlnet_xs,
        Size(8, 8, text=7),
        {},
    ),
    Family(
        "SparseCtrl",
        "AnimateDiffSparseControlNetPipeline",
        "SparseControlNetModel",
        {
            **BLOCKS,
            **_HINT,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "attention_head_dim": 2,
            "motion_num_attention_heads": 2,
            "conditioning_channels": 3,
        },
        inputs.sparse_control,
        Size(8, 8, 2),
        {"cross_attention_dim": 768},
    ),
    Family(
        "SD 3 ControlNet",
        "StableDiffusion3ControlNetPipeline",
        "SD3ControlNetModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "caption_projection_dim": 64,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
        },
        inputs.sd3_control,
        Size(16, 16),
        {},
    ),
    Family(
        "FLUX ControlNet",
        "FluxControlNetPipeline",
        "FluxControlNetModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [8, 12, 12],
        },
        inputs.flux_control,
        Size(6, 6, text=12),
        {},
    ),
)
