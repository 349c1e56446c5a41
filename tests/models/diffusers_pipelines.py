"""Whole tiny pipelines of diffusers, random weights, tokenizers made on the spot: no network, no
files.
"""

from __future__ import annotations

import string
from typing import Any

import torch

_LETTERS = string.ascii_lowercase + string.digits + ".,-'"
_CLIP_LENGTH = 77


def tiny_flux_pipeline() -> Any:
    """FluxPipeline, 2 double and 2 single blocks; call with height=width=16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(use_quant_conv=False, shift_factor=0.0, scaling_factor=1.0),
        text_encoder=_clip_text(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_t5_tokenizer(),
        transformer=transformer.eval(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_sdxl_pipeline() -> Any:
    """StableDiffusionXLPipeline; call with height=width=32."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=64,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    pipeline = StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip_text(),
        text_encoder_2=_clip_text(projected=True),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=unet.eval(),
        scheduler=EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_wan_pipeline() -> Any:
    """WanPipeline; call with height=width=16, num_frames=5, output_type="latent" or "np"."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    pipeline = WanPipeline(
        tokenizer=_t5_tokenizer(),
        text_encoder=_t5(multilingual=True),
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _vae(**options: Any) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    return AutoencoderKL(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=8,
        **options,
    ).eval()


def _clip_text(projected: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = _clip_tokenizer()
    torch.manual_seed(2)
    config = CLIPTextConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=37,
        projection_dim=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=_CLIP_LENGTH,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()


def _t5(multilingual: bool = False) -> Any:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    torch.manual_seed(3)
    config_class, model_class = (
        (UMT5Config, UMT5EncoderModel) if multilingual else (T5Config, T5EncoderModel)
    )
    config = config_class(
        vocab_size=len(_t5_tokenizer()),
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return model_class(config).eval()


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    pieces = [
        *_LETTERS,
        *(f"{letter}</w>" for letter in _LETTERS),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        model_max_length=_CLIP_LENGTH,
    )


def _t5_tokenizer() -> Any:
    from transformers import T5TokenizerFast

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5TokenizerFast(
        vocab=[*special, *((letter, -3.0) for letter in _LETTERS)],
        extra_ids=0,
        model_max_length=512,
    )
