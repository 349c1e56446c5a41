"""`sagepatch.attention`: SDPA's meaning, layouts, refusals, and what torch.compile and autograd see
of it.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import sagepatch
from sagepatch.errors import InvalidArgument, VariantRefused
from sagepatch.numerics.metrics import compare


def qkv(B=2, Hq=4, Hkv=4, Sq=33, Skv=47, D=32, Dv=None, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, Sq, D, generator=g)
    k = torch.randn(B, Hkv, Skv, D, generator=g)
    v = torch.randn(B, Hkv, Skv, Dv or D, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


FAST = "emulated.sage2_8"
SAFE = "emulated.sage1_t_f32"


def close(out, want, limit=0.06):
    worst = compare(out, want).worst
    assert worst.finite
    assert worst.rel_l1 < limit, worst
    assert abs(worst.norm_ratio - 1) < 0.03, worst


def test_auto_on_a_cpu_is_sdpa_to_the_bit() -> None:
    q, k, v = qkv()
    assert torch.equal(sagepatch.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("request_", ["sage1_b", "fast", "emulated.sage1_b", "exact", "sdpa.exact"])
def test_requests_by_recipe_tier_and_name(request_: str) -> None:
    q, k, v = qkv()
    if request_ == "fast":
        # A tier is not a wish for an emulation.
        with pytest.raises(VariantRefused, match="emulation is for accuracy"):
            sagepatch.attention(q, k, v, variant=request_)
        return
    out = sagepatch.attention(q, k, v, variant=request_)
    want = F.scaled_dot_product_attention(q, k, v)
    close(out, want)
    assert torch.equal(out, want) == ("exact" in request_)


# case 49
def test_sdpa_call_forms() -> None:
    q, k, v = qkv()
    mask = torch.rand(33, 47, generator=torch.Generator().manual_seed(1)) > 0.2
    want = F.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(sagepatch.attention(q, k, v, mask), want)
    assert torch.equal(sagepatch.attention(q=q, k=k, v=v, attn_mask=mask), want)
    assert torch.equal(sagepatch.attention(q[0], k[0], v[0]), sagepatch.attention(q, k, v)[0])
    with pytest.raises(InvalidArgument, match="dropout"):
        sagepatch.attention(q, k, v, dropout_p=0.1)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        sagepatch.attention(q, k, v, mask, is_causal=True)


# case 6
@pytest.mark.parametrize("D", [40, 72])
@pytest.mark.parametrize("scale", [None, 1.0, 0.0625, 2.0])
def test_scale_is_honoured(D: int, scale: float | None) -> None:
    q, k, v = qkv(D=D)
    out = sagepatch.attention(q, k, v, scale=scale, variant=SAFE)
    close(out, F.scaled_dot_product_attention(q, k, v, scale=scale), 0.12 if scale else 0.02)


# case 10
def test_layouts_with_as_many_tokens_as_heads() -> None:
    q, k, v = qkv(B=1, Hq=8, Hkv=8, Sq=8, Skv=8)
    want = F.scaled_dot_product_attention(q, k, v)
    other = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert not torch.allclose(want, other.transpose(1, 2))
    for variant in ("exact", SAFE):
        close(sagepatch.attention(q, k, v, variant=variant), want, 0.02)
        swapped = sagepatch.attention(q, k, v, variant=variant, layout="BSHD")
        close(swapped, other.transpose(1, 2), 0.02)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_output_is_contiguous_in_the_caller_s_layout(layout: str, variant: str) -> None:
    q, k, v = qkv()
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    out = sagepatch.attention(q, k, v, variant=variant, layout=layout)
    assert out.is_contiguous()


# case 7
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_any_strides_give_the_same_bits_and_inputs_stay(variant: str) -> None:
    base = torch.randn(2, 47, 4, 64, generator=torch.Generator().manual_seed(2))
    q = base.transpose(1, 2)[..., ::2]
    k = torch.randn(2, 4, 32, 47, generator=torch.Generator().manual_seed(3)).transpose(-1, -2)
    v = torch.randn(1, 4, 94, 32, generator=torch.Generator().manual_seed(4))
    v = v[:, :, ::2].expand(2, -1, -1, -1)
    before = [t.clone() for t in (q, k, v)]
    out = sagepatch.attention(q, k, v, variant=variant)
    same = sagepatch.attention(*(t.contiguous() for t in (q, k, v)), variant=variant)
    torch.testing.assert_close(out, same, atol=1e-6 if variant == "exact" else 1e-3, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


# case 9
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_lse(variant: str, layout: str) -> None:
    q, k, v = qkv(Hq=8, Hkv=2, Sq=130)
    k = k + 3  # what smoothing takes out must come back
    k_all = k.repeat_interleave(4, 1)
    want = torch.logsumexp(q @ k_all.mT / math.sqrt(32), -1)
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    result = sagepatch.attention(q, k, v, variant=variant, layout=layout, return_lse=True)
    assert isinstance(result, tuple)
    lse = result[1]
    assert lse.shape == (2, 8, 130)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    torch.testing.assert_close(lse, want, atol=0.05, rtol=0)


# case 11
@pytest.mark.parametrize("variant", ["exact", FAST])
@pytest.mark.parametrize("Hkv", [8, 4, 2, 1])
def test_grouped_heads(Hkv: int, variant: str) -> None:
    q, k, v = qkv(Hq=8, Hkv=Hkv)
    v = torch.arange(Hkv, dtype=torch.float32).view(1, -1, 1, 1).expand_as(v) + 1
    out = sagepatch.attention(q, k, v, variant=variant)
    want = (torch.arange(8) // (8 // Hkv) + 1.0).view(1, 8, 1, 1).expand_as(out)
    # A wrong head would be off by 1; an E4M3 probability by 1/32.
    torch.testing.assert_close(out, want, rtol=0.03, atol=0)


# case 19
def test_masks_are_never_guessed() -> None:
    q, k, v = qkv()
    keep = torch.ones(33, 47, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="keep or add"):
        sagepatch.attention(q, k, v, attn_mask=keep)
    with pytest.raises(InvalidArgument, match="does not broadcast"):
        sagepatch.attention(q, k, v, attn_mask=keep[:, :40].bool())
    bias = torch.randn(1, 4, 33, 47, generator=torch.Generator().manual_seed(5))
    for mask in (keep.bool(), bias, bias[:, :1].expand(2, 4, 33, 47), bias[0, 0]):
        want = F.scaled_dot_product_attention(q, k, v, mask)
        close(sagepatch.attention(q, k, v, attn_mask=mask, variant=FAST), want)


def test_causal_offsets_and_windows() -> None:
    q, k, v = qkv(Sq=20, Skv=30)
    key, query = torch.arange(30), torch.arange(20)[:, None]
    cases = [
        ({"is_causal": True}, key <= query),
        ({"is_causal": True, "causal_offset": 10}, key <= query + 10),
        (
            {"is_causal": True, "causal_offset": 10, "window": 4},
            (key <= query + 10) & (key > query + 6),
        ),
        ({"window": 4}, (key <= query) & (key > query - 4)),
    ]
    for options, keep in cases:
        want = F.scaled_dot_product_attention(q, k, v, keep)
        for variant in ("exact", SAFE):
            out = sagepatch.attention(q, k, v, variant=variant, **options)
            torch.testing.assert_close(out, want, atol=0.05, rtol=0)
    with pytest.raises(ValueError, match="needs is_causal"):
        sagepatch.attention(q, k, v, causal_offset=3)
    with pytest.raises(ValueError, match="window=0"):
        sagepatch.attention(q, k, v, window=0)


def test_softcap_and_sinks_against_formulas() -> None:
    q, k, v = qkv()
    scores = q @ k.mT / math.sqrt(32)
    capped = torch.softmax(3 * torch.tanh(scores / 3), -1) @ v
    close(sagepatch.attention(q, k, v, softcap=3.0, variant=FAST), capped)
    close(sagepatch.attention(q, k, v, softcap=3.0), capped, 1e-5)
    sinks = torch.tensor([0.0, 1.0, -1.0, 4.0])
    joined = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 33, 1)], -1)
    sunk = torch.softmax(joined, -1)[..., :-1] @ v
    close(sagepatch.attention(q, k, v, sinks=sinks, variant=FAST), sunk)
    close(sagepatch.attention(q, k, v, sinks=sinks), sunk, 1e-5)


# case 16
def test_packed_calls() -> None:
    q, k, v = qkv(B=1, Sq=131, Skv=80)
    ends = {
        "cu_seqlens_q": torch.tensor([0, 0, 1, 131]),
        "cu_seqlens_kv": torch.tensor([0, 0, 3, 80]),
    }
    for variant in ("exact", FAST):
        out = sagepatch.attention(q, k, v, variant=variant, **ends)
        part = sagepatch.attention(q[:, :, 1:], k[:, :, 3:], v[:, :, 3:], variant=variant)
        torch.testing.assert_close(out[:, :, 1:], part, atol=2e-3, rtol=0)
    for wrong in ([0, 5, 130], [1, 131], [0, 9, 3, 131]):
        with pytest.raises(ValueError, match="must rise from 0"):
            sagepatch.attention(
                q, k, v, cu_seqlens_q=torch.tensor(wrong), cu_seqlens_kv=torch.tensor([0, 80])
            )
    with pytest.raises(ValueError, match="go together"):
        sagepatch.attention(q, k, v, cu_seqlens_q=torch.tensor([0, 131]))


# case 23
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float16),
        (torch.float64,) * 3,
        (torch.float16,) * 3,
    ],
    ids=lambda d: "-".join(str(t).rpartition("t")[2] for t in d),
)
@pytest.mark.parametrize("variant", ["auto", FAST])
def test_output_has_the_dtype_of_v(dtypes, variant: str) -> None:
    plain = qkv()
    q, k, v = (t.to(d) for t, d in zip(plain, dtypes, strict=True))
    out = sagepatch.attention(q, k, v, variant=variant)
    assert out.dtype == dtypes[2]
    close(out, F.scaled_dot_product_attention(*plain))


def test_autocast_casts_as_for_sdpa() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        assert sagepatch.attention(q, k, v, variant=FAST).dtype == torch.bfloat16


# case 46
def test_gradients_are_exact_or_refused() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    want, q.grad = q.grad, None
    sagepatch.attention(q, k, v).sum().backward()
    torch.testing.assert_close(q.grad, want)
    with pytest.raises(InvalidArgument, match="no backward"):
        sagepatch.attention(q, k, v, variant=FAST)
    with torch.no_grad():
        sagepatch.attention(q, k, v, variant=FAST)


# cases 51, 53
@pytest.mark.parametrize("variant", ["exact", FAST])
@pytest.mark.parametrize("D", [40, 128])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_one_graph_for_all_lengths(variant: str, D: int, layout: str) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()

    def attend(q, k, v, mask):
        out = sagepatch.attention(q, k, v, mask, variant=variant, layout=layout)
        return out.view(out.shape[0], out.shape[1], -1) * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for length in (17, 33, 65):
        q, k, v = qkv(Sq=length, Skv=length, D=D)
        if layout == "BSHD":
            q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        torch.testing.assert_close(compiled(q, k, v, mask), attend(q, k, v, mask))
    assert counter.frame_count == 1


def test_an_offset_of_zero_is_no_graph_of_its_own() -> None:
    """Lengths that are equal, and that are not, of one compiled and one exported program."""
    from torch._dynamo.testing import CompileCounter

    class Last(torch.nn.Module):
        def forward(self, q, k):
            offset = k.shape[2] - q.shape[2]
            return sagepatch.attention(q, k, k, is_causal=True, causal_offset=offset, variant=FAST)

    lengths = [(20, 33), (20, 20), (21, 40), (33, 33)]
    calls = [qkv(Sq=Sq, Skv=Skv)[:2] for Sq, Skv in lengths]
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(Last(), fullgraph=True, dynamic=True, backend=counter)
    axes = {name: {2: torch.export.Dim(name + "_len", min=2, max=64)} for name in "qk"}
    exported = torch.export.export(Last(), calls[0], dynamic_shapes=axes).module()
    for q, k in calls:
        assert torch.equal(compiled(q, k), Last()(q, k))
        assert torch.equal(exported(q, k), Last()(q, k))
    assert counter.frame_count == 1


# case 15
@pytest.mark.parametrize("variant", ["exact", FAST, SAFE])
@pytest.mark.parametrize(("Sq", "Skv"), [(0, 5), (5, 0), (5, 1), (1, 5), (1, 1), (130, 3)])
def test_lengths_of_nothing_and_of_one(Sq: int, Skv: int, variant: str) -> None:
    q, k, v = qkv(Sq=Sq, Skv=Skv)
    out, lse = sagepatch.attention(q, k, v, variant=variant, return_lse=True)
    assert out.shape == (2, 4, Sq, 32)
    assert lse.shape == (2, 4, Sq)
    if Skv == 0:
        assert not out.any()
        assert bool((lse == -math.inf).all())
    elif Skv == 1:
        torch.testing.assert_close(out, v.expand_as(out), atol=0.02, rtol=0.07)
    else:
        close(out, F.scaled_dot_product_attention(q, k, v), 0.12)


# case 7
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_strides_of_axes_of_size_one_mean_nothing(variant: str) -> None:
    q, k, v = qkv(B=1, Hq=1, Hkv=1)
    odd = [t.as_strided(t.shape, (7, 13, t.stride(2), 1)) for t in (q, k, v)]
    assert torch.equal(
        sagepatch.attention(*odd, variant=variant), sagepatch.attention(q, k, v, variant=variant)
    )


# case 18
@pytest.mark.parametrize("variant", ["exact", FAST, SAFE])
@pytest.mark.parametrize("nothing", [False, -math.inf, torch.finfo(torch.float32).min], ids=str)
def test_a_query_without_keys(variant: str, nothing) -> None:
    q, k, v = qkv(B=1, Sq=4, Skv=8)
    keep = nothing is False
    mask = torch.ones(4, 8, dtype=torch.bool) if keep else torch.zeros(4, 8)
    mask[1] = nothing
    out = sagepatch.attention(q, k, v, mask, variant=variant)
    want = F.scaled_dot_product_attention(q, k, v, mask)
    assert out.isfinite().all()
    # E4M3 keeps a value of up to 3 to 3/16; eight of them are averaged.
    torch.testing.assert_close(out[:, :, 1], want[:, :, 1], atol=0.06, rtol=0)


# case 16
def test_packed_offsets_of_either_width() -> None:
    q, k, v = qkv(B=1, Sq=20, Skv=30)
    made = [
        sagepatch.attention(
            *(q, k, v),
            cu_seqlens_q=torch.tensor([0, 8, 20], dtype=dtype),
            cu_seqlens_kv=torch.tensor([0, 11, 30], dtype=dtype),
            variant=FAST,
        )
        for dtype in (torch.int32, torch.int64)
    ]
    assert torch.equal(*made)
    ends = torch.tensor([0, 20])
    for wrong, said in (
        ({"cu_seqlens_q": ends.float(), "cu_seqlens_kv": torch.tensor([0, 30])}, "int32 or int64"),
        ({"cu_seqlens_q": ends[:1], "cu_seqlens_kv": torch.tensor([0])}, "at least two entries"),
        (
            {"cu_seqlens_q": ends, "cu_seqlens_kv": torch.tensor([0, 9, 30])},
            "describe 1 and 2 members",
        ),
        (
            {"cu_seqlens_q": ends, "cu_seqlens_kv": torch.tensor([0, 30]), "attn_mask": q[0, 0]},
            "no attn_mask|does not broadcast",
        ),
    ):
        with pytest.raises(InvalidArgument, match=said):
            sagepatch.attention(q, k, v, **wrong)
    two = qkv(B=2, Sq=20, Skv=30)
    with pytest.raises(InvalidArgument, match="batch 1, found 2"):
        sagepatch.attention(*two, cu_seqlens_q=ends, cu_seqlens_kv=torch.tensor([0, 30]))


# case 12
@pytest.mark.parametrize("Dv", [8, 33, 128])
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_values_of_their_own_width(Dv: int, variant: str) -> None:
    q, k, v = qkv(Dv=Dv)
    out = sagepatch.attention(q, k, v, variant=variant)
    assert out.shape == (2, 4, 33, Dv)
    close(out, F.scaled_dot_product_attention(q, k, v))
