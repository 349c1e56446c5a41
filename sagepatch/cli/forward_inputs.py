"""What one forward of a denoiser takes at its pipeline's usual size, by the denoiser's class, as
shapes for a device that holds no numbers. Knows no weights and no pipelines.

Sizes are the defaults of the pipelines' calls in diffusers 0.42; the downscaling of pictures and
frames is that of the autoencoder each pipeline comes with.

Not here, as its forward takes numbers: Qwen-Image 2.1 cuts its sequence into segments by a mask's
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sagepatch.cli import forward_films as films
from sagepatch.cli import forward_pictures as pictures
from sagepatch.cli.forward_sizes import Forward


def _sampled(scale: int) -> Callable[[Any], tuple[int, int, int] | None]:
    """The config's own size in latents."""

    def pixels(config: Any) -> tuple[int, int, int] | None:
        side = config.sample_size
        return (side * scale, side * scale, 1) if isinstance(side, int) else None

    return pixels


_SQUARE = (1024, 1024, 1)
FORWARDS: dict[str, Forward] = {
    "FluxTransformer2DModel": Forward(pictures.flux, 16, 512, _SQUARE),
    "Flux2Transformer2DModel": Forward(pictures.flux2, 16, 512, _SQUARE),
    "ChromaTransformer2DModel": Forward(pictures.chroma, 16, 512, _SQUARE),
    # CLIP's 77 tokens and 256 of T5.
    "SD3Transformer2DModel": Forward(pictures.sd3, 8, 333, _SQUARE),
    "Lumina2Transformer2DModel": Forward(pictures.lumina2, 8, 256, _SQUARE),
    "HiDreamImageTransformer2DModel": Forward(pictures.hidream, 8, 128, _SQUARE),
    "AuraFlowTransformer2DModel": Forward(pictures.auraflow, 8, 256, _SQUARE),
    "PixArtTransformer2DModel": Forward(pictures.pixart, 8, 300, _sampled(8)),
    "SanaTransformer2DModel": Forward(pictures.sana, 32, 300, _sampled(32)),
    "QwenImageTransformer2DModel": Forward(pictures.qwen, 16, 512, _SQUARE),
    "ZImageTransformer2DModel": Forward(pictures.z_image, 8, 512, _SQUARE),
    "CogView4Transformer2DModel": Forward(pictures.cogview, 8, 224, _SQUARE),
    "StableCascadeUNet": Forward(pictures.cascade, 1, 77, _SQUARE),
    "UniDiffuserModel": Forward(pictures.unidiffuser, 8, 77, _sampled(8)),
    "UNet2DConditionModel": Forward(pictures.unet, 8, 77, _sampled(8)),
    "WanTransformer3DModel": Forward(films.wan, 8, 512, (480, 832, 81), 4),
    "CogVideoXTransformer3DModel": Forward(films.cogvideox, 8, 226, films.cogvideox_pixels, 4),
    "HunyuanVideoTransformer3DModel": Forward(films.hunyuan_video, 8, 256, (720, 1280, 129), 4),
    "HunyuanVideo15Transformer3DModel": Forward(
        films.hunyuan_video15, 16, 1000, films.hunyuan_video15_pixels, 4
    ),
    "LTXVideoTransformer3DModel": Forward(films.ltx, 32, 128, (512, 704, 161), 8),
    "LTX2VideoTransformer3DModel": Forward(films.ltx2, 32, 1024, (512, 768, 121), 8),
    "MochiTransformer3DModel": Forward(films.mochi, 8, 256, (480, 848, 19), 6),
    "CosmosTransformer3DModel": Forward(films.cosmos, 8, 512, films.cosmos_pixels, 4),
    "Kandinsky5Transformer3DModel": Forward(films.kandinsky5, 8, 256, (512, 768, 121), 4),
}
