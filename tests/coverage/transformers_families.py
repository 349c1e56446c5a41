"""What single families need beyond small sizes to be built tiny and run once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from models.transformers_models import VOCAB, noise
from torch import nn
from transformers_inputs import (
    IMAGE,
    LENGTH,
    MEL,
    as_video,
    mel,
    named,
    patches,
    usual_inputs,
    videos,
    with_pictures,
)

WIDTH, HEADS, KV_HEADS = 64, 4, 2


@dataclass(frozen=True)
class Family:
    """What one family needs beyond the sizes: fields of its config, and inputs.

    `spread` is False where larger weights would saturate every softmax (scores are not scaled).
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[nn.Module], dict[str, Any]] | None = None
    spread: bool = True


_MLA = Family({"num_key_value_heads": HEADS})
_ALL_HEADS = _MLA
_EAGER = Family({"attn_implementation": "eager"})
_PATCHES = Family(inputs=patches)
_PICTURES = Family(inputs=with_pictures)
_VIDEO = Family(inputs=as_video)
_PAST = named(past_values=(2, 32, 1))
_RESNET = {
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 8, 8],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    "num_queries": 9,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}
_SERIES = Family(
    {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1},
    named(
        past_values=(2, 10),
        past_time_features=(2, 10, 1),
        past_observed_mask=torch.ones(2, 10),
        future_values=(2, 4),
        future_time_features=(2, 4, 1),
    ),
)
_SECTIONS = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}
_SWIN = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}


def _boxes(model: nn.Module) -> dict[str, Any]:
    corners = torch.tensor([1, 2, 30, 40]).expand(2, LENGTH, 4).clone()
    return usual_inputs(model) | {"bbox": corners}


