"""transformers models: finds every module that asks for its attention function by name, switches
the name in its config and marks the module. Knows families by their code, not by a list.
"""

from __future__ import annotations

import copy
import functools
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from sagepatch.layer import PatchedLayer
from sagepatch.patchers.carrier import ATTRIBUTE, Carrier
from sagepatch.patchers.code import compares_implementation, uses_attention_interface
from sagepatch.patchers.sdpa import kind_of, named_attention, named_modules
from sagepatch.patchers.site import Found, Left, Site, Swap
from sagepatch.patchers.transformers_attention import (
    OVER_EAGER,
    OVER_SDPA,
    OVER_SDPA_MASKED,
    PREVIOUS,
    eager_function,
    register,
    unknown_terms,
)

# Where a config keeps the name: the public setter also overwrites every nested config.
_NAME = "_attn_implementation_internal"


def find(model: nn.Module, prefix: str) -> Found:
    """Every module of `model` on transformers' attention interface; `patchers.sdpa` finds the rest.

    Left alone, with a reason: modules whose config asks for flash or flex attention, families that
    choose their sparse masks by the names "eager" and "sdpa", and models that always want maps.
    """
    sites: list[Site] = []
    left: list[Left] = []
    branching = _configs_branched_on(model)
    masked = any(_is_model(m) and compares_implementation(type(m)) for m in model.modules())
    for name, module in named_modules(model, prefix):
        if not uses_attention_interface(type(module)):
            continue
        kind = kind_of(name, module)
        reason = _why_left(module, branching)
        if reason is None:
            switch = Switch.of(module.config, masked)
            install = functools.partial(_install, module, switch)
            sites.append(Site(name, kind, module, "transformers", install))
        else:
            left.append(Left(name, kind, reason))
    return Found(tuple(sites), tuple(left))


class Switch:
    """One config object: the attention implementation it named, and who still needs ours.

    Configs are shared by the layers of a model and may be shared by models: the name goes back
    when the last patched module on it is restored.
    """

    def __init__(self, config: Any, masked: bool) -> None:
        self.config = config
        self.over_sdpa = OVER_SDPA_MASKED if masked else OVER_SDPA
        self.previous: str | None = PREVIOUS.get(config._attn_implementation)
        self.users: set[int] = set()

    @classmethod
    def of(cls, config: Any, masked: bool) -> Switch:
        """The one switch of this config object."""
        switch = _SWITCHES.get(id(config))
        if switch is None:
            switch = _SWITCHES[id(config)] = cls(config, masked)
        return switch

    def on(self, user: int) -> None:
        """Name ours in the config, in place of what it names now."""
        self.users.add(user)
        named = self.config._attn_implementation
        if named not in PREVIOUS:
            self.previous = named
            ours = self.over_sdpa if named == "sdpa" else OVER_EAGER
            setattr(self.config, _NAME, ours)

    def off(self, user: int) -> None:
        """Name what was before, once nobody needs ours and unless something newer is named."""
        self.users.discard(user)
        if not self.users and self.in_force:
            setattr(self.config, _NAME, self.previous)

    @property
    def in_force(self) -> bool:
        """Whether the config names ours, and no newer choice of the user."""
        return self.config._attn_implementation in PREVIOUS


class _Named(Carrier):
    """The carrier of a module whose config names ours; a copy or pickle of the module takes its
    config with it, to which this gives the name of before.

    The name itself stays a plain string: torch 2.11 compiles no look-up of a subclass.
    """

    __slots__ = ("switch",)

    def __init__(self, handle: Tensor, switch: Switch) -> None:
        super().__init__(handle)
        self.switch = switch

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        if self.switch.in_force:
            setattr(copy.deepcopy(self.switch.config, memo), _NAME, self.switch.previous)

    def __reduce__(self) -> Any:
        if not self.switch.in_force:
            return super().__reduce__()
        # Loads without sagepatch, and as None.
        return setattr, (self.switch.config, _NAME, self.switch.previous)


# By id, as configs cannot be hashed; a switch keeps its config alive, so an id stays its own.
_SWITCHES: WeakValueDictionary[int, Switch] = WeakValueDictionary()


def _install(module: nn.Module, switch: Switch, layer: PatchedLayer) -> Swap:
    register()
    carrier = _Named(layer.handle, switch)
    setattr(module, ATTRIBUTE, carrier)
    switch.on(id(carrier))

    def undo() -> None:
        if module.__dict__.get(ATTRIBUTE) is carrier:
            delattr(module, ATTRIBUTE)
        switch.off(id(carrier))

    def replaced_by() -> str | None:
        if module.__dict__.get(ATTRIBUTE) is not carrier:
            return "another patch"
        return None if switch.in_force else str(switch.config._attn_implementation)

    return Swap(undo, replaced_by)


def _why_left(module: nn.Module, branching: set[int]) -> str | None:
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return f"{type(module).__name__} has no config that names its attention function"
    named = config._attn_implementation
    over_sdpa = PREVIOUS.get(named, named) == "sdpa"
    if not over_sdpa and eager_function(type(module)) is None:
        return f"{type(module).__name__} names no eager attention to fall back on"
    unknown = unknown_terms(type(module))
    if unknown:
        return f"its attention takes {', '.join(unknown)}, which no kernel here knows"
    if id(config) in branching:
        return (
            "its sparse or special masks are built only under the names 'eager' and 'sdpa', "
            "another name would lose them"
        )
    if named not in ("sdpa", "eager", None, *PREVIOUS):
        return (
            f"it runs {named}, which takes other masks; "
            "call model.set_attn_implementation('sdpa') first"
        )
    if getattr(config, "output_attentions", False):
        return "config.output_attentions is set: every call has to return its attention map"
    return None


def _configs_branched_on(model: nn.Module) -> set[int]:
    """Configs with an attention module that does something else for each implementation's name."""
    return {
        id(module.config)
        for module in model.modules()
        if hasattr(module, "config")
        and not _is_model(module)
        and (named_attention(module) or uses_attention_interface(type(module)))
        and compares_implementation(type(module))
    }


def _is_model(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)
