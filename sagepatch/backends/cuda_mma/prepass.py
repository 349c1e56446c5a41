"""Codes and scales of Q, K and V for the mma.sync kernel. No attention in here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.prepass import plan_of
from sagepatch.backends.cuda.prepass_form import PAD, Form, form_of
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call


@dataclass(frozen=True, slots=True)
class Codes:
    """What attention reads; backends.cuda.prepass.Codes says the same of the 8-bit ones. `kv_pad`
    is the rows of keys of one head.
    """

    q8: Tensor  # [B, Hq, Sq, Dp] int8
    q_scale_log2: Tensor  # [B, Hq, Sq] fp32
    k8: Tensor  # [B, Hkv, kv_pad, Dp] int8
    k_scale: Tensor  # [B, Hkv, kv_pad] fp32 (per token) or [B, Hkv, kv_pad // 64, 4]
    values: Tensor  # [B, Hkv, D8, kv_pad] e4m3 or int8, or [B, Hkv, kv_pad, D8] float16
    v_scale: Tensor  # [groups, Hkv, D8] fp32
    shift_log2: Tensor | None  # [B, Hq, Sq] fp32
    mean_scores_log2: Tensor | None  # [B, Hq, q blocks, kv_pad] fp32, with smoothed Q
    key_bits: Tensor | None  # [B, kv_pad // 32] int32
    kv_pad: int


def prepare(call: Call, recipe: Recipe, target: str) -> Codes:
    """Quantise the tensors of `call` as `recipe` says, on the current stream of their device."""
    plan = plan_of(replace(form_of(call, recipe), target=target))
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=call.q.device)
    plan.launch(call, scratch.data_ptr())
    codes = plan.codes(scratch)
    values = codes.vt8 if codes.vt8 is not None else codes.v16
    assert values is not None
    return Codes(
        codes.q8,
        codes.q_scale_log2,
        codes.k8,
        codes.k_scale,
        values,
        codes.v_scale,
        codes.shift_log2,
        None,
        codes.key_bits,
        plan.kv_pad,
    )


def instances(recipes: Iterable[Recipe], target: str) -> tuple[Program, ...]:
    """The programs that `sagepatch build` compiles ahead: common head sizes, bf16, with and without
    a log-sum-exp.
    """
    found: dict[Program, None] = {}
    for recipe in recipes:
        for head_dim in (64, 128):
            for shift in (False, True):
                shape, strides = (1, 1, PAD, head_dim), (0, 0, head_dim, 1)
                form = Form(
                    *(recipe, target, shape, shape, head_dim, strides, strides, strides),
                    *((torch.bfloat16,) * 3, True, None, None, shift),
                )
                found[plan_of(form).program] = None
    return tuple(found)
