"""Masks of patched transformers models: the future, padding, windows and every kind of cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.transformers_models import (
    VOCAB,
    first_output,
    ids,
    tiny_gemma2,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mistral,
    tiny_whisper,
)
from torch import Tensor, nn

import sagepatch
from sagepatch.layer import SHORT


def _logits(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits


def _near(a: Tensor, b: Tensor) -> bool:
    """As near as two roundings of 8 bits are in these models."""
    return bool((a - b).norm() <= 0.15 * b.norm())


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_gemma2, tiny_gpt_oss])
def test_earlier_tokens_do_not_see_the_last(build: Any) -> None:
    # case 41
    model, inputs = build()
    tokens = inputs["input_ids"]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % VOCAB
    sagepatch.apply(model, variant="exact")
    first, second = (_logits(model, input_ids=t) for t in (tokens, other))
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])
    # Quantised, the scales of the last block move: no more than rounding does.
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    first, second = (_logits(model, input_ids=t) for t in (tokens, other))
    assert _near(first[:, :-1], second[:, :-1])


def _left_padded() -> dict[str, Tensor]:
    tokens, mask = ids(length=21), torch.ones(2, 21, dtype=torch.long)
    tokens[1, :9], mask[1, :9] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding_is_not_seen(implementation: str) -> None:
    # case 41
    model, _ = tiny_llama(attn_implementation=implementation)
    inputs = _left_padded()
    plain = first_output(model, inputs)
    patch = sagepatch.apply(model, variant="exact")
    assert torch.allclose(first_output(model, inputs)[1, 9:], plain[1, 9:], atol=1e-4)
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    out = first_output(model, inputs)
    assert _near(out[1, 9:], plain[1, 9:])
    other = inputs["input_ids"].clone()
    other[1, :9] = 55
    again = first_output(model, inputs | {"input_ids": other})
    assert _near(again[1, 9:], out[1, 9:])
    # A bool mask says which keys nobody sees, so they do not even move the scales.
    assert torch.equal(again[1, 9:], out[1, 9:]) == (implementation == "sdpa")
    assert patch.restored


def test_padded_alone_equals_unpadded() -> None:
    model, _ = tiny_llama()
    inputs = _left_padded()
    sagepatch.apply(model, variant="exact")
    padded = first_output(model, inputs)[1, 9:]
    alone = first_output(model, {"input_ids": inputs["input_ids"][1:, 9:]})[0]
    assert torch.allclose(padded, alone, atol=1e-3)


# The newer name of the argument is unknown to the oldest transformers that is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")

GENERATE = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("cache", ["dynamic", "static", "no cache"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_gemma2])
def test_greedy_generation_of_exact_layers_is_the_model_s_own(build: Any, cache: str) -> None:
    # cases 14, 41, 42
    model, _ = build()
    options = GENERATE | ({"use_cache": False} if cache == "no cache" else {})
    if cache != "no cache":
        options["cache_implementation"] = cache
    plain = model.generate(**_left_padded(), **options)
    sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**_left_padded(), **options), plain)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_one_token_at_a_time_runs_exact_by_rule(cache: str) -> None:
    # case 14
    model, _ = tiny_llama()
    patch = sagepatch.apply(model, variant="sage1_b", emulate=True)
    model.generate(**_left_padded(), **GENERATE, cache_implementation=cache)
    for layer in patch.layers:
        assert layer.record.by_variant == {"emulated.sage1_b": 1, "sdpa.exact": 11}
        assert layer.record.fallbacks == {SHORT: 11}


def test_quantised_generation_equals_greedy() -> None:
    # A model that counts on from the last token, so sure of it that rounding moves no choice.
    model, inputs = tiny_llama()
    with torch.no_grad():
        embedded = nn.init.normal_(model.model.embed_tokens.weight)
        model.lm_head.weight.copy_(embedded.roll(1, dims=0))
    plain = model.generate(**inputs, **GENERATE)
    assert not (plain[:, -8:] == plain[:, -9:-1]).any()
    sagepatch.apply(model, variant="emulated.sage2_8", emulate=True)
    assert torch.equal(model.generate(**inputs, **GENERATE), plain)


def test_prefill_of_a_static_cache_reads_what_is_written() -> None:
    # case 41: 9 queries against a cache of 30, of which 21 are not written yet
    from transformers import StaticCache

    model, _ = tiny_llama()
    tokens = ids(length=9)
    plain = _logits(model, input_ids=tokens)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)

    def cache() -> StaticCache:
        return StaticCache(config=model.config, max_cache_len=30)

    assert _near(_logits(model, input_ids=tokens, past_key_values=cache()), plain)
    assert {spec.kv_len for spec in patch.layers[0].record.specs} == {9}
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[1, :4] = 0
    _logits(model, input_ids=tokens, attention_mask=padded, past_key_values=cache())
    assert {spec.kv_len for spec in patch.layers[0].record.specs} == {9, 30}


@pytest.mark.parametrize("kind", ["static", "padded"])
def test_a_token_after_a_cache_is_the_model_s_own_where_exact_was_asked_for(kind: str) -> None:
    # One query, a mask and shared key heads: transformers packs the heads, torch's SDPA would
    # compute all scores of grouped ones at length.
    from transformers import DynamicCache, StaticCache

    model, _ = tiny_llama()
    tokens, mask = ids(length=10), torch.ones(2, 10, dtype=torch.long)
    if kind == "padded":
        mask[1, :4] = 0

    def decoded() -> Tensor:
        config = model.config
        static = kind == "static"
        cache = StaticCache(config=config, max_cache_len=30) if static else DynamicCache()
        _logits(model, input_ids=tokens[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
        return _logits(model, input_ids=tokens[:, 9:], attention_mask=mask, past_key_values=cache)

    plain = decoded()
    patch = sagepatch.apply(model, variant="exact")
    assert all(torch.equal(decoded(), plain) for _ in range(2))
    assert {layer.record.by_variant["sdpa.exact"] for layer in patch.layers} == {4}
    assert not any(layer.record.fallbacks for layer in patch.layers)


def test_a_second_chunk_sees_the_first() -> None:
    from transformers import DynamicCache

    model, _ = tiny_llama()
    tokens = ids(length=21)
    plain = _logits(model, input_ids=tokens)
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    cache = DynamicCache(config=model.config)
    parts = [
        _logits(model, input_ids=part, past_key_values=cache)
        for part in (tokens[:, :13], tokens[:, 13:])
    ]
    assert _near(torch.cat(parts, 1), plain)


@pytest.mark.parametrize("build", [tiny_mistral, tiny_gemma2])
def test_a_window_of_eight_is_the_token_and_the_seven_before(build: Any) -> None:
    # case 42: one layer, so that nothing further back can arrive by way of another layer
    model, inputs = build()
    model.model.layers = model.model.layers[:1]
    tokens = inputs["input_ids"][:1]
    sagepatch.apply(model, variant="exact")
    before = _logits(model, input_ids=tokens)[0]
    other = tokens.clone()
    other[0, 20] = (other[0, 20] + 1) % VOCAB
    moved = (_logits(model, input_ids=other)[0] != before).any(-1).nonzero().flatten().tolist()
    assert moved == list(range(20, 28))


def test_windows_quantised_equal_eager() -> None:
    # case 42: a key 9 back made dominant must stay out of sight
    model, inputs = tiny_mistral()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] *= 30
    tokens = inputs["input_ids"].clone()
    tokens[:, 20] = 7
    model.set_attn_implementation("eager")
    eager = _logits(model, input_ids=tokens)
    model.set_attn_implementation("sdpa")
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    assert _near(_logits(model, input_ids=tokens), eager)


def test_a_sliding_cache_longer_than_its_window() -> None:
    # case 42
    model, inputs = tiny_mistral()
    tokens = inputs["input_ids"]
    plain = model.generate(tokens, **GENERATE, output_logits=True, return_dict_in_generate=True)
    patch = sagepatch.apply(model, variant="exact")
    out = model.generate(tokens, **GENERATE, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain.sequences)
    lengths = {spec.kv_len for spec in patch.layers[0].record.specs if spec.q_len == 1}
    assert max(lengths) <= 8


def test_a_mask_of_the_caller_is_honoured() -> None:
    model, _ = tiny_llama()
    tokens = ids(length=21)
    mask = torch.tril(torch.ones(21, 21, dtype=torch.bool))[None, None].repeat(2, 1, 1, 1)
    mask[:, :, 5:, 2] = False
    plain = _logits(model, input_ids=tokens, attention_mask=mask)
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    assert _near(_logits(model, input_ids=tokens, attention_mask=mask), plain)


def test_whisper_generates_as_before() -> None:
    model, inputs = tiny_whisper()
    options = {"max_new_tokens": 8, "do_sample": False}
    features = {"input_features": inputs["input_features"]}
    plain = model.generate(**features, **options)
    patch = sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**features, **options), plain)
    kinds = {layer.kind: layer.record.calls for layer in patch.layers if "decoder" in layer.name}
    assert kinds["cross"] > 0
    assert kinds["self"] > 0
