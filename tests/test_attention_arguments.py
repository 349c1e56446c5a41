"""What `sagepatch.attention` refuses, and that it says why."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from models.layers import call

import sagepatch
from sagepatch.errors import InvalidArgument, UnknownVariant, VariantRefused


def qkv(B: int = 2, Hq: int = 4, Hkv: int = 4, D: int = 32):
    q, k = call(B=B, H=Hq, D=D).q, call(B=B, H=Hkv, D=D, seed=1)
    return q, k.k, k.v


def test_an_impossible_request_gives_every_reason() -> None:
    q, k, v = qkv(D=520)
    with pytest.raises(VariantRefused) as caught:
        sagepatch.attention(q, k, v, variant="emulated.sage2_8")
    assert "head_dim is 520, needs 1 to 512" in str(caught.value)
    with pytest.raises(VariantRefused, match="no such name"):
        sagepatch.attention(q, k, v, variant="sage9")


# case 20
def test_unknown_keyword_is_a_type_error() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError):
        sagepatch.attention(q, k, v, attn_mask=None, nonsense=1)  # type: ignore[call-overload]


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v = qkv(Hq=8, Hkv=3)
    with pytest.raises(ValueError, match="cannot share"):
        sagepatch.attention(q, k, v)


# case 48
@pytest.mark.parametrize("name", ["k", "v", "attn_mask", "sinks", "cu_seqlens_q"])
def test_tensors_on_several_devices_are_refused(name: str) -> None:
    q, k, v = qkv(B=1)
    given = {
        "k": k,
        "v": v,
        "attn_mask": torch.zeros(33, 47),
        "sinks": torch.zeros(4),
        "cu_seqlens_q": torch.tensor([0, 33]),
    }
    elsewhere = {"k": k, "v": v, name: given[name].to("meta")}
    with pytest.raises(InvalidArgument, match=f"q is on cpu and {name} on meta"):
        sagepatch.attention(q, **elsewhere)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_refused(scale: float) -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match="must be finite"):
        sagepatch.attention(q, k, v, scale=scale)


@pytest.mark.parametrize(
    "name", ["cuda_mma.sage2_8b", "sage9", "", "triton.exact", 3, None], ids=str
)
def test_names_that_no_kernel_has_are_refused_with_those_there_are(name) -> None:
    q, k, v = qkv()
    with pytest.raises(UnknownVariant, match="no such name; give ") as caught:
        sagepatch.attention(q, k, v, variant=name)
    assert ("emulated.sage2_8b" in str(caught.value)) == (name == "cuda_mma.sage2_8b")


# Once wrong: a bare TypeError or AttributeError, from a look-up or from deep inside.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("variant", value) for value in (["fast"], {"fast"}, {"a": 1})),
        *((name, ["x"]) for name in ("layout", "window", "causal_offset", "softcap", "scale")),
        *((name, "1") for name in ("window", "causal_offset", "softcap", "scale", "dropout_p")),
        *((name, []) for name in ("is_causal", "return_lse", "enable_gqa", "dropout_p")),
        *((name, "no") for name in ("is_causal", "return_lse", "enable_gqa")),
        *((name, torch.ones(2)) for name in ("is_causal", "return_lse", "enable_gqa", "layout")),
        *((name, np.ones(2)) for name in ("is_causal", "scale", "softcap", "window")),
        *((name, value) for name in ("scale", "softcap") for value in (1j, torch.tensor(1j))),
        *((name, [[1.0]]) for name in ("q", "k", "v", "attn_mask", "sinks", "cu_seqlens_q")),
        *((name, None) for name in ("q", "k", "v")),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(name: str, value) -> None:
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v}
    if name == "causal_offset":
        given["is_causal"] = True
    given[name] = value
    kind = UnknownVariant if name == "variant" else InvalidArgument
    with pytest.raises(kind, match=name):
        sagepatch.attention(**given)
    with pytest.raises(kind, match=name):
        sagepatch.attention(**given)


def test_numbers_of_other_libraries_are_numbers() -> None:
    q, k, v = qkv()
    want = sagepatch.attention(q, k, v, scale=0.25, softcap=2.0)
    for number in (np.float32, np.float64, torch.tensor):
        out = sagepatch.attention(q, k, v, scale=number(0.25), softcap=float(number(2.0)))
        assert torch.equal(out, want)
    want = sagepatch.attention(q, k, v, is_causal=True)
    assert torch.equal(sagepatch.attention(q, k, v, is_causal=np.bool_(True)), want)


WITHOUT_ASSERTIONS = """
import json, torch, sagepatch
from sagepatch.errors import InvalidArgument

def made(B=1, H=16, Sq=1, Skv=17, D=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, n, D, generator=g) for n in (Sq, Skv, Skv)]

told = []
for Skv in (1, 2, 17, 300):
    q, k, v = made(Skv=Skv)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for variant in ("auto", "emulated.sage2_8", "emulated.sage1_b"):
        out = sagepatch.attention(q, k, v, variant=variant)
        told.append(bool(out.isfinite().all() and (out - want).norm() < 0.06 * want.norm()))
q, k, v = made(Sq=20, Skv=20)
wrong = [
    dict(k=k[:, :3]), dict(k=k[..., :32]), dict(v=v[:, :, :7]), dict(q=q[0, 0]),
    dict(attn_mask=torch.ones(20, 19) > 0), dict(attn_mask=torch.ones(20, 20).long()),
    dict(cu_seqlens_q=torch.tensor([0, 25, 20]), cu_seqlens_kv=torch.tensor([0, 5, 20])),
    dict(dropout_p=0.1), dict(scale=float("nan")), dict(window=0), dict(causal_offset=1),
    dict(layout="SBHD"),
]
for change in wrong:
    try:
        sagepatch.attention(**{"q": q, "k": k, "v": v, "variant": "emulated.sage2_8", **change})
        told.append("served")
    except InvalidArgument as error:
        told.append(str(error))
print(json.dumps(told))
"""


# case 14
def test_refusals_and_short_calls_need_no_assertions() -> None:
    command = [sys.executable, "-O", "-c", WITHOUT_ASSERTIONS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told[:12] == [True] * 12
    assert len(told) == 24
    assert "served" not in told
