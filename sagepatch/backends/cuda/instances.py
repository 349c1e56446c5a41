"""Every program that is compiled ahead, for `sagepatch build` and for tests: a list, no policy."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagepatch.backends.cuda import attention_tiles, prepass
from sagepatch.backends.cuda.attention_tiles import Options
from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.prepass_form import reads_values, refusal
from sagepatch.numerics.recipe import RECIPES, Recipe

HEAD_DIMS = (64, 128)
# What most calls ask of the attention: bf16 or fp16, causal or not, blocks shared out or not.
CALLS = (
    Options(),
    Options(split=True),
    Options(causal=True),
    Options(out_half=True),
    Options(out_half=True, causal=True),
)


def of_recipe(recipe: Recipe, target: str) -> tuple[Program, ...]:
    """The programs of one recipe for `target`: pre-pass and attention; others are compiled when a
    call wants them.
    """
    if target != "sm_90a" or recipe.exact or refusal(recipe):
        return ()
    found: dict[Program, None] = {}
    for dim in HEAD_DIMS:
        if attention_tiles.refusal(recipe, dim, dim):
            continue
        for call in CALLS:
            # What attention asks for itself where scales of Q are per token.
            dtype = torch.float16 if call.out_half else torch.bfloat16
            raw_q = dtype if recipe.q_granularity == "token" else None
            options = replace(call, raw_q=raw_q, raw_v=reads_values(recipe, dtype))
            if options.split and not attention_tiles.pick(recipe, dim, dim).shares:
                continue
            found[attention_tiles.instance(recipe, dim, dim, options).program] = None
    return (*prepass.instances(target, (recipe,), raw_q=True), *found) if found else ()


def instances(target: str) -> tuple[Program, ...]:
    """The programs of every recipe for `target`."""
    made = (program for recipe in RECIPES.values() for program in of_recipe(recipe, target))
    return tuple(dict.fromkeys(made))
