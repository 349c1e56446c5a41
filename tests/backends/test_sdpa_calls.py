"""What exact attention hands to torch's SDPA: any strides, scales and masks give what FP64 gives,
and shared key heads make the call that transformers makes.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sagepatch
from sagepatch.backends import sdpa
from sagepatch.numerics.recipe import EXACT
from sagepatch.spec import Call

STRIDES = {
    "last axis not dense": lambda B, H, S, D: torch.randn(B, H, D, S).mT,
    "every second number": lambda B, H, S, D: torch.randn(B, H, S, 2 * D)[..., ::2],
    "one number a token": lambda B, H, S, D: torch.randn(B, H, S, 1).expand(B, H, S, D),
    "one token": lambda B, H, S, D: torch.randn(B, H, 1, D).expand(B, H, S, D),
    "one head": lambda B, H, S, D: torch.randn(B, 1, S, D).expand(B, H, S, D),
    "heads innermost": lambda B, H, S, D: torch.randn(B, S, D, H).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("place", range(3), ids="qkv".__getitem__)
def test_any_strides(place: int, name: str, return_lse: bool) -> None:
    torch.manual_seed(0)
    given = list(torch.randn(3, 1, 2, 70, 64))
    given[place] = STRIDES[name](1, 2, 70, 64)
    q, k, v = given
    right = F.scaled_dot_product_attention(*(t.double().contiguous() for t in given))
    if return_lse:
        out, lse = sagepatch.attention(q, k, v, return_lse=True)
        scores = q.double() @ k.double().mT / 8
        assert (lse - scores.logsumexp(3)).abs().max() < 1e-5
    else:
        out = sagepatch.attention(q, k, v)
    assert (out - right).abs().max() < 1e-5


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0, -0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scales_that_are_not_positive(dtype, scale: float, is_causal, return_lse) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64).to(dtype) for n in (130, 700, 700))
    scores = (q.double() @ k.double().mT) * scale
    if is_causal:
        hidden = torch.ones(130, 700, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    right = scores.softmax(3) @ v.double()
    given = sagepatch.attention(q, k, v, is_causal=is_causal, scale=scale, return_lse=return_lse)
    out = given[0] if isinstance(given, tuple) else given
    assert (out - right).abs().max() < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_row_of_the_lowest_numbers_of_any_mask_is_the_mean_of_v(dtype, mask_dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 16).to(dtype)
    mask = torch.zeros(20, 20, dtype=mask_dtype)
    mask[3], mask[5] = torch.finfo(mask_dtype).min, -torch.inf
    for variant, slack in (("exact", 4e-3), ("emulated.sage2_8", 4e-2)):
        out = sagepatch.attention(q, k, v, mask, variant=variant).float()
        assert (out[:, :, 3] - v.float().mean(2)).abs().max() < slack
        assert not out[:, :, 5].any()


def transformers_sdpa() -> ModuleType:
    found = pytest.importorskip("transformers.integrations.sdpa_attention")
    if not hasattr(found, "pack_gqa"):
        pytest.skip("this transformers makes another call of shared heads")
    return found


def original(call: Call) -> Tensor:
    """What transformers makes of the call, in our layout."""
    integration = transformers_sdpa()
    module = SimpleNamespace(num_key_value_groups=call.q.shape[1] // call.k.shape[1])
    causal = call.causal_offset is not None
    out, _ = integration.sdpa_attention_forward(
        *(module, call.q, call.k, call.v, call.attn_mask),
        scaling=call.scale,
        is_causal=causal,
    )
    return out.transpose(1, 2)


def shared(B=2, Hq=8, Hkv=2, Sq=9, Skv=37, D=32, Dv=None, **options) -> Call:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(B, Hq, Sq, D, generator=g)
    k, v = torch.randn(B, Hkv, Skv, D, generator=g), torch.randn(B, Hkv, Skv, Dv or D, generator=g)
    return Call(q, k, v, 1 / math.sqrt(D), **options)


def additive(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads", [1, 8], ids=["mask of all heads", "mask of each head"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("Sq", [1, 9])
@pytest.mark.parametrize("Hkv", [1, 2, 8])
def test_shared_heads_with_a_mask_have_the_bits_of_transformers(Hkv, Sq, kind, heads) -> None:
    mask = additive(2, heads, Sq, 37)
    call = shared(Hkv=Hkv, Sq=Sq, attn_mask=mask > -1 if kind == "bool" else mask)
    assert torch.equal(sdpa.run(call, EXACT)[0], original(call))


@pytest.mark.parametrize("options", [{}, {"Dv": 16}, {"D": 264}, {"causal_offset": 0}], ids=str)
@pytest.mark.parametrize("Sq", [1, 37])
def test_shared_heads_without_a_mask_have_the_bits_of_transformers(Sq: int, options) -> None:
    if Sq == 1 and "causal_offset" in options:
        pytest.skip("transformers takes a single query for the newest")
    call = shared(Sq=Sq, **options)
    assert torch.equal(sdpa.run(call, EXACT)[0], original(call))


@pytest.mark.parametrize(
    "options",
    [
        *({"attn_mask": additive(*shape)} for shape in ((37,), (1, 37), (8, 1, 37), (1, 8, 1, 1))),
        {"causal_offset": 0},
        {"causal_offset": 0, "Dv": 16},
        {"causal_offset": 20, "window": 7},
        {"B": 0, "attn_mask": additive(1, 37)},
        {"Skv": 0, "attn_mask": additive(1, 8, 1, 0)},
    ],
    ids=lambda options: ", ".join(
        f"{name} {tuple(value.shape) if isinstance(value, Tensor) else value}"
        for name, value in options.items()
    ),
)
def test_one_query_of_shared_heads(options) -> None:
    call = shared(Sq=1, **options)
    right = sdpa.exact(call, torch.float64)[0]
    out = sdpa.run(call, EXACT)[0]
    assert out.shape == right.shape
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("Sq", [1, 9])
def test_shared_heads_with_a_mask_have_derivatives(Sq: int) -> None:
    call = shared(Sq=Sq, attn_mask=additive(2, 8, Sq, 37))
    for tensor in (call.q, call.k, call.v):
        tensor.requires_grad_()
    made = torch.autograd.grad(sdpa.run(call, EXACT)[0].sum(), (call.q, call.k, call.v))
    right = torch.autograd.grad(sdpa.exact(call)[0].sum(), (call.q, call.k, call.v))
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64), (256, 256), (264, 264), (64, 32)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_heads_stay_shared_where_transformers_leaves_them(
    monkeypatch, device: str, sizes, masked: bool
) -> None:
    integration = transformers_sdpa()
    monkeypatch.delenv("TRANSFORMERS_SDPA_FORCE_GQA", raising=False)
    monkeypatch.setattr(integration, "_is_torch_xpu_available", device == "xpu")
    monkeypatch.setattr(integration, "_is_torch_mps_available", device == "mps")
    key, value = (torch.empty(1, 1, 1, size) for size in sizes)
    theirs = integration.use_gqa_in_sdpa(key if masked else None, key, value)
    assert sdpa.takes_shared_heads(device, masked, *sizes) == theirs
