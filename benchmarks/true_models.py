"""Denoisers and a language model at their published geometry, with random weights made on the GPU,
and the inputs of one forward. No text encoder, no VAE, no file is read.

Where one forward of the whole model takes many seconds, some of its layers are kept only, all
alike, unless `full` is asked for: names say how many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
TEXT = {"flux": 512, "hunyuan": 256, "wan": 512, "cogvideox": 226, "sdxl": 77}


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of attention call of a forward: sizes count elements; `masked` where a mask hides
    keys.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    kv_heads: int = 0
    causal: bool = False
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one size.

    `rounds` forwards of each mode are timed. `plan` are inputs of the same model to calibrate on,
    where calibrating on its own takes long; `planned_on` names them, and models that share a name
    share the plan. `shapes` are the attention calls long enough for a kernel of ours. `seconds` is
    what all modes take on an H200 beside the set-up, so that a run with a limit starts no case it
    cannot end. `blocks` are the classes of modules that are compiled, each by itself.
    """

    name: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[], Inputs]
    seconds: float
    shapes: tuple[Shape, ...] = ()
    rounds: int = 3
    plan: Callable[[], Inputs] | None = None
    planned_on: str = ""
    kept: str = ""
    whole: str = ""
    blocks: tuple[str, ...] = ()

    def label(self, full: bool) -> str:
        """The name in the table, with the layers that are kept."""
        deep = not self.kept or full
        return self.name if deep else f"{self.name} ({self.kept} of {self.whole} layers)"


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

    layers = {} if full else {"num_layers": 1, "num_single_layers": 2}
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

    return partly_fp32(WanTransformer3DModel(num_layers=40 if full else 5))


def partly_fp32(model: Any) -> nn.Module:
    """The model with those modules in FP32 that `from_pretrained` keeps so."""
    kept = set(model._keep_in_fp32_modules)
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
        num_attention_heads=48,
        num_layers=42 if full else 14,
        use_rotary_positional_embeddings=True,
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


def llama(full: bool, layers: int = 32) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Llama-3.1-8B.
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32 if full else layers,
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


def llama_short(full: bool) -> nn.Module:
    """Some of its layers, for prompts that take many seconds."""
    return llama(full, 4)


def llama_inputs(tokens: int) -> Inputs:
    """A prompt to be read: every layer's keys are kept, the logits of the last token computed."""
    return {"input_ids": torch.randint(128256, (1, tokens)), "logits_to_keep": 1}


FLUX_BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
# The most telling first: a run that is cut short has written those.
CASES = (
    Case(
        "flux_1024",
        flux,
        lambda: flux_inputs(1024),
        12,
        (Shape(1, 24, 4608, 4608, 128),),
        rounds=12,
        planned_on="1024",
        blocks=FLUX_BLOCKS,
    ),
    Case(
        "wan_14b_480p_81f",
        wan,
        lambda: wan_inputs(480, 832),
        10,
        (Shape(1, 40, 32760, 32760, 128), Shape(1, 40, 32760, 512, 128)),
        planned_on="480p",
        kept="5",
        whole="40",
        blocks=("WanTransformerBlock",),
    ),
    Case(
        "wan_14b_720p_81f",
        wan,
        lambda: wan_inputs(720, 1280),
        16,
        (Shape(1, 40, 75600, 75600, 128), Shape(1, 40, 75600, 512, 128)),
        rounds=2,
        plan=lambda: wan_inputs(480, 832),
        planned_on="480p",
        kept="5",
        whole="40",
        blocks=("WanTransformerBlock",),
    ),
    Case(
        "cogvideox_2b_49f",
        cogvideox_2b,
        lambda: cogvideox_inputs(False),
        15,
        (Shape(2, 30, 17776, 17776, 64),),
        rounds=4,
        blocks=("CogVideoXBlock",),
    ),
    Case(
        "sdxl_1024",
        sdxl,
        sdxl_inputs,
        14,
        (
            Shape(2, 10, 4096, 4096, 64),
            Shape(2, 20, 1024, 1024, 64),
            Shape(2, 10, 4096, 77, 64),
            Shape(2, 20, 1024, 77, 64),
        ),
        rounds=12,
        blocks=("BasicTransformerBlock",),
    ),
    Case(
        "llama_3_1_8b_8k",
        llama,
        lambda: llama_inputs(8192),
        10,
        (Shape(1, 32, 8192, 8192, 128, 8, True),),
        rounds=6,
        planned_on="8k",
        blocks=("LlamaDecoderLayer",),
    ),
    Case(
        "llama_3_1_8b_32k",
        llama,
        lambda: llama_inputs(32768),
        13,
        (Shape(1, 32, 32768, 32768, 128, 8, True),),
        plan=lambda: llama_inputs(8192),
        planned_on="8k",
        blocks=("LlamaDecoderLayer",),
    ),
    Case(
        "llama_3_1_8b_128k",
        llama_short,
        lambda: llama_inputs(131072),
        13,
        (Shape(1, 32, 131072, 131072, 128, 8, True),),
        rounds=2,
        plan=lambda: llama_inputs(8192),
        planned_on="8k",
        kept="4",
        whole="32",
        blocks=("LlamaDecoderLayer",),
    ),
    Case(
        "cogvideox_5b_49f",
        cogvideox_5b,
        lambda: cogvideox_inputs(True),
        10,
        (Shape(2, 48, 17776, 17776, 64),),
        kept="14",
        whole="42",
        blocks=("CogVideoXBlock",),
    ),
    Case(
        "flux_2048",
        flux,
        lambda: flux_inputs(2048),
        16,
        (Shape(1, 24, 16896, 16896, 128),),
        plan=lambda: flux_inputs(1024),
        planned_on="1024",
        blocks=FLUX_BLOCKS,
    ),
    Case(
        "hunyuanvideo_720p_129f",
        hunyuan,
        lambda: hunyuan_inputs(129),
        14,
        (
            Shape(1, 24, 119056, 119056, 128, masked=True),
            Shape(1, 24, 32656, 32656, 128, masked=True),
        ),
        rounds=2,
        plan=lambda: hunyuan_inputs(33),
        planned_on="33 frames",
        kept="1+2",
        whole="20+40",
        blocks=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
    ),
)
