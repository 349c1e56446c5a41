"""Tiny random-weight models of transformers' true classes, each with inputs for one forward on the
CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
Built = tuple[nn.Module, Inputs]

VOCAB = 99


def ids(batch: int = 2, length: int = 21, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _spread(model: nn.Module) -> nn.Module:
    """Larger weights than the usual start, so that attention has something to choose."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_llama(layers: int = 3, **options: Any) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**(_DECODER | {"num_hidden_layers": layers} | options))
    return _spread(LlamaForCausalLM(config)), {"input_ids": ids()}


def tiny_mistral() -> Built:
    """Every layer looks back 8 tokens, itself included."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(**_DECODER, sliding_window=8, head_dim=16)
    return _spread(MistralForCausalLM(config)), {"input_ids": ids(length=40)}


def tiny_gemma2() -> Built:
    """Soft cap, and a window of 8 on every second layer; transformers runs it eagerly."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        **_DECODER,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        # Before transformers refused it, SDPA was the default, and lost the cap.
        attn_implementation="eager",
    )
    return _spread(Gemma2ForCausalLM(config)), {"input_ids": ids(length=40)}


def tiny_gpt_oss() -> Built:
    """Sinks, windows on every second layer, mixture of experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        **_DECODER, head_dim=16, sliding_window=8, num_local_experts=2, num_experts_per_tok=2
    )
    model = _spread(GptOssForCausalLM(config))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter, mean=1.0)
        elif "experts" in name:
            nn.init.normal_(parameter, std=0.1)
    return model, {"input_ids": ids(length=40)}


def tiny_deepseek_v3() -> Built:
    """Values of another head size (12) than queries and keys (24)."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        **(_DECODER | {"num_key_value_heads": 4}),
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    return _spread(DeepseekV3ForCausalLM(config)), {"input_ids": ids()}


def tiny_gemma4() -> Built:
    """The upper half of the layers shares keys and values, and sees only the asked-for tokens."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **(_DECODER | {"num_hidden_layers": 4}),
        head_dim=16,
        global_head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=16,
    )
    return _spread(Gemma4ForCausalLM(config)), {"input_ids": ids(length=9), "logits_to_keep": 3}


def tiny_deepseek_v32() -> Built:
    """An indexer picks the keys of each query; the mask of it depends on the attention's name."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV32Config(
        **(_DECODER | {"num_key_value_heads": 4, "num_hidden_layers": 2}),
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "dense"],
        layer_types=["indexed_attention"] * 2,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
    )
    return DeepseekV32ForCausalLM(config).eval(), {"input_ids": ids()}


def tiny_gpt2(layers: int = 2) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=layers, n_head=4, n_positions=64)
    return _spread(GPT2LMHeadModel(config)), {"input_ids": ids()}


def tiny_bert(layers: int = 2) -> Built:
    """Padding on the right of the second sequence."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, 13:] = 0
    return _spread(BertModel(config)), {"input_ids": ids(), "attention_mask": mask}


def tiny_vit() -> Built:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=24,
        patch_size=4,
    )
    return _spread(ViTModel(config)), {"pixel_values": noise(2, 3, 24, 24)}


def tiny_t5() -> Built:
    """Encoder and decoder with a position bias on every self-attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, 13:] = 0
    inputs = {
        "input_ids": ids(),
        "attention_mask": mask,
        "decoder_input_ids": ids(length=9, seed=2),
    }
    return model, inputs


def tiny_whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=40,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = _spread(WhisperForConditionalGeneration(config))
    return model, {"input_features": noise(2, 8, 80), "decoder_input_ids": ids(length=9)}


def tiny_clip_text() -> Built:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        eos_token_id=2,
    )
    return _spread(CLIPTextModel(config)), {"input_ids": ids()}


def tiny_clip_vision() -> Built:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=24,
        patch_size=4,
    )
    return _spread(CLIPVisionModel(config)), {"pixel_values": noise(2, 3, 24, 24)}


def tiny_clip() -> Built:
    """Both towers, each with a config of its own."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    text, vision = tiny_clip_text()[0].config, tiny_clip_vision()[0].config
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32
    )
    return _spread(CLIPModel(config)), {"input_ids": ids(), "pixel_values": noise(2, 3, 24, 24)}


def tiny_qwen25_vl_vision() -> Built:
    """Windows of 16 patches on the first layers, the whole picture on the last."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        out_hidden_size=64,
        fullatt_block_indexes=[1],
        window_size=56,
    )
    model = _spread(Qwen2_5_VisionTransformerPretrainedModel(config))
    grid = torch.tensor([[1, 8, 8]])
    return model, {"hidden_states": noise(64, 3 * 2 * 14 * 14), "grid_thw": grid}


def tiny_falcon(**options: Any) -> Built:
    """Calls SDPA in its own forward."""
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **options
    )
    return _spread(FalconForCausalLM(config)), {"input_ids": ids()}


def tiny_bloom() -> Built:
    """Computes its softmax by hand."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)
    return _spread(BloomForCausalLM(config)), {"input_ids": ids()}


# Families whose every attention layer can be patched, by the name that tests show.
PATCHABLE: dict[str, Callable[[], Built]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "gemma2": tiny_gemma2,
    "gpt_oss": tiny_gpt_oss,
    "deepseek_v3": tiny_deepseek_v3,
    "gemma4": tiny_gemma4,
    "gpt2": tiny_gpt2,
    "bert": tiny_bert,
    "vit": tiny_vit,
    "t5": tiny_t5,
    "whisper": tiny_whisper,
    "clip_text": tiny_clip_text,
    "clip_vision": tiny_clip_vision,
    "clip": tiny_clip,
    "qwen25_vl_vision": tiny_qwen25_vl_vision,
    "falcon": tiny_falcon,
}


def first_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """The main output of one forward without gradients."""
    with torch.no_grad():
        out = model(**inputs)
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            tensor: Tensor = getattr(out, name)
            return tensor
    return out[0]
