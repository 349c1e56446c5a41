"""Tiny models of transformers' true classes, for any family: its own config class with every size
brought down by the size's name, random weights, and inputs for one forward on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models.transformers_models import VOCAB
from packaging.version import Version
from torch import Tensor, nn
from transformers_families import FAMILIES, HEADS, KV_HEADS, WIDTH, Family
from transformers_inputs import FRAMES, IMAGE, MEL, usual_inputs

from sagepatch.patchers.model import Parts, search

# The release that the table of model types was made with.
NEWEST = Version("5.24")
HEAD_DIM, LAYERS, PATCH = 16, 2, 8

# What a config calls its sizes, and what each is brought down to. The first pattern that matches a
# whole name decides; names that match none keep their defaults.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(src_|tgt_|text_)?vocab_size|vocab_size_per_layer_input", VOCAB),
    (
        r"hidden_size|d_model|n_embd|dim|(encoder_|decoder_|cross_attention_)?hidden_(size|dim)"
        r"|embed_dim|emb_dim|embedding_size|word_embed_proj_dim|embed_proj_dim|projection_dim"
        r"|out_hidden_size|output_hidden_size|model_dim|attention_hidden_size|text_embed_dim",
        WIDTH,
    ),
    (
        r"num_hidden_layers|n_layers?|num_(encoder_|decoder_|block_)?layers"
        r"|(encoder|decoder|text_encoder)_layers|depth",
        LAYERS,
    ),
    (
        r"(num|n)_(attention_|encoder_attention_|decoder_attention_)?heads?"
        r"|(encoder|decoder)_attention_heads",
        HEADS,
    ),
    (r"(encoder_|decoder_)?num_(global_)?key_value_heads|n_head_kv", KV_HEADS),
    (r"(attention_|global_|swa_)?head_dim|attention_head_size|d_kv", HEAD_DIM),
    (
        r"(encoder_|moe_|shared_|shared_expert_|dense_)?intermediate_(size|dim)|d_ff|n_inner"
        r"|((encoder|decoder)_)?ffn_dim|ffn_hidden_size|mlp_dim|feed_forward_hidden_size"
        r"|dim_feedforward",
        96,
    ),
    (r"max_(position_embeddings|source_positions|target_positions|sequence_length)", 128),
    (r"n_positions|n_ctx", 128),
    # Every expert takes part: which ones do must not hang on the rounding of an attention output.
    (
        r"num(_local|_routed)?_experts|n_routed_experts|moe_num_experts|num_experts_per_tok(en)?"
        r"|moe_(topk|top_k|k)|top_k_experts|num_selected_experts|router_top_k|n_activated_experts",
        2,
    ),
    (r"n_group|topk_group|n_shared_experts|(moe_)?num_shared_experts|first_k_dense_replace", 1),
    (r"kv_lora_rank", 16),
    (r"q_lora_rank", 24),
    (r"qk_nope_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"v_head_dim", 12),
    (r"image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_frames", FRAMES),
    (r"sliding_window|window_size|attention_window", 8),
    (r"num_mel_bins", MEL),
    (r"type_vocab_size", 2),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_n_heads", 8),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id", 2),
    (r"image_token_(id|index)", 95),
    (r"video_token_(id|index)", 96),
    (r"audio_token_(id|index)", 97),
    (r".*_token_(id|index)", 94),
)
_COMPILED = tuple((re.compile(pattern), size) for pattern, size in _SIZES)


@dataclass(frozen=True)
class Tiny:
    """One tiny model with the inputs of one forward."""

    family: str
    model: nn.Module
    inputs: dict[str, Any]

    def outputs(self) -> list[Tensor]:
        """Every floating tensor that one forward gives, caches left out; models that draw random
        numbers draw the same each time.
        """
        torch.manual_seed(1)
        with torch.no_grad():
            return list(_floating(self.model(**self.inputs)))


def build(model_type: str) -> Tiny:
    """The tiny model of one model type of `transformers.AutoConfig`.

    Raises whatever the family raises where its config has not been brought down consistently.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    family = FAMILIES.get(model_type, Family())
    names = MODEL_MAPPING_NAMES[model_type]
    owner = getattr(transformers, names if isinstance(names, str) else names[0])
    config = tiny_config(CONFIG_MAPPING[model_type], family.config)
    torch.manual_seed(0)
    model = owner(config).eval()
    if family.spread:
        _spread(model)
    inputs = usual_inputs(model) if family.inputs is None else family.inputs(model)
    return Tiny(model_type, model, inputs)


