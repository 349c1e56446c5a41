"""The models that `sagepatch run` knows by a short name; geometry always comes from the loaded
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Medium = Literal["image", "video", "text"]


@dataclass(frozen=True, slots=True)
class Preset:
    """One model by name. `repo` is its hub id; `gated` says in one sentence how to get access."""

    name: str
    repo: str
    medium: Medium
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    guidance: float | None = None
    gated: str | None = None


_BFL = "this model is gated: accept its licence on its hub page, then log in with `hf auth login`"
_META = _BFL

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("flux", "black-forest-labs/FLUX.1-schnell", "image", 4, 1024, 1024, guidance=0.0),
        Preset("flux-schnell", "black-forest-labs/FLUX.1-schnell", "image", 4, 1024, 1024),
        Preset("flux-dev", "black-forest-labs/FLUX.1-dev", "image", 28, 1024, 1024, gated=_BFL),
        Preset("flux2-dev", "black-forest-labs/FLUX.2-dev", "image", 28, 1024, 1024, gated=_BFL),
        Preset("sd15", "stable-diffusion-v1-5/stable-diffusion-v1-5", "image", 30, 512, 512),
        Preset("sdxl", "stabilityai/stable-diffusion-xl-base-1.0", "image", 30, 1024, 1024),
        Preset("sd35-large", "stabilityai/stable-diffusion-3.5-large", "image", 28, gated=_BFL),
        Preset("sd35-medium", "stabilityai/stable-diffusion-3.5-medium", "image", 28, gated=_BFL),
        Preset("pixart-sigma", "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", "image", 20),
        Preset("sana", "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "image", 20),
        Preset("stable-cascade", "stabilityai/stable-cascade", "image", 20),
        Preset("unidiffuser", "thu-ml/unidiffuser-v1", "image", 20),
        Preset("qwen-image", "Qwen/Qwen-Image", "image", 50),
        Preset("z-image-turbo", "Tongyi-MAI/Z-Image-Turbo", "image", 9),
        Preset("chroma", "lodestones/Chroma1-HD", "image", 40),
        Preset("hidream", "HiDream-ai/HiDream-I1-Full", "image", 50),
        Preset("lumina2", "Alpha-VLLM/Lumina-Image-2.0", "image", 50),
        Preset("auraflow", "fal/AuraFlow", "image", 50),
        Preset("cogvideox-2b", "THUDM/CogVideoX-2b", "video", 50, 480, 720, 49),
        Preset("cogvideox-5b", "THUDM/CogVideoX-5b", "video", 50, 480, 720, 49),
        Preset("hunyuan-video", "hunyuanvideo-community/HunyuanVideo", "video", 30, 720, 1280, 129),
        Preset("wan2.1-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "video", 50, 480, 832, 81),
        Preset("wan2.1-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "video", 50, 480, 832, 81),
        Preset("ltx-video", "Lightricks/LTX-Video", "video", 50, 512, 704, 161),
        Preset("mochi", "genmo/mochi-1-preview", "video", 50, 480, 848, 19),
        Preset("allegro", "rhymes-ai/Allegro", "video", 50),
        Preset("llama2-7b", "meta-llama/Llama-2-7b-hf", "text", gated=_META),
        Preset("mistral-7b", "mistralai/Mistral-7B-v0.1", "text"),
        Preset("gemma2-9b", "google/gemma-2-9b", "text", gated=_META),
    )
}
