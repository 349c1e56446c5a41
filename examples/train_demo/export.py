"""Holds the writing of the pipeline's folder in 16 bit; knows nothing of training."""

from pathlib import Path
from typing import Any

import torch

from .models import Networks

STORED = torch.float16


def export_pipeline(
    folder: Path, networks: Networks, autoencoder: Any, clip_tokenizer: Any, word_tokenizer: Any
) -> int:
    """Write a `FluxPipeline` with float16 safetensors to the folder; its size in bytes."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0, use_dynamic_shifting=False)
    pipeline = FluxPipeline(
        scheduler=scheduler,
        vae=autoencoder,
        text_encoder=networks.clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=networks.t5,
        tokenizer_2=word_tokenizer,
        transformer=networks.transformer,
    )
    pipeline.to("cpu", STORED)
    # A reused autoencoder remembers the folder that it came from, which is nobody's business.
    autoencoder.register_to_config(_name_or_path="")
    pipeline.save_pretrained(folder, safe_serialization=True)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
