"""Every program that is compiled ahead, for `sagepatch build` and for tests: a list, no policy."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagepatch.backends.cuda import attention_tiles, prepass
from sagepatch.backends.cuda.attention_tiles import Options
from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.prepass_form import refusal
from sagepatch.numerics.recipe import RECIPES

HEAD_DIMS = (64, 128)
# What most calls ask of the attention: bf16 or fp16, causal or not, blocks shared out or not.
CALLS = (
    Options(),
    Options(split=True),
    Options(causal=True),
    Options(out_half=True),
    Options(out_half=True, causal=True),
)


def instances(target: str) -> tuple[Program, ...]:
    """The programs of every kernel family for `target`; others are compiled when a call wants
    them.
    """
    if target != "sm_90a":
        return ()
    found = dict.fromkeys(prepass.instances(target, raw_q=True))
    for recipe in RECIPES.values():
        for dim in HEAD_DIMS:
            if recipe.exact or refusal(recipe) or attention_tiles.refusal(recipe, dim, dim):
                continue
            for call in CALLS:
                # What attention asks for itself where scales of Q are per token.
                dtype = torch.float16 if call.out_half else torch.bfloat16
                raw_q = dtype if recipe.q_granularity == "token" else None
                options = replace(call, raw_q=raw_q)
                if options.split and not attention_tiles.pick(recipe, dim, dim).shares:
                    continue
                found[attention_tiles.instance(recipe, dim, dim, options).program] = None
    return tuple(found)
