"""Tiny pipelines and models written to disk, for code that loads by path or hub id."""

from __future__ import annotations

import string
from pathlib import Path

import torch


def save_tiny_flux(folder: Path) -> Path:
    """A FluxPipeline of 2 + 2 blocks; draws 16 x 16."""
    from models.diffusers_pipelines import tiny_flux_pipeline

    tiny_flux_pipeline().save_pretrained(folder)
    return folder


def save_tiny_wan(folder: Path) -> Path:
    """A WanPipeline of 2 blocks; films 16 x 16, 5 frames."""
    from models.diffusers_pipelines import tiny_wan_pipeline

    tiny_wan_pipeline().save_pretrained(folder)
    return folder


def save_tiny_llama(folder: Path) -> Path:
    """A Llama of 2 layers with a tokenizer of single characters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *string.ascii_letters, *string.digits, *" .,!?'-"]
    tokenizer = Tokenizer(WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(pieces),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
