"""A whole pipeline or model: which of its parts hold attention, every site in them, and its
structure's fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sagepatch.errors import InvalidArgument, ModelError
from sagepatch.patchers.site import Found, Left, Site

# Parts of pipelines that do not denoise; they are patched only when named.
_NOT_DENOISERS = (
    "vae",
    "vqgan",
    "vqvae",
    "movq",
    "encoder",
    "safety",
    "tagger",
    "vocoder",
    "guider",
    # Part of a UNet already, which holds what runs of it.
    "motion_adapter",
    # Work on a prompt or a sound once, before the first step.
    "connector",
    "tokenizer",
    "duration",
)
# Parts that denoise whatever they are made of: processors of diffusers or not.
_DENOISERS = ("transformer", "unet", "model")


@dataclass(frozen=True, slots=True)
class Parts:
    """The modules to patch by their name in the pipeline ("" for a model on its own), the whole's
    name, and the pipeline itself as long as it lives.
    """

    label: str
    modules: dict[str, nn.Module]
    pipeline: Callable[[], Any] = lambda: None

    def now(self) -> dict[str, nn.Module]:
        """The modules that stand in the places of these: users put others in their pipelines."""
        owned = getattr(self.pipeline(), "components", None) or {}
        here = {name: owned.get(name) for name in self.modules}
        others = {n: _uncompiled(part) for n, part in here.items() if isinstance(part, nn.Module)}
        return self.modules | others


def parts_of(model: Any, components: Sequence[str] | None, *, every: bool = False) -> Parts:
    """The parts of `model` to patch: the denoisers of a pipeline, or those named, or all with
    `every`.
    """
    if isinstance(model, nn.Module):
        model = _uncompiled(model)
    label = type(model).__name__
    if isinstance(components, str):
        raise InvalidArgument(f"components is one string: pass a list, [{components!r}]")
    if isinstance(model, nn.Module):
        if components is not None:
            raise InvalidArgument(f"components names parts of a pipeline; {label} is one model")
        return Parts(label, {"": model})
    owned = getattr(model, "components", None)
    if not isinstance(owned, dict):
        raise ModelError(f"cannot patch {label}: needs a diffusers pipeline or an nn.Module")
    modules = {
        name: _uncompiled(part) for name, part in owned.items() if isinstance(part, nn.Module)
    }
    # Of objects with slots there may be no weak reference: what is put in them later is not seen.
    pipeline = weakref.ref(model) if type(model).__weakrefoffset__ else lambda: None
    if every:
        return Parts(label, modules, pipeline)
    if components is None:
        denoisers = {name: part for name, part in modules.items() if _denoises(name, part)}
        return Parts(label, denoisers, pipeline)
    unknown = [name for name in components if name not in modules]
    if unknown:
        raise InvalidArgument(
            f"{label} has no component {', '.join(unknown)}; it has {', '.join(modules)}"
        )
    return Parts(label, {name: modules[name] for name in components}, pipeline)


def search(parts: Parts) -> Found:
    """Every attention layer of the parts: what can be patched, by the first patcher that knows it,
    and what cannot.
    """
    sites: dict[str, Site] = {}
    left: dict[str, Left] = {}
    for name, module in parts.modules.items():
        for patcher in _patchers():
            found = patcher(module, name)
            for site in found.sites:
                if site.name not in left and not _is_processor_of(site.name, sites):
                    sites.setdefault(site.name, site)
            for layer in found.left:
                if layer.name not in sites and not _is_processor_of(layer.name, sites):
                    left.setdefault(layer.name, layer)
    return Found(tuple(sites.values()), tuple(left.values()))


def _is_processor_of(name: str, sites: dict[str, Site]) -> bool:
    """Whether a module is the processor of a known layer, through which that layer attends."""
    owner, _, last = name.rpartition(".")
    return last == "processor" and owner in sites


def taken_out(parts: Parts, sites: Iterable[Site]) -> dict[str, str]:
    """Layers whose module was taken out of the model, and the class that stands in its place."""
    from sagepatch.patchers.sdpa import named_modules

    here = {
        name: module
        for part, root in parts.now().items()
        for name, module in named_modules(root, part)
    }
    held = {id(module) for module in here.values()}
    return {
        site.name: type(here[site.name]).__name__ if site.name in here else "nothing, it is gone"
        for site in sites
        if id(site.module) not in held
    }


def fingerprint(parts: Parts, found: Found) -> str:
    """A short hash of the structure: classes, geometry in the configs, layer names; no weights,
    dtypes or devices.

    Offloading, casting, quantised weights, LoRA and sharding (FSDP2) leave it unchanged.
    """
    facts = [
        [name, _class_name(module), _geometry(module)] for name, module in parts.modules.items()
    ]
    layers = sorted((site.name, site.kind) for site in found.sites)
    text = json.dumps([facts, layers], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`'s wrapper: names and fingerprints are the same without."""
    return module._modules.get("_orig_mod") or module


def _class_name(module: nn.Module) -> str:
    """The name of a module's class; under `fully_shard`, which puts a class of its own above that,
    the name of the class below.
    """
    owner = type(module)
    sharding = sys.modules.get("torch.distributed.fsdp")
    sharded: type | None = getattr(sharding, "FSDPModule", None)
    if sharded is not None and sharded in owner.__bases__:
        owner = next(base for base in owner.__bases__ if base is not sharded)
    return owner.__name__


def _denoises(name: str, part: nn.Module) -> bool:
    if any(word in name for word in _NOT_DENOISERS):
        return False
    if name.rstrip("_0123456789") in _DENOISERS:
        return True
    return hasattr(part, "attn_processors") or any(
        "processor" in module.__dict__ for module in part.modules()
    )


def _geometry(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    values = dict(config or {}) if to_dict is None else to_dict()
    return {
        key: value
        for key, value in values.items()
        if not key.startswith("_") and isinstance(value, bool | int | list | tuple)
    }


def _patchers() -> list[Any]:
    """The finders that can matter: a library that nobody imported made no model."""
    from sagepatch.patchers import sdpa

    finders = []
    if "diffusers" in sys.modules:
        from sagepatch.patchers import diffusers

        finders.append(diffusers.find)
    if "transformers" in sys.modules:
        from sagepatch.patchers import transformers

        finders.append(transformers.find)
    return [*finders, sdpa.find]
