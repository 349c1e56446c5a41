"""What other models of diffusers take, and autoencoders: inputs for one forward."""

from __future__ import annotations

from typing import Any

import torch
from diffusers_family import Inputs, Size, grid_ids, kept, noise, steps


def picture(c: Any, size: Size) -> Inputs:
    """What an autoencoder of pictures reads."""
    channels = getattr(c, "in_channels", None) or 3
    return {"sample": noise(size.batch, channels, size.height, size.width)}


def film(c: Any, size: Size) -> Inputs:
    """What an autoencoder of films reads."""
    channels = getattr(c, "in_channels", None) or getattr(c, "input_channels", 3)
    return {"sample": noise(size.batch, channels, size.frames, size.height, size.width)}


def film_of_means(c: Any, size: Size) -> Inputs:
    """As `film`, where the model would draw from the posterior otherwise."""
    return {**film(c, size), "sample_posterior": False}


def mochi_film(c: Any, size: Size) -> Inputs:
    return {"sample": noise(size.batch, 3, size.frames, size.height, size.width)}


def frames(c: Any, size: Size) -> Inputs:
    given = noise(size.batch * size.frames, c.in_channels, size.height, size.width)
    return {"sample": given, "num_frames": size.frames}


def wave(c: Any, size: Size) -> Inputs:
    """A wave, which the model turns into its spectrum."""
    return {"sample": noise(size.batch, c.hop_length * size.width)}


def unet(c: Any, size: Size) -> Inputs:
    return {
        "sample": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": torch.tensor(10),
    }


def audioldm2(c: Any, size: Size) -> Inputs:
    first, second = c.cross_attention_dim[0]
    return {
        **unet(c, size),
        "encoder_hidden_states": noise(size.batch, size.text, first, seed=2),
        "encoder_hidden_states_1": noise(size.batch, size.text, second, seed=3),
        "encoder_attention_mask": kept(size),
        "encoder_attention_mask_1": kept(size),
    }


def prior(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.embedding_dim),
        "timestep": steps(size),
        "proj_embedding": noise(size.batch, c.embedding_dim, seed=2),
        "encoder_hidden_states": noise(size.batch, c.num_embeddings, c.embedding_dim, seed=3),
        "attention_mask": kept(Size(1, 1, text=c.num_embeddings, batch=size.batch)),
    }


def tokens(c: Any, size: Size) -> Inputs:
    """Image tokens and text with position ids, as the FLUX line takes them."""
    return {
        "hidden_states": noise(size.batch, size.height * size.width, c.in_channels),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "timestep": steps(size, 0.5),
        "img_ids": grid_ids(size),
        "txt_ids": torch.zeros(size.text, 3),
    }


def bria_fibo(c: Any, size: Size) -> Inputs:
    blocks = c.num_layers + c.num_single_layers
    layers = [
        noise(size.batch, size.text, c.text_encoder_dim, seed=5 + number)
        for number in range(blocks)
    ]
    return {**tokens(c, size), "text_encoder_layers": layers}


def prx(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, size.text, c.context_in_dim, seed=2),
        "attention_mask": kept(size),
    }


def wan(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.frames, size.height, size.width),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_dim, seed=2),
    }


def anyflow(c: Any, size: Size) -> Inputs:
    given = wan(c, size)
    given["hidden_states"] = given["hidden_states"].transpose(1, 2)
    when = torch.full((size.batch, size.frames), 500.0)
    return {**given, "timestep": when, "r_timestep": when * 0.5}


def framepack(c: Any, size: Size) -> Inputs:
    history = (size.batch, c.in_channels, 2, size.height, size.width)
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.frames, size.height, size.width),
        "timestep": steps(size).long(),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "encoder_attention_mask": kept(size),
        "pooled_projections": noise(size.batch, c.pooled_projection_dim, seed=3),
        "image_embeds": noise(size.batch, 5, c.image_proj_dim, seed=4),
        "indices_latents": torch.arange(size.frames),
        "guidance": steps(size, 1000.0),
        "latents_clean": noise(*history, seed=5),
        "indices_latents_clean": torch.arange(2),
        "latents_history_2x": noise(*history, seed=6),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": noise(size.batch, c.in_channels, 4, *history[3:], seed=7),
        "indices_latents_history_4x": torch.arange(4),
    }


