"""timm's true classes, tiny. timm wants torchvision for its pictures' transforms and one frozen
norm, which no model here uses: where it is missing, empty stand-ins serve while timm is imported.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Old names of other modules, which warn when they are imported.
_RENAMED = {"factory", "features", "fx_features", "helpers", "hub", "layers", "registry"}
INSTALLED = importlib.util.find_spec("timm") is not None


class _Empty(types.ModuleType):
    """A module in which every class exists and does nothing."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "InterpolationMode":
            return enum.Enum(name, "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")
        if name[:1].isupper():
            return type(name, (nn.Module,), {"__module__": self.__name__})
        raise AttributeError(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def import_timm() -> Any:
    """The package timm; torchvision is what it was before, also where it is missing."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def module_classes() -> Iterator[type]:
    """The nn.Module classes that timm's models and layers define."""
    import_timm()
    for package in map(importlib.import_module, ("timm.layers", "timm.models")):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if found.name.rpartition(".")[2] in _RENAMED:
                continue
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                own = isinstance(value, type) and value.__module__ == module.__name__
                if own and issubclass(value, nn.Module):
                    yield value


def build(name: str, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """One of timm's models with random weights, and two pictures for it."""
    torch.manual_seed(0)
    model = import_timm().create_model(name, num_classes=7, **options).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in key and "table" not in key:
            nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    side = options.get("img_size", 64)
    pictures = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    return model, pictures