def installed(model_type: str, *, reached: bool = False) -> Tiny:
    """As `build`; skips the running test where the installed transformers is older than the family,
    or with `reached` older than its way to a patcher (the table is made with `NEWEST`).
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if model_type not in MODEL_MAPPING_NAMES:
        pytest.skip("this transformers is older than the family")
    tiny = build(model_type)
    older = Version(transformers.__version__) < NEWEST
    if reached and older and not search(Parts("", {"": tiny.model})).sites:
        pytest.skip("in this transformers the family computes its scores by hand")
    return tiny


def tiny_config(owner: type, fields: Mapping[str, Any]) -> Any:
    """A config of class `owner` with its sizes brought down, nested configs included."""
    defaults: Any = owner()
    nested: dict[str, Any] = getattr(owner, "sub_configs", None) or {}
    chosen: dict[str, Any] = {}
    for name in (name for name in vars(defaults) if not name.startswith("_")):
        if name in nested or name in fields:
            continue
        small = _small(defaults, name)
        if small is not None:
            chosen[name] = small
    sections = _sections(defaults, chosen)
    if sections is not None and "rope_parameters" not in fields:
        chosen["rope_parameters"] = sections
    for name in nested:
        part = getattr(defaults, name, None)
        inner = dict(fields.get(name) or {})
        if "model_type" in inner:
            chosen[name] = inner
            continue
        if part is not None and type(part).sub_configs is not None and hasattr(part, "model_type"):
            chosen[name] = tiny_config(type(part), inner).to_dict()
    return owner(**(chosen | {k: v for k, v in fields.items() if k not in nested}))


def _small(defaults: Any, name: str) -> int | list[int] | tuple[int, ...] | None:
    """The small value of one field; None for what is no size or stays as it is."""
    size, value = _size(name), vars(defaults)[name]
    if name == "head_dim" and (value is None or hasattr(defaults, "qk_rope_head_dim")):
        return None if value is not None else size
    if size is None or isinstance(value, bool):
        return None
    several = isinstance(value, list | tuple)
    if isinstance(value, int) or (several and name.endswith("_token_id")):
        return size
    if several and value and isinstance(value[0], int):
        return type(value)([size] * len(value))
    return None


def _size(name: str) -> int | None:
    return next((size for pattern, size in _COMPILED if pattern.fullmatch(name)), None)


def _sections(defaults: Any, chosen: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary parameters whose sections (time, height, width) fit the small head."""
    rope = vars(defaults).get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    width = int(chosen.get("head_dim", HEAD_DIM) * rope.get("partial_rotary_factor", 1.0)) // 2
    third = width // 3
    sections = [width - 2 * third, third, third]
    return dict(rope) | {"mrope_section": sections[: len(rope["mrope_section"])]}


def _spread(model: nn.Module) -> None:
    """Larger weights than the usual start, so that attention has something to choose."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name and parameter.is_floating_point():
            nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)


def _floating(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        if out.is_floating_point() and out.numel():
            yield out
    elif isinstance(out, Mapping):
        for key, value in out.items():
            # Some models return the maps of eager attention though nobody asked for them.
            if "attentions" not in key:
                yield from _floating(value)
    elif isinstance(out, list | tuple):
        for value in out:
            yield from _floating(value)
