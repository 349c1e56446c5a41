"""Denoisers and a language model at their published geometry, with random weights made on the GPU,
and the inputs of one forward. No text encoder, no VAE, no file is read.

Wan and HunyuanVideo keep some of their layers only, all alike, unless `full` is asked for: their
names say which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
TEXT = {"flux": 512, "hunyuan": 256, "wan": 512, "cogvideox": 226, "sdxl": 77}


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one size.

    `repeats` forwards are timed. `small` are inputs of the same model to warm up and to calibrate
    on, where one forward takes seconds; `small_name` says how they differ. `seconds` is what all
    modes took or may take on an H200, so that a run with a limit starts no case it cannot end.
    """

    name: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[], Inputs]
    seconds: float
    repeats: int = 5
    small: Callable[[], Inputs] | None = None
    small_name: str = ""
    compiled: bool = False
    depth: tuple[str, str] = field(default=("", ""))

    def label(self, full: bool) -> str:
        """The name in the table, with the layers that are kept."""
        kept, whole = self.depth
        return f"{self.name} ({kept} of {whole} layers)" if kept and not full else self.name


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def flux(full: bool) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    # FLUX.1-dev.
    return FluxTransformer2DModel(guidance_embeds=True)


def flux_inputs(pixels: int) -> Inputs:
    side = pixels // 16
    ids = torch.zeros(side, side, 3)
    ids[..., 1] += torch.arange(side)[:, None]
    ids[..., 2] += torch.arange(side)[None]
    return {
        "hidden_states": noise(1, side * side, 64),
        "encoder_hidden_states": noise(1, TEXT["flux"], 4096),
        "pooled_projections": noise(1, 768),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5]),
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(TEXT["flux"], 3),
    }


def hunyuan(full: bool) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    layers = {} if full else {"num_layers": 5, "num_single_layers": 10}
    return HunyuanVideoTransformer3DModel(**layers)


def hunyuan_inputs(frames: int, words: int = 80) -> Inputs:
    """720 x 1280; a text of `words` tokens, the rest padding that the mask hides."""
    kept = torch.zeros(1, TEXT["hunyuan"], dtype=torch.int64)
    kept[:, :words] = 1
    return {
        "hidden_states": noise(1, 16, (frames - 1) // 4 + 1, 90, 160),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, TEXT["hunyuan"], 4096),
        "encoder_attention_mask": kept,
        "pooled_projections": noise(1, 768),
        "guidance": torch.tensor([6000.0], dtype=torch.bfloat16),
    }


def wan(full: bool) -> nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_layers=40 if full else 10)
    # As `from_pretrained` keeps them.
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()
    return model


def wan_inputs(height: int, width: int) -> Inputs:
    """81 frames."""
    return {
        "hidden_states": noise(1, 16, 21, height // 8, width // 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, TEXT["wan"], 4096),
    }


def cogvideox_2b(full: bool) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel()


def cogvideox_5b(full: bool) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True
    )


def cogvideox_inputs(rotary: bool) -> Inputs:
    """49 frames of 480 x 720, with and without guidance: batch 2."""
    given = {
        "hidden_states": noise(2, 13, 16, 60, 90),
        "encoder_hidden_states": noise(2, TEXT["cogvideox"], 4096),
        "timestep": torch.tensor([500, 500]),
    }
    if rotary:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        given["image_rotary_emb"] = get_3d_rotary_pos_embed(
            64, ((0, 0), (30, 45)), (30, 45), 13, device=torch.get_default_device()
        )
    return given


def sdxl(full: bool) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        attention_head_dim=(5, 10, 20),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=2048,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def sdxl_inputs() -> Inputs:
    """1024 x 1024, with and without guidance: batch 2."""
    sizes = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]] * 2, dtype=torch.bfloat16)
    return {
        "sample": noise(2, 4, 128, 128),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": noise(2, TEXT["sdxl"], 2048),
        "added_cond_kwargs": {"text_embeds": noise(2, 1280), "time_ids": sizes},
    }


def llama(full: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Llama-3.1-8B.
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    return LlamaForCausalLM(config)


def llama_inputs(tokens: int) -> Inputs:
    """A prompt to be read: every layer's keys are kept, the logits of the last token computed."""
    return {"input_ids": torch.randint(128256, (1, tokens)), "logits_to_keep": 1}


_HUNYUAN_DEPTH = ("5+10", "20+40")
_WAN_DEPTH = ("10", "40")
# The most telling first: a run that is cut short has written those.
CASES = (
    Case("flux_1024", flux, lambda: flux_inputs(1024), 20),
    Case("flux_2048", flux, lambda: flux_inputs(2048), 35, 3),
    Case(
        "hunyuanvideo_720p_129f",
        hunyuan,
        lambda: hunyuan_inputs(129),
        115,
        2,
        lambda: hunyuan_inputs(33),
        "33 frames",
        depth=_HUNYUAN_DEPTH,
    ),
    Case("wan_14b_480p_81f", wan, lambda: wan_inputs(480, 832), 35, 3, depth=_WAN_DEPTH),
    Case(
        "wan_14b_720p_81f",
        wan,
        lambda: wan_inputs(720, 1280),
        50,
        2,
        lambda: wan_inputs(480, 832),
        "480p",
        depth=_WAN_DEPTH,
    ),
    Case("cogvideox_2b_49f", cogvideox_2b, lambda: cogvideox_inputs(False), 30, 3),
    Case("llama_3_1_8b_8k", llama, lambda: llama_inputs(8192), 20),
    Case("llama_3_1_8b_32k", llama, lambda: llama_inputs(32768), 40, 3),
    Case("sdxl_1024", sdxl, sdxl_inputs, 25),
    Case("cogvideox_5b_49f", cogvideox_5b, lambda: cogvideox_inputs(True), 50, 2),
    Case("flux_1024", flux, lambda: flux_inputs(1024), 60, compiled=True),
    Case(
        "llama_3_1_8b_128k",
        llama,
        lambda: llama_inputs(131072),
        110,
        2,
        lambda: llama_inputs(32768),
        "32k",
    ),
)
