"""Which parts of a pipeline a patch takes: a name for every part of every pipeline of diffusers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.transformers.transformer_flux import FluxAttention
from models.stacks import stack, tokens
from torch import nn

import sagepatch
from sagepatch.errors import NothingPatched
from sagepatch.patchers.model import parts_of

# Names that pipelines of diffusers give their parts. The first denoise and are patched.
DENOISERS = {
    "controlnet",
    "decoder",
    "diffusion_decoder",
    "image_unet",
    "model",
    "prior",
    "prior_prior",
    "super_res_first",
    "super_res_last",
    "text_unet",
    "transformer",
    "transformer_2",
    "unconditional_transformer",
    "unet",
}
OTHERS = {
    "audio_token_detokenizer",
    "audio_tokenizer",
    "audio_vae",
    "condition_encoder",
    "connectors",
    "duration_head",
    "guider",
    "image_encoder",
    "motion_adapter",
    "movq",
    "ocr_guider",
    "prior_image_encoder",
    "prior_text_encoder",
    "safety_checker",
    "sound_tokenizer",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "text_encoder_4",
    "vae",
    "vision_language_encoder",
    "vocoder",
    "vqgan",
    "vqvae",
}
# Models without a processor of diffusers in them: of transformers, or without attention.
PLAIN = {
    "adapter",
    "bert",
    "caption_generator",
    "depth_estimator",
    "duration_embedder",
    "image_embedder",
    "image_normalizer",
    "image_project",
    "language_model",
    "latent_upsampler",
    "latent_upscaler",
    "learned_classifier_free_sampling_embeddings",
    "pe",
    "projection_model",
    "prompt_enhancer",
    "prompt_enhancer_head",
    "qformer",
    "shap_e_renderer",
    "siglip",
    "temporal_latent_upsampler",
    "text_decoder",
    "text_proj",
    "watermarker",
}
# What else pipelines are made with: settings, schedulers, processors of inputs.
_NO_MODEL = ("scheduler", "processor", "feature_extractor", "args", "kwargs")
TOKENIZERS = {"clip_tokenizer", "pe_tokenizer", "prior_tokenizer", "text_tokenizer"} | {
    f"tokenizer{end}" for end in ("", "_2", "_3", "_4")
}


@dataclass(frozen=True)
class Pipe:
    """As much of a pipeline as is looked at."""

    components: dict[str, Any]


def part_names() -> set[str]:
    """Names of parts in the signatures of all exported pipelines."""
    found = set()
    for name in dir(diffusers):
        owner = getattr(diffusers, name, None)
        if isinstance(owner, type) and issubclass(owner, DiffusionPipeline):
            for key, parameter in inspect.signature(owner.__init__).parameters.items():
                if not _is_setting(parameter) and not key.endswith(_NO_MODEL):
                    found.add(key)
    return found - {"self"} - TOKENIZERS


def _is_setting(parameter: inspect.Parameter) -> bool:
    text = str(parameter.annotation).replace("typing.", "")
    plain = ("bool", "int", "float", "str", "list", "dict", "tuple")
    kind = getattr(parameter.annotation, "__name__", text)
    return kind in plain or text.startswith(plain)


def with_processor() -> nn.Module:
    return nn.ModuleDict({"attn": FluxAttention(32, heads=2, dim_head=16)})


def test_every_part_of_every_pipeline_has_a_place() -> None:
    assert part_names() == DENOISERS | OTHERS | PLAIN


@pytest.mark.parametrize("name", sorted(DENOISERS | OTHERS))
def test_denoisers_are_patched_and_others_are_not(name: str) -> None:  # case 44
    parts = parts_of(Pipe({name: with_processor()}), None).modules
    assert set(parts) == ({name} if name in DENOISERS else set())
    assert set(parts_of(Pipe({name: with_processor()}), [name]).modules) == {name}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_parts_are_not(name: str) -> None:
    assert not parts_of(Pipe({name: stack(1)}), None).modules


@pytest.mark.parametrize("name", ["transformer", "transformer_2", "unet", "model"])
def test_denoiser_that_knows_no_processor(name: str) -> None:
    """Of another library, or somebody's own: it is the part that the pipeline runs every step."""
    model, x = stack(2), tokens()
    pipe = Pipe({name: model, "text_encoder": stack(1), "vae": stack(1)})
    patch = sagepatch.apply(pipe, variant="emulated.sage2_8", emulate=True)
    assert [layer.name for layer in patch.layers] == [f"{name}.0", f"{name}.1"]
    with torch.no_grad():
        model(x)
    assert all(layer.record.calls == 1 for layer in patch.layers)
    sagepatch.restore(pipe)
    assert patch.restored


def test_pipeline_without_a_denoiser_says_where_it_looked() -> None:
    with pytest.raises(NothingPatched, match="looked at nothing"):
        sagepatch.apply(Pipe({"vae": with_processor(), "language_model": stack(1)}))
