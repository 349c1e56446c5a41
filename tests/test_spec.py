"""Calls and their descriptions: shapes, masks, devices, words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from models.layers import call

import sagepatch
from sagepatch import spec as specs
from sagepatch.errors import InvalidArgument
from sagepatch.spec import AttnSpec, Call, MaskKind, arch_of, check_shapes, gpu_of, mask_kind

PLAIN = AttnSpec(2, 8, 8, 33, 47, 64, 64, "bf16", "bf16", "cpu")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "2x8x33x47x64 bf16"),
        ({"kv_heads": 2}, "2x8/2x33x47x64 bf16"),
        ({"v_head_dim": 32}, "2x8x33x47x64/32 bf16"),
        ({"mask": MaskKind.KEY_PADDING}, "2x8x33x47x64 bf16 mask key_padding"),
        ({"causal_offset": 14, "window": 8}, "2x8x33x47x64 bf16 causal +14 window 8"),
        ({"causal_offset": -1}, "2x8x33x47x64 bf16 causal -1"),
        ({"softcap": True, "sinks": True}, "2x8x33x47x64 bf16 softcap sinks"),
        ({"packed": True, "batch": 1}, "1x8x33x47x64 bf16 packed"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_spec_in_words(changes, text: str) -> None:
    assert str(replace(PLAIN, **changes)) == text


def test_a_call_describes_itself() -> None:
    mask = torch.ones(1, 1, 1, 47, dtype=torch.bool)
    spec = call(B=2, H=4, causal_offset=3, attn_mask=mask, return_lse=True).spec()
    assert spec == AttnSpec(
        *(2, 4, 4, 33, 47, 32, 32, "fp32", "fp32", "cpu"),
        mask=MaskKind.KEY_PADDING,
        causal_offset=3,
        lse=True,
    )
    assert spec.causal
    assert hash(spec) == hash(replace(spec))


# case 19
@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((2, 1, 1, 47), torch.bool, MaskKind.KEY_PADDING),
        ((1, 1, 1, 47), torch.bool, MaskKind.KEY_PADDING),
        ((2, 1, 33, 47), torch.bool, MaskKind.BOOL),
        ((2, 4, 1, 47), torch.bool, MaskKind.BOOL),
        ((33, 47), torch.bool, MaskKind.BOOL),
        ((1, 47), torch.bool, MaskKind.BOOL),
        ((2, 1, 1, 47), torch.float16, MaskKind.ADDITIVE),
    ],
    ids=str,
)
def test_masks_are_told_by_shape_and_dtype_alone(shape, dtype, kind: MaskKind) -> None:
    assert mask_kind(torch.zeros(shape, dtype=dtype)) is kind


# Once wrong: a kernel got the address of a mask that was left on the CPU.
@pytest.mark.parametrize("name", ["attn_mask", "sinks", "cu_seqlens_q", "cu_seqlens_kv"])
def test_what_lies_on_another_device_is_refused(name: str) -> None:
    given = {
        "attn_mask": torch.ones(1, 1, 1, 47, dtype=torch.bool),
        "sinks": torch.zeros(4),
        "cu_seqlens_q": torch.tensor([0, 33], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 47], dtype=torch.int32),
    }
    call(H=4, **given).spec()
    given[name] = given[name].to("meta")
    with pytest.raises(InvalidArgument, match=f"q is on cpu and {name} on meta"):
        call(H=4, **given).spec()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.complex64], ids=str)
def test_masks_of_other_numbers_are_refused(dtype) -> None:
    with pytest.raises(InvalidArgument, match="keep or add"):
        mask_kind(torch.ones(3, 3, dtype=dtype))
    assert mask_kind(None) is MaskKind.NONE


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_tensors_of_other_numbers_are_refused(dtype: torch.dtype, which: int) -> None:
    # An "auto" call once went on to what torch says of its own kernels, or gave an answer.
    given = [torch.ones(1, 2, 3, 8) for _ in range(3)]
    given[which] = given[which].to(dtype)
    with pytest.raises(InvalidArgument, match=f"dtype of {'qkv'[which]} is {dtype}, needs one of"):
        check_shapes(*given)
    with pytest.raises(InvalidArgument, match="needs one of fp16, bf16, fp32, fp64"):
        sagepatch.attention(*given)


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        ((1, 2, 3), (1, 2, 3), (1, 2, 3), "must be 4-dimensional"),
        ((1, 2, 3, 8), (1, 2, 3, 16), (1, 2, 3, 16), "head size: 8 and 16"),
        ((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 4, 8), "agree in batch, heads and tokens"),
        ((2, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), "differ in batch: 2 and 1"),
        ((1, 8, 3, 8), (1, 3, 3, 8), (1, 3, 3, 8), "8 query heads cannot share 3"),
        ((1, 2, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8), "2 query heads cannot share 4"),
        ((1, 2, 3, 8), (1, 0, 3, 8), (1, 0, 3, 8), "cannot share 0"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_tensors_that_form_no_call_are_refused(q, k, v, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Call(torch.zeros(q), torch.zeros(k), torch.zeros(v), 1.0).spec()


@pytest.mark.parametrize("shape", [(33, 46), (2, 33, 47), (3, 1, 1, 47), (1, 1, 1, 33, 47)])
def test_masks_that_do_not_broadcast_are_refused(shape) -> None:
    with pytest.raises(InvalidArgument, match="does not broadcast"):
        call(B=2, H=4, attn_mask=torch.zeros(shape)).spec()


@pytest.mark.parametrize("bshd_out", [False, True])
def test_the_output_has_the_memory_order_that_was_asked_for(bshd_out: bool) -> None:
    made = call(B=2, H=3, bshd_out=bshd_out).empty_out()
    assert made.shape == (2, 3, 33, 32)
    assert (made.transpose(1, 2) if bshd_out else made).is_contiguous()


# cases 55, 56
def test_the_architecture_is_that_of_the_call_s_device(monkeypatch) -> None:
    table = {0: (8, 6), 1: (9, 0)}
    asked = []

    def capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return table[index]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(specs, "_GPUS", {})
    assert arch_of(torch.device("cuda", 0)) == 86
    assert arch_of(torch.device("cuda", 1)) == 90
    assert arch_of(torch.device("cuda")) == 90
    assert asked == [0, 1]
    assert arch_of(torch.device("cpu")) is None
    assert [gpu_of(torch.device("cuda", index)) for index in (0, 1)] == ["GPU 0", "GPU 1"]
    assert gpu_of(torch.device("cpu")) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert arch_of(torch.device("cuda", 0)) is None


def test_a_lse_is_a_row_of_fp32_a_head() -> None:
    one = call(B=2, H=3)
    assert one.empty_lse().shape == (2, 3, 33)
    assert one.empty_lse().dtype == torch.float32
    assert one.scale == 1 / math.sqrt(32)
