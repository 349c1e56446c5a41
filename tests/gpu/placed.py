"""Tiny models on a GPU in bf16 with their inputs, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models.diffusers_models import tiny_flux
from models.stacks import stack, tokens
from models.transformers_models import first_output, tiny_bert, tiny_llama
from torch import Tensor, nn

RECIPE = "sage2_8b_k128"
KERNEL = f"triton.{RECIPE}"
# Of another toolchain, for Hopper alone.
HOPPER = "cuda.sage2_8"
EXACT = "sdpa.exact"
Inputs = dict[str, Any]


def _llama() -> tuple[nn.Module, Inputs]:
    model, inputs = tiny_llama()
    return model, {**inputs, "use_cache": False}


def _stack() -> tuple[nn.Module, Inputs]:
    return stack(), {"input": tokens(200)}


BUILDS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "flux": tiny_flux,
    "llama": _llama,
    "bert": tiny_bert,
    "stack": _stack,
}


def built(
    name: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Inputs]:
    """A tiny model and inputs for one forward, moved and cast."""
    model, inputs = BUILDS[name]()
    return model.to(device, dtype).eval(), placed(inputs, device, dtype)


def placed(inputs: Inputs, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return {name: move(value) for name, value in inputs.items()}


def renewed(inputs: Inputs, seed: int) -> Inputs:
    """Other numbers of the same shapes where a model reads noise or tokens."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def new(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or (name.endswith("ids") and value.is_floating_point()):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=gen, device="cuda", dtype=torch.float32).to(
                value.dtype
            )
        if name == "input_ids":
            return torch.randint(3, 99, value.shape, generator=gen, device="cuda")
        return value

    return {name: new(name, value) for name, value in inputs.items()}


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The first output of one forward."""
    if isinstance(model, nn.Sequential):
        out: Tensor = model(**inputs)
        return out
    return first_output(model, inputs)


def error(out: Tensor, expected: Tensor) -> float:
    """Relative error, root mean square."""
    return float((out.float() - expected.float()).norm() / expected.float().norm())
