"""Tiny random-weight models of diffusers' true classes, each with inputs for one forward on the
CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from models.diffusers_pipelines import tiny_flux_pipeline as tiny_flux_pipeline
from models.diffusers_pipelines import tiny_sdxl_pipeline as tiny_sdxl_pipeline
from models.diffusers_pipelines import tiny_wan_pipeline as tiny_wan_pipeline
from torch import Tensor, nn

Inputs = dict[str, Any]


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny_flux(double: int = 2, single: int = 2) -> tuple[nn.Module, Inputs]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    ).eval()
    ids = torch.zeros(36, 3)
    ids[:, 1], ids[:, 2] = torch.arange(36) // 6, torch.arange(36) % 6
    return model, {
        "hidden_states": _noise(1, 36, 4),
        "encoder_hidden_states": _noise(1, 12, 32, seed=2),
        "pooled_projections": _noise(1, 32, seed=3),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(12, 3),
    }


def tiny_sd3(layers: int = 3) -> tuple[nn.Module, Inputs]:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=4,
        caption_projection_dim=64,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
    ).eval()
    return model, {
        "hidden_states": _noise(2, 4, 16, 16),
        "encoder_hidden_states": _noise(2, 11, 32, seed=2),
        "pooled_projections": _noise(2, 32, seed=3),
        "timestep": torch.tensor([1.0, 1.0]),
    }


def tiny_unet() -> tuple[nn.Module, Inputs]:
    """SD 1.5 in small: head sizes 40, 80 and 160."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(80, 160, 320),
        layers_per_block=1,
        attention_head_dim=2,
        cross_attention_dim=32,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    return model, {
        "sample": _noise(1, 4, 16, 16),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": _noise(1, 7, 32, seed=2),
    }


def tiny_sdxl_unet() -> tuple[nn.Module, Inputs]:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=32,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    ).eval()
    return model, {
        "sample": _noise(1, 4, 16, 16),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": _noise(1, 7, 32, seed=2),
        "added_cond_kwargs": {"text_embeds": _noise(1, 32, seed=3), "time_ids": torch.ones(1, 6)},
    }


def tiny_cogvideox(layers: int = 2) -> tuple[nn.Module, Inputs]:
    from diffusers import CogVideoXTransformer3DModel

    torch.manual_seed(0)
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=layers,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    ).eval()
    return model, {
        "hidden_states": _noise(1, 3, 4, 8, 8),
        "encoder_hidden_states": _noise(1, 8, 32, seed=2),
        "timestep": torch.tensor([5]),
        "image_rotary_emb": (_noise(48, 16, seed=3).cos(), _noise(48, 16, seed=3).sin()),
    }


def tiny_wan(layers: int = 2) -> tuple[nn.Module, Inputs]:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    ).eval()
    return model, {
        "hidden_states": _noise(1, 4, 2, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": _noise(1, 9, 32, seed=2),
    }


def tiny_hunyuan_video(layers: int = 2) -> tuple[nn.Module, Inputs]:
    """Two samples whose texts have 10 and 6 valid tokens: the mask differs by sample."""
    from diffusers import HunyuanVideoTransformer3DModel

    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=layers,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
    ).eval()
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0], mask[1, :6] = True, True
    return model, {
        "hidden_states": _noise(2, 4, 2, 8, 8),
        "timestep": torch.tensor([5, 5]),
        "encoder_hidden_states": _noise(2, 10, 32, seed=2),
        "encoder_attention_mask": mask,
        "pooled_projections": _noise(2, 32, seed=3),
        "guidance": torch.tensor([1000.0, 1000.0]),
    }


def tiny_qwen_image(layers: int = 2) -> tuple[nn.Module, Inputs]:
    """Two prompts of unequal length: the shorter is padded and masked."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    ).eval()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return model, {
        "hidden_states": _noise(2, 16, 16),
        "encoder_hidden_states": _noise(2, 9, 32, seed=2),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]],
    }


def tiny_pixart(layers: int = 2) -> tuple[nn.Module, Inputs]:
    """Cross-attention with an additive mask; 72 channels a head as in the real one."""
    from diffusers import PixArtTransformer2DModel

    torch.manual_seed(0)
    model = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=layers,
        patch_size=2,
        attention_head_dim=72,
        num_attention_heads=2,
        in_channels=4,
        cross_attention_dim=144,
        caption_channels=32,
        norm_type="ada_norm_single",
        out_channels=8,
        use_additional_conditions=False,
    ).eval()
    mask = torch.ones(2, 7)
    mask[1, 4:] = 0
    return model, {
        "hidden_states": _noise(2, 4, 8, 8),
        "encoder_hidden_states": _noise(2, 7, 32, seed=2),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([5, 5]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


BUILDERS = {
    "flux": tiny_flux,
    "sd3": tiny_sd3,
    "unet": tiny_unet,
    "sdxl_unet": tiny_sdxl_unet,
    "cogvideox": tiny_cogvideox,
    "wan": tiny_wan,
    "hunyuan_video": tiny_hunyuan_video,
    "qwen_image": tiny_qwen_image,
    "pixart": tiny_pixart,
}


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """One forward without gradients; the output tensor."""
    with torch.no_grad():
        out: Tensor = model(**inputs, return_dict=False)[0]
    return out