def consisid(c: Any, size: Size) -> Inputs:
    angles = noise(size.height * size.width // 4 * size.frames, c.attention_head_dim, seed=3)
    return {
        "hidden_states": noise(size.batch, size.frames, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "timestep": steps(size),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def omnigen(c: Any, size: Size) -> Inputs:
    image = size.height * size.width // c.patch_size**2
    total = size.text + 1 + image
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "timestep": steps(size, 0.5),
        "input_ids": torch.arange(size.text).expand(size.batch, -1),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(size.batch, total, total),
        "position_ids": torch.arange(total).expand(size.batch, -1),
    }


def stable_audio3(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.io_channels, size.width),
        "timestep": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, size.text, c.cond_token_dim, seed=2),
        "global_hidden_states": noise(size.batch, c.global_cond_dim, seed=3),
        "encoder_attention_mask": kept(size),
    }


def ace_step(c: Any, size: Size) -> Inputs:
    context = c.in_channels - c.audio_acoustic_hidden_dim
    return {
        "hidden_states": noise(size.batch, size.width, c.audio_acoustic_hidden_dim),
        "timestep": steps(size, 0.5),
        "timestep_r": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, size.text, c.hidden_size, seed=2),
        "context_latents": noise(size.batch, size.width, context, seed=3),
    }


def nucleus(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, size.height * size.width, c.in_channels),
        "img_shapes": [(1, size.height, size.width)] * size.batch,
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "encoder_hidden_states_mask": kept(size),
        "timestep": steps(size, 0.5),
    }


def joyimage(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.frames, size.height, size.width),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_dim, seed=2),
    }


def motif(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.frames, size.height, size.width),
        "timestep": steps(size),
        "encoder_hidden_states": noise(size.batch, size.text, c.text_embed_dim, seed=2),
        "encoder_attention_mask": kept(size),
    }


def sana_video(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.frames, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=2),
        "encoder_attention_mask": kept(size),
        "timestep": steps(size),
    }


def sana_control(c: Any, size: Size) -> Inputs:
    shape = (size.batch, c.in_channels, size.height, size.width)
    return {
        "hidden_states": noise(*shape),
        "encoder_hidden_states": noise(size.batch, size.text, c.caption_channels, seed=2),
        "encoder_attention_mask": kept(size),
        "timestep": steps(size),
        "controlnet_cond": noise(*shape, seed=4),
    }


def qwen_control(c: Any, size: Size) -> Inputs:
    image = (size.batch, size.height * size.width, c.in_channels)
    return {
        "hidden_states": noise(*image),
        "controlnet_cond": noise(*image, seed=4),
        "encoder_hidden_states": noise(size.batch, size.text, c.joint_attention_dim, seed=2),
        "encoder_hidden_states_mask": kept(size),
        "timestep": steps(size, 0.5),
        "img_shapes": [[(1, size.height, size.width)]] * size.batch,
    }


def hunyuan_dit_control(c: Any, size: Size) -> Inputs:
    angles = noise(size.height * size.width // c.patch_size**2, c.attention_head_dim, seed=5)
    image = (size.batch, c.in_channels, size.height, size.width)
    return {
        "hidden_states": noise(*image),
        "timestep": steps(size),
        "controlnet_cond": noise(*image, seed=4),
        "encoder_hidden_states": noise(size.batch, c.text_len, c.cross_attention_dim, seed=2),
        "text_embedding_mask": torch.ones(size.batch, c.text_len),
        "encoder_hidden_states_t5": noise(
            size.batch, c.text_len_t5, c.cross_attention_dim_t5, seed=3
        ),
        "text_embedding_mask_t5": torch.ones(size.batch, c.text_len_t5),
        "image_meta_size": torch.ones(size.batch, 6),
        "style": torch.zeros(size.batch, dtype=torch.long),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def longcat_audio(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, size.width, c.latent_dim),
        "encoder_hidden_states": noise(size.batch, size.text, c.dit_text_dim, seed=2),
        "encoder_attention_mask": kept(size),
        "timestep": steps(size, 0.5),
        "latent_cond": noise(size.batch, size.width, c.latent_dim, seed=3),
    }


def music3(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.width),
        "timestep": steps(size, 0.5),
        "encoder_hidden_states": noise(size.batch, size.width, c.condition_dim, seed=2),
    }


def block_2d(c: Any, size: Size) -> Inputs:
    return {
        "hidden_states": noise(size.batch, c.in_channels, size.height, size.width),
        "encoder_hidden_states": noise(size.batch, size.text, c.cross_attention_dim, seed=2),
    }


def block_in_time(c: Any, size: Size) -> Inputs:
    shape = (size.batch * size.frames, c.in_channels, size.height, size.width)
    return {"hidden_states": noise(*shape), "num_frames": size.frames}
