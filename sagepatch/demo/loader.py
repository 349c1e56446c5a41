"""Holds the loading of the bundled pipeline from its files; knows nothing of patching."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sagepatch.errors import MachineError

if TYPE_CHECKING:
    from diffusers import FluxPipeline

FOLDER = Path(__file__).parent / "pipeline"


@dataclass(frozen=True)
class Defaults:
    """The call arguments that suit the demo: pixels, steps, T5 tokens, guidance (unused)."""

    height: int = 128
    width: int = 128
    num_inference_steps: int = 8
    max_sequence_length: int = 32
    guidance_scale: float = 0.0


DEFAULTS = Defaults()


def load_pipeline(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> FluxPipeline:
    """Load the bundled emoji pipeline; it needs no network.

    It draws alike with 32 to 512 text tokens (`max_sequence_length`, by default 512); 32 is faster.
    A call that names no height and width draws `DEFAULTS.height` x `DEFAULTS.width`.
    Raises `MachineError` where diffusers or transformers is missing.

    >>> pipe = load_pipeline()
    >>> image = pipe("a red apple", num_inference_steps=8).images[0]
    """
    try:
        from diffusers import FluxPipeline
    except ImportError as error:
        raise MachineError(
            f"the demo needs diffusers and transformers, and importing them failed ({error}): "
            'run pip install "diffusers>=0.42" "transformers>=5.17"'
        ) from error
    pipeline: FluxPipeline = FluxPipeline.from_pretrained(
        FOLDER, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    pipeline.default_sample_size = DEFAULTS.height // pipeline.vae_scale_factor
    return pipeline.to(device)
