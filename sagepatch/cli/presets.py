"""Names for well-known models: hub id, what it makes and how its own documentation calls it.

Geometry is never taken from here: it is read from the loaded config. Every hub id occurs in the
sources of the installed diffusers or transformers; a test looks each of them up there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Task = Literal["image", "video", "text", "features"]
CallValue = int | float


@dataclass(frozen=True, slots=True)
class Preset:
    """One well-known model. `call` holds the arguments of a call that its documentation gives;
    a gated model needs a licence accepted on its page of the hub.
    """

    name: str
    task: Task
    hub_id: str
    call: Mapping[str, CallValue] = field(default_factory=dict)
    gated: bool = False


def _square(side: int, **call: CallValue) -> dict[str, CallValue]:
    return {"height": side, "width": side, **call}


_ALL = (
    Preset(
        "flux",
        "image",
        "black-forest-labs/FLUX.1-schnell",
        _square(1024, num_inference_steps=4, guidance_scale=0.0, max_sequence_length=256),
    ),
    Preset(
        "flux-dev",
        "image",
        "black-forest-labs/FLUX.1-dev",
        _square(1024, num_inference_steps=28, guidance_scale=3.5),
        gated=True,
    ),
    Preset(
        "flux2-dev",
        "image",
        "black-forest-labs/FLUX.2-dev",
        _square(1024, num_inference_steps=50, guidance_scale=2.5),
        gated=True,
    ),
    Preset(
        "flux2-klein",
        "image",
        "black-forest-labs/FLUX.2-klein-base-9B",
        _square(1024, num_inference_steps=50, guidance_scale=4.0),
    ),
    Preset("sd15", "image", "stable-diffusion-v1-5/stable-diffusion-v1-5", _square(512)),
    Preset("sdxl", "image", "stabilityai/stable-diffusion-xl-base-1.0", _square(1024)),
    Preset("sd3", "image", "stabilityai/stable-diffusion-3-medium-diffusers", gated=True),
    Preset("sd35-large", "image", "stabilityai/stable-diffusion-3.5-large", gated=True),
    Preset("sd35-medium", "image", "stabilityai/stable-diffusion-3.5-medium", gated=True),
    Preset("pixart-sigma", "image", "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", _square(1024)),
    Preset("sana", "image", "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"),
    Preset("stable-cascade", "image", "stabilityai/stable-cascade"),
    Preset("unidiffuser", "image", "thu-ml/unidiffuser-v1"),
    Preset("qwen-image", "image", "Qwen/Qwen-Image", {"num_inference_steps": 50}),
    Preset(
        "z-image-turbo",
        "image",
        "Tongyi-MAI/Z-Image-Turbo",
        _square(1024, num_inference_steps=8, guidance_scale=0.0),
    ),
    Preset("chroma", "image", "lodestones/Chroma1-HD", _square(1024)),
    Preset("hidream", "image", "HiDream-ai/HiDream-I1-Full", _square(1024)),
    Preset("lumina2", "image", "Alpha-VLLM/Lumina-Image-2.0", _square(1024)),
    Preset("auraflow", "image", "fal/AuraFlow", _square(1024)),
    Preset("cogview4", "image", "THUDM/CogView4-6B", _square(1024)),
    Preset("cosmos", "image", "nvidia/Cosmos-Predict2-2B-Text2Image"),
    Preset("cogvideox-2b", "video", "THUDM/CogVideoX-2b", {"num_frames": 49}),
    Preset("cogvideox-5b", "video", "THUDM/CogVideoX-5b", {"num_frames": 49}),
    Preset(
        "hunyuan-video",
        "video",
        "hunyuanvideo-community/HunyuanVideo",
        {"height": 320, "width": 512, "num_frames": 61, "num_inference_steps": 30},
    ),
    Preset("hunyuan-video-1.5", "video", "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v"),
    Preset(
        "wan",
        "video",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        {"height": 480, "width": 832, "num_frames": 81, "guidance_scale": 5.0},
    ),
    Preset(
        "wan-14b",
        "video",
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        {"height": 720, "width": 1280, "num_frames": 81, "guidance_scale": 5.0},
    ),
    Preset(
        "ltx-video",
        "video",
        "Lightricks/LTX-Video",
        {"height": 480, "width": 704, "num_frames": 161, "num_inference_steps": 50},
    ),
    Preset("ltx-2", "video", "Lightricks/LTX-2"),
    Preset("mochi", "video", "genmo/mochi-1-preview"),
    Preset("kandinsky5", "video", "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers"),
    Preset("llama", "text", "meta-llama/Llama-3.1-8B", gated=True),
    Preset("llama2", "text", "meta-llama/Llama-2-7b-hf", gated=True),
    Preset("qwen3", "text", "Qwen/Qwen3-8B"),
    Preset("qwen2.5", "text", "Qwen/Qwen2.5-0.5B"),
    Preset("mistral", "text", "mistralai/Mistral-7B-v0.1"),
    Preset("gemma2", "text", "google/gemma-2-2b", gated=True),
    Preset("phi3", "text", "microsoft/Phi-3-mini-4k-instruct"),
    Preset("phi2", "text", "microsoft/phi-2"),
    Preset("gpt-oss", "text", "openai/gpt-oss-20b"),
    Preset("gemma3", "features", "google/gemma-3-4b-it", gated=True),
    Preset("llava", "features", "llava-hf/llava-1.5-7b-hf"),
    Preset("vit", "features", "google/vit-base-patch16-224"),
    Preset("whisper", "features", "openai/whisper-tiny"),
    Preset("t5-xxl", "features", "google/flan-t5-xxl"),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
