"""Generation with patched models: every kind of cache and decoding, packed sequences, pictures and
text in one model. Prefill is quantised, a single new token is exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from models.transformers_models import VOCAB, ids, noise
from packaging.version import Version
from torch import Tensor, nn
from transformers_tiny import NEWEST, build, installed, tiny_config
from transformers_types import model_types

import sagepatch
from sagepatch.layer import SHORT
from sagepatch.patchers.transformers_attention import MAP_WANTED

# The newer name of the argument is unknown to the oldest transformers that is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")

NEW = 6
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
DECODERS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "falcon": "FalconForCausalLM",
}
ENCODER_DECODERS = {
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}


def _with_head(model_type: str) -> nn.Module:
    """A family's model with its language head, tiny."""
    config = build(model_type).model.config
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, (DECODERS | ENCODER_DECODERS)[model_type])(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name and model_type != "t5":
            nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


def _prompt() -> dict[str, Tensor]:
    """Two prompts of 21 and 12 tokens, the second padded on its left."""
    tokens, mask = ids(length=21), torch.ones(2, 21, dtype=torch.long)
    tokens[1, :9], mask[1, :9] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_prefill_runs_the_kernel_and_decoding_is_exact(model_type: str, cache: str) -> None:
    # cases 14, 41, 42
    model, options = _with_head(model_type), GREEDY | {"cache_implementation": cache}
    if (model_type, cache) == ("llama4_text", "static") and Version(
        transformers.__version__
    ) < NEWEST:
        pytest.skip("this transformers cannot build its chunked masks for a static cache")
    if cache == "static" and not getattr(model, "_can_compile_fullgraph", False):
        pytest.skip("this model takes no static cache")
    plain = model.generate(**_prompt(), **options)
    sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**_prompt(), **options), plain)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    out = model.generate(**_prompt(), **options)
    assert out.shape == plain.shape
    for layer in patch.layers:
        assert layer.record.by_variant == {"emulated.sage2_8": 1, "sdpa.exact": NEW - 1}
        assert layer.record.fallbacks == {SHORT: NEW - 1}
    patch.restore()
    assert torch.equal(model.generate(**_prompt(), **options), plain)


