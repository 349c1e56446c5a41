"""The mma.sync programs that are compiled ahead, for `sagepatch build` and for tests: a list, no
policy.
"""

from __future__ import annotations

import torch

from sagepatch.backends.catalogue import CUDA_MMA
from sagepatch.backends.cuda.build import TARGETS, Program
from sagepatch.backends.cuda.prepass import instances as prepasses
from sagepatch.backends.cuda_mma.masks import mask_program
from sagepatch.backends.cuda_mma.prepass import means_instances
from sagepatch.backends.cuda_mma.tiles import Options, instance
from sagepatch.numerics.recipe import Recipe

HEAD_DIMS = (64, 128)
# What most calls ask of the attention; others are compiled when a call wants them. Causal, packed
# and grouped calls, windows, sinks and the type of the output share one program.
CALLS = (Options(), Options(mask=1))


def recipes(target: str) -> tuple[Recipe, ...]:
    """The recipes whose records list the GPU of `target`."""
    arch = next(arch for arch, name in TARGETS.items() if name == target)
    return tuple(v.recipe for v in CUDA_MMA if v.archs is not None and arch in v.archs)


def of_recipe(recipe: Recipe, target: str) -> tuple[Program, ...]:
    """The programs of one recipe for `target`: pre-pass, tiles of a bool mask, attention; none
    where its record does not list that GPU.
    """
    if recipe not in recipes(target):
        return ()
    found = dict.fromkeys(prepasses(target, (recipe,), (torch.bfloat16,)))
    for dim in HEAD_DIMS:
        for options in CALLS:
            made = instance(recipe, dim, dim, target, options)
            found[made.program] = None
        found[mask_program(made.tile.block_n, None, target)] = None
        found |= dict.fromkeys(means_instances(recipe, dim, target))
    return tuple(found)


def instances(target: str) -> tuple[Program, ...]:
    """The programs of every recipe that serves on `target`."""
    made = (program for recipe in recipes(target) for program in of_recipe(recipe, target))
    return tuple(dict.fromkeys(made))