FAMILIES: dict[str, Family] = {
    "mt5": Family(spread=False),
    "umt5": Family(spread=False),
    "t5": Family(spread=False),
    "hrm_text": Family(spread=False),
    "deepseek_v2": Family({"num_key_value_heads": HEADS, "num_experts_per_tok": 2}),
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "longcat_flash": Family(
        {
            "num_key_value_heads": HEADS,
            "head_dim": 8,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 96,
            "zero_expert_num": 2,
            "moe_topk": 4,
        }
    ),
    "minicpm3": _MLA,
    "youtu": _MLA,
    "axk1": _MLA,
    "axk2": _MLA,
    "sarvam_mla": _MLA,
    "mistral_large4_text": _MLA,
    "mistral4": _MLA,
    "kimi_linear": Family(
        {"num_key_value_heads": HEADS, "layer_types": ["linear_attention", "full_attention"]}
    ),
    # Older releases run them under SDPA too, and lose their soft cap there.
    "gemma2": _EAGER,
    "t5gemma": _EAGER,
    "vaultgemma": _EAGER,
    "nemotron": Family({"num_key_value_heads": KV_HEADS}),
    "codegen": Family({"rotary_dim": 8}),
    "gptj": Family({"rotary_dim": 8}),
    "gpt_neo": Family({"attention_types": [[["global", "local"], 1]]}),
    "jamba": Family({"attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": Family({"attn_layer_indices": [1]}),
    "recurrent_gemma": Family({"num_hidden_layers": 3}),
    "qwen3_next": Family({"num_hidden_layers": 4}),
    "qwen3_5_text": Family({"num_hidden_layers": 4}),
    "qwen3_5_moe_text": Family({"num_hidden_layers": 4}),
    "granitemoehybrid": Family({"layer_types": ["mamba", "attention"]}),
    "lfm3": Family({"num_hidden_layers": 4}),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"]}),
    "dots1": Family({"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "esm": Family({"vocab_size": VOCAB, "mask_token_id": 98, "pad_token_id": 0}),
    "esmc": _ALL_HEADS,
    "reformer": Family({"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [3, 7]}),
    "zaya": Family({"num_experts_per_tok": 1}),
    "gemma3n_text": Family(
        {
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 16,
        }
    ),
    "gemma4_text": Family({"per_layer_config": None}),
    "embedding_gemma2_text": Family({"per_layer_config": None}),
    "whisper": Family(inputs=mel(256)),
    "voxtral_encoder": Family(inputs=mel(256)),
    "qwen2_audio_encoder": Family(inputs=mel(256)),
    "moss_transcribe_diarize_audio": Family(inputs=mel(256)),
    "audio-spectrogram-transformer": Family(
        inputs=lambda model: {"input_values": noise(2, 128, MEL)}, config={"max_length": 128}
    ),
    "wav2vec2-bert": Family({"feature_projection_input_dim": 8}, mel(40, time_first=True)),
    "lasr_encoder": Family(inputs=mel(80, time_first=True)),
    "parakeet_encoder": Family(inputs=mel(80, time_first=True)),
    "gemma4_audio": Family(inputs=mel(80, time_first=True, bins=128)),
    "qwen2_vl_text": Family({"rope_parameters": _SECTIONS}),
    "qwen2_5_vl_text": Family({"rope_parameters": _SECTIONS}),
    "glm4v_text": Family({"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}}),
    "glm4v_moe_text": Family({"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}}),
    "qwen2_5_vl_vision": Family({"window_size": 32}, patches),
    "qwen3_5_vision": _PATCHES,
    "qwen3_vl_vision": _PATCHES,
    "qwen3_vl_moe_vision": _PATCHES,
    "qwen4_exp_vision": _PATCHES,
    "glm4v_vision": _PATCHES,
    "glm4v_moe_vision": _PATCHES,
    "glm_ocr_vision": _PATCHES,
    "exaone4_5_vision": Family({"window_size": 32}, patches),
    "glm5_next_vision": _PATCHES,
    "dots3_note_text": _MLA,
    "cohere_compass_vision": _PATCHES,
    "clip": _PICTURES,
    "altclip": _PICTURES,
    "chinese_clip": _PICTURES,
    "metaclip_2": _PICTURES,
    "clipseg": _PICTURES,
    "aimv2": _PICTURES,
    "blip": _PICTURES,
    "bridgetower": _PICTURES,
    "groupvit": _PICTURES,
    "owlvit": Family(inputs=with_pictures),
    "owlv2": _PICTURES,
    "siglip": _PICTURES,
    "vilt": _PICTURES,
    "videoprism_vision_model": Family(inputs=videos),
    "lxmert": Family(inputs=named(visual_feats=(2, 5, 2048), visual_pos=(2, 5, 4))),
    "bros": Family(inputs=lambda model: usual_inputs(model) | {"bbox": noise(2, LENGTH, 8)}),
    "udop": Family(inputs=named(bbox=torch.rand(2, LENGTH, 4)), spread=False),
    "timesformer": _VIDEO,
    "videomae": _VIDEO,
    "vivit": Family({"tubelet_size": [2, 8, 8]}, as_video),
    "swin": Family(_SWIN),
    "swinv2": Family(_SWIN),
    "donut-swin": Family(_SWIN),
    "detr": Family(_RESNET),
    "conditional_detr": Family(_RESNET),
    "table-transformer": Family(_RESNET),
    "dab-detr": Family(_RESNET),
    "deformable_detr": Family(_RESNET),
    "time_series_transformer": _SERIES,
    "informer": _SERIES,
    "patchtst": Family({"context_length": 32}, _PAST),
    "perceiver": Family(
        {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
        lambda model: {"inputs": noise(2, 9, model.config.d_model)},
    ),
    "blip_2_qformer": Family(
        {"encoder_hidden_size": WIDTH},
        named(query_embeds=(2, 5, WIDTH), encoder_hidden_states=(2, 9, WIDTH)),
    ),
    "xmod": Family({"default_language": "en_XX"}),
    "decision_transformer": Family(
        inputs=lambda model: {
            "states": noise(2, 7, model.config.state_dim),
            "actions": noise(2, 7, model.config.act_dim),
            "rewards": noise(2, 7, 1),
            "returns_to_go": noise(2, 7, 1),
            "timesteps": torch.arange(7).expand(2, 7),
        }
    ),
    "layoutlmv3": Family(
        {"coordinate_size": 10, "shape_size": 12, "input_size": IMAGE},
        lambda model: _boxes(model) | {"pixel_values": noise(2, 3, IMAGE, IMAGE)},
    ),
    "lilt": Family({"channel_shrink_ratio": 4, "hidden_size": 96}, _boxes),
    "levit": Family({"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 32, 64]}),
}