def _decoders() -> list[str]:
    """Every patched model type with a causal language head of its own."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    return [
        model_type
        for model_type in model_types("patched")
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and model_type not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", _decoders())
def test_every_decoder_generates(model_type: str, cache: str) -> None:
    # cases 14, 41, 42
    from transformers import AutoModelForCausalLM

    config = installed(model_type, reached=True).model.config
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if cache == "static" and not getattr(model, "_can_compile_fullgraph", False):
        pytest.skip("this model takes no static cache")
    options = GREEDY | {"cache_implementation": cache}
    plain = model.generate(**_prompt(), **options)
    sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**_prompt(), **options), plain)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    model.generate(**_prompt(), **options)
    for layer in patch.layers:
        if model_type == "whisper" and layer.kind == "cross":
            continue  # its decoder alone has nothing to look across at
        # Some layers attend twice a token: differential attention, loops over the layers.
        counts = layer.record.by_variant
        assert counts["sdpa.exact"] == (NEW - 1) * counts["emulated.sage2_8"] > 0, layer.name
        assert set(layer.record.fallbacks) == {SHORT}
    patch.restore()
    assert torch.equal(model.generate(**_prompt(), **options), plain)


@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_an_encoder_decoder_quantises_its_encoder(model_type: str) -> None:
    model, options = _with_head(model_type), GREEDY | {"decoder_start_token_id": 1}
    plain = model.generate(**_prompt(), **options)
    sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**_prompt(), **options), plain)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    model.generate(**_prompt(), **options)
    for layer in patch.layers:
        # One token at a time in the decoder, from its start token on; its encoder runs once.
        encoder = "encoder." in layer.name and "decoder." not in layer.name
        want = {"emulated.sage2_8": 1} if encoder else {"sdpa.exact": NEW}
        assert layer.record.by_variant == want, layer.name


MANNERS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "use_cache": True},
    "prefill in chunks": {"prefill_chunk_size": 8},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("manner", MANNERS)
def test_every_manner_of_decoding(manner: str) -> None:
    # cases 14, 41: a chunk or a guess of several tokens against a filled cache is quantised too
    model = _with_head("llama")
    prompt = _prompt() if manner != "prompt lookup" else {"input_ids": ids(1, 21).repeat(1, 2)}
    options = GREEDY | MANNERS[manner]

    def run() -> Tensor:
        torch.manual_seed(5)
        tokens: Tensor = model.generate(**prompt, **options)
        return tokens

    plain = run()
    sagepatch.apply(model, variant="exact")
    assert torch.equal(run(), plain)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    assert run().shape[1] == plain.shape[1]
    for layer in patch.layers:
        assert layer.record.by_variant["emulated.sage2_8"] >= 1
        assert set(layer.record.fallbacks) <= {SHORT}


def test_maps_of_generated_tokens() -> None:
    # case 45
    model = _with_head("llama")
    options = GREEDY | {"output_attentions": True, "return_dict_in_generate": True}
    model.set_attn_implementation("eager")
    plain = model.generate(**_prompt(), **options)
    model.set_attn_implementation("sdpa")
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    out = model.generate(**_prompt(), **options)
    assert len(out.attentions) == NEW
    for ours, theirs in zip(out.attentions, plain.attentions, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert all(layer.record.fallbacks == {MAP_WANTED: NEW} for layer in patch.layers)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool(0 < (a - b).norm() <= 0.15 * b.norm())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3"])
def test_packed_sequences_do_not_see_each_other(model_type: str) -> None:
    # case 16: three sequences in one row, told apart by positions that start again
    model = _with_head(model_type)
    parts = [ids(1, length, seed=length) for length in (9, 1, 13)]
    packed = {
        "input_ids": torch.cat(parts, 1),
        "position_ids": torch.cat([torch.arange(p.shape[1]) for p in parts])[None],
        "use_cache": False,
    }
    with torch.no_grad():
        alone = torch.cat([model(input_ids=p).logits for p in parts], 1)
        plain = model(**packed).logits
        assert torch.allclose(plain, alone, atol=1e-3)
        sagepatch.apply(model, variant="exact")
        assert torch.allclose(model(**packed).logits, plain, atol=1e-4)
        sagepatch.apply(model, variant="sage2_8", emulate=True)
        out = model(**packed).logits
        assert _near(out, alone)
        # Another member in the middle moves nobody: not its neighbours, not the last one.
        other = packed["input_ids"].clone()
        other[:, 9] = (other[:, 9] + 1) % VOCAB
        moved = model(**packed | {"input_ids": other}).logits
    assert _near(moved[:, 10:], alone[:, 10:])


def _llava() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    config = tiny_config(
        transformers.LlavaConfig,
        {
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64}
            | {"image_size": 32, "patch_size": 8, "num_hidden_layers": 3}
            | {"num_attention_heads": 4, "intermediate_size": 96},
            "image_token_index": 95,
            "image_seq_length": 16,
        },
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    tokens = ids(1, 24)
    tokens[:, 3:19] = 95
    return model, {"input_ids": tokens, "pixel_values": noise(1, 3, 32, 32)}


def test_pictures_and_text_in_one_model() -> None:
    # case 44: both towers by their own rows; the language model decodes exactly
    model, inputs = _llava()
    plain = model.generate(**inputs, **GREEDY)
    sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**inputs, **GREEDY), plain)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    model.generate(**inputs, **GREEDY)
    runs = {layer.name: layer.record.by_variant for layer in patch.layers}
    for name, counts in runs.items():
        once = {"emulated.sage2_8": 1}
        seen = "vision_tower" in name
        assert counts == (once if seen else once | {"sdpa.exact": NEW - 1}), name
    assert sum("vision_tower" in name for name in runs) == 3


def test_one_tower_of_a_pair() -> None:
    model, inputs = _llava()
    with torch.no_grad():
        plain = model(**inputs).logits
        patch = sagepatch.apply(model.model.vision_tower, variant="sage2_8", emulate=True)
        assert not torch.equal(model(**inputs).logits, plain)
        assert len(patch.layers) == 3
        assert model.config.text_config._attn_implementation == "sdpa"
        patch.restore()
        assert torch.equal(model(**inputs).logits, plain)


def test_continuous_batching_refuses_our_name() -> None:
    # It takes transformers' own names alone; the refusal is its own, and restoring is the way.
    from transformers import GenerationConfig

    model = _with_head("llama")
    options = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=2)
    with (
        sagepatch.apply(model, variant="exact"),
        pytest.raises(ValueError, match="is not supported"),
    ):
        model.generate_batch([[5, 6, 7]], generation_config=options)
    assert model.config._attn_implementation == "sdpa"
