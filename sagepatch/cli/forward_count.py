"""One forward of each part of a model, run on shapes alone at the size the user means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sagepatch.cli.forward_cost import Cost, Shape, cost
from sagepatch.cli.forward_inputs import FORWARDS
from sagepatch.cli.forward_sizes import Size
from sagepatch.patchers.site import Site

# Tokens of a prompt where nobody says.
PROMPT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """The size of a generation, None where the usual one is meant. `text` is the tokens of text
    that a denoiser sees, `tokens` the prompt of a language model, `vae_scale` how many pixels wide
    a latent of the pipeline's autoencoder is.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    text: int | None = None
    tokens: int | None = None
    vae_scale: int | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """One part of a model: what one forward costs and at which size, or why that is not known."""

    part: str
    size: str
    cost: Cost | None
    why_not: str = ""

    @property
    def shapes(self) -> Mapping[str, tuple[Shape, ...]]:
        """The attention calls of each layer; empty where they are not known."""
        return {} if self.cost is None else self.cost.calls


def heeded(module: nn.Module) -> set[str] | None:
    """Which sizes of `Asked` change a forward of this module; None where that is not known."""
    kind = type(module).__name__
    if kind.endswith("ForCausalLM"):
        return {"tokens"}
    if kind not in FORWARDS:
        return None
    forward, config = FORWARDS[kind], cast(Any, module.config)
    size = forward.size(config) or Size(1024, 1024, 1, forward.text)
    with torch.device("meta"):
        # Tensors without numbers print as their shapes.
        films = {
            repr(forward.inputs(config, forward.latent(replace(size, frames=frames))))
            for frames in (17, 49)
        }
    return {"height", "width"} | ({"frames"} if len(films) > 1 else set())


def count(parts: Mapping[str, nn.Module], sites: Sequence[Site], asked: Asked) -> list[Counted]:
    """Count one forward of each part; the modules are on the meta device."""
    found = []
    for name, module in parts.items():
        inside = {id(one) for one in module.modules()}
        own = [site for site in sites if id(site.module) in inside]
        found.append(_count(name, module, own, asked))
    return found


def _count(part: str, module: nn.Module, sites: Sequence[Site], asked: Asked) -> Counted:
    kind = type(module).__name__
    if kind in FORWARDS:
        inputs = _denoiser(module, asked)
        if inputs is None:
            return Counted(part, "", None, "its config names no size: pass --width and --height")
        size, given = inputs
    elif kind.endswith("ForCausalLM"):
        tokens = asked.tokens or PROMPT_TOKENS
        with torch.device("meta"):
            given = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
        size = f"a prompt of {tokens} tokens"
    else:
        return Counted(part, "", None, f"what a forward of {kind} takes is not known here")
    try:
        with _countable(module), _without_numbers(all_kept=kind in FORWARDS):
            made = cost(module.eval(), sites, lambda: module(**given))
    # What torch raises for an operation that needs numbers, and diffusers without torchvision.
    except (RuntimeError, NotImplementedError, NameError) as error:
        first = str(error).partition("\n")[0]
        return Counted(part, size, None, f"a forward of {kind} needs more than shapes: {first}")
    if not made.attention:
        return Counted(part, size, None, f"{kind} computes its attention without torch's SDPA")
    return Counted(part, size, made)


@contextmanager
def _countable(module: nn.Module) -> Iterator[None]:
    """Meanwhile let a model run what can be counted. A model of transformers calls torch's SDPA
    where it would run its eager function, and multiplies its experts' weights in batched products,
    as grouped ones are not counted. HiDream's experts, which would ask routers for numbers, are
    replaced by `_any_experts`.
    """
    found = (getattr(part, "config", None) for part in module.modules())
    configs = {id(config): config for config in found if config is not None}
    changed = [
        (config, name, was)
        for config in configs.values()
        for name, (was, _) in _COUNTABLE.items()
        if getattr(config, name, None) == was
    ]
    if changed:
        _register()
    for config, name, _ in changed:
        setattr(config, name, _COUNTABLE[name][1])
    routed: list[Any] = [part for part in module.modules() if type(part).__name__ in _ROUTED]
    for part in routed:
        part.moe_infer = partial(_any_experts, part)
    try:
        yield
    finally:
        for part in routed:
            del part.moe_infer
        for config, name, was in changed:
            setattr(config, name, was)
        if changed:
            _unregister()


@contextmanager
def _without_numbers(all_kept: bool) -> Iterator[None]:
    """Meanwhile let autocast do nothing, as it does not know the meta device. With `all_kept` a
    mask that is used as an index keeps everything, as masks of unpadded text do.
    """
    from torch.fx.experimental import _config

    autocast = torch.autocast
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment, misc]
    kept = _config.patch(meta_nonzero_assume_all_nonzero=all_kept)  # type: ignore[attr-defined]
    try:
        with kept, _Masks() if all_kept else nullcontext():
            yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]


class _Masks(TorchFunctionMode):
    """Answers questions about masks that have no numbers. The inverse of a mask, used as an index,
    keeps nothing. `torch.all` is true: HunyuanVideo 1.5 asks it whether its first picture is all
    zeros, and takes as many tokens either way.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.all:
            return torch.ones((), dtype=torch.bool, device="cpu")
        if func is Tensor.__getitem__ and getattr(args[1], "keeps_nothing", False):
            return args[0][:0]
        made = func(*args, **(kwargs or {}))
        if func in (Tensor.__invert__, Tensor.bitwise_not):
            made.keeps_nothing = made.dtype == torch.bool
        return made


_COUNTED = "sagepatch_counted"
# Attributes of a config of transformers: a value that cannot be counted, and what replaces it.
_COUNTABLE = {
    "_attn_implementation_internal": ("eager", _COUNTED),
    "_experts_implementation_internal": ("grouped_mm", "batched_mm"),
}


_ROUTED = frozenset({"MOEFeedForwardSwiGLU"})


def _any_experts(experts: Any, x: Tensor, _indices: Tensor, _weights: Tensor) -> Tensor:
    """Tokens x [T, C], each through as many experts as are activated for one. Which experts those
    are would take numbers to know, and does not matter for the count: all are of one size.
    """
    each = experts.num_activated_experts
    return cast(Tensor, experts.experts[0](x.repeat(each, 1))[: len(x)])


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionMaskInterface.register(_COUNTED, sdpa_mask)
    AttentionInterface.register(_COUNTED, _by_sdpa)


def _unregister() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for registry in (AttentionMaskInterface, AttentionInterface):
        registry._global_mapping.pop(_COUNTED, None)


def _by_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """A call of SDPA of the same shape, whatever terms its scores have; out [B, S, H, D]."""
    causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _denoiser(module: nn.Module, asked: Asked) -> tuple[str, dict[str, Any]] | None:
    forward = FORWARDS[type(module).__name__]
    config: Any = module.config
    usual = forward.size(config)
    if usual is None:
        if asked.height is None or asked.width is None:
            return None
        usual = Size(asked.height, asked.width, 1, forward.text)
    size = replace(
        usual,
        height=asked.height or usual.height,
        width=asked.width or usual.width,
        frames=asked.frames or usual.frames,
        text=asked.text or usual.text,
    )
    with torch.device("meta"):
        return str(size), forward.inputs(config, forward.latent(size, asked.vae_scale))
