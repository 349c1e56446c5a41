"""Holds the sizes of the four networks and the building of them; knows nothing of training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TEXT_WIDTH = 128
LATENT_CHANNELS = 4
IMAGE_SIZE = 128


@dataclass(frozen=True)
class Sizes:
    """Sizes of the denoiser: width = heads x 64."""

    heads: int = 3
    double_blocks: int = 3
    single_blocks: int = 8


@dataclass
class Networks:
    """The trained parts of the flow model; parameters in float32."""

    transformer: Any
    clip: Any
    t5: Any

    def modules(self) -> list[nn.Module]:
        """The three networks, in a fixed order."""
        return [self.transformer, self.clip, self.t5]


def make_autoencoder(channels: tuple[int, int] = (32, 64)) -> Any:
    """An `AutoencoderKL` that halves each side: 128x128 RGB to 64x64 latents of 4 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=16,
        sample_size=IMAGE_SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def make_transformer(sizes: Sizes) -> Any:
    """A `FluxTransformer2DModel` whose modulations and last layer start at zero."""
    from diffusers import FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=LATENT_CHANNELS * 4,
        num_layers=sizes.double_blocks,
        num_single_layers=sizes.single_blocks,
        attention_head_dim=64,
        num_attention_heads=sizes.heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 28, 28),
    )
    for name, module in transformer.named_modules():
        modulates = name.split(".")[-1] == "linear" and ".norm" in f".{name}"
        if isinstance(module, nn.Linear) and (modulates or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return transformer


def make_text_encoders(clip_tokenizer: Any, word_tokenizer: Any) -> tuple[Any, Any]:
    """A `CLIPTextModel` (pooled sentence) and a `T5EncoderModel` (one vector a word)."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=clip_tokenizer.model_max_length,
            projection_dim=TEXT_WIDTH,
            bos_token_id=clip_tokenizer.bos_token_id,
            eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(word_tokenizer),
            d_model=TEXT_WIDTH,
            d_kv=32,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=word_tokenizer.pad_token_id,
            eos_token_id=word_tokenizer.eos_token_id,
        )
    )
    return clip, t5


def make_networks(
    sizes: Sizes, clip_tokenizer: Any, word_tokenizer: Any, device: str | torch.device
) -> Networks:
    """All three networks in training mode on the device."""
    clip, t5 = make_text_encoders(clip_tokenizer, word_tokenizer)
    parts = [make_transformer(sizes), clip, t5]
    return Networks(*(part.to(device).train() for part in parts))
