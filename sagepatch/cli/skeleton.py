"""A model without its weights, built from its configs alone on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sagepatch.cli.console import quiet_libraries
from sagepatch.cli.failures import loading
from sagepatch.cli.loading import check_access, config_file, library_of, read_json
from sagepatch.cli.sources import Source
from sagepatch.errors import InvalidArgument, ModelError
from sagepatch.patchers.model import Parts, parts_of


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Pipeline:
    """As much of a pipeline as `parts_of` looks at and refers to."""

    components: dict[str, nn.Module]


def skeleton(source: Source, components: Sequence[str] | None) -> Parts:
    """The parts of the model to look at: its denoisers, or those named."""
    quiet_libraries()
    source = demo_folder(source)
    check_access(source)
    library = library_of(source)
    if library == "pipeline":
        return _pipeline_parts(source, components)
    path = config_file(source, "config.json")
    assert path is not None
    config = read_json(source, path)
    with loading(source), torch.device("meta"):
        if library == "diffusers":
            module = _diffusers_class(source, config["_class_name"]).from_config(config)
        else:
            module = _transformers_model(source, "")
    return parts_of(module, components)


def _pipeline_parts(source: Source, components: Sequence[str] | None) -> Parts:
    path = config_file(source, "model_index.json")
    assert path is not None
    index = read_json(source, path)
    declared = {
        name: (str(pair[0]), str(pair[1]))
        for name, pair in index.items()
        if isinstance(pair, list) and len(pair) == 2 and pair[0] is not None
    }
    unknown = [name for name in components or () if name not in declared]
    if unknown:
        raise InvalidArgument(
            f"{source.asked} has no component {', '.join(unknown)}; it has {', '.join(declared)}"
        )
    modules: dict[str, nn.Module] = {}
    for name, (library, class_name) in declared.items():
        wanted = name in components if components is not None else library == "diffusers"
        if wanted:
            module = _component(source, name, library, class_name)
            if module is not None:
                modules[name] = module
    label = str(index.get("_class_name", source.asked))
    return replace(parts_of(_Pipeline(modules), components), label=label)


def _component(source: Source, name: str, library: str, class_name: str) -> nn.Module | None:
    """One part on the meta device; None where it is no module (a scheduler, a tokenizer)."""
    path = config_file(source, f"{name}/config.json")
    if path is None:
        return None
    with loading(source), torch.device("meta"):
        if library == "transformers":
            return _transformers_model(source, name)
        cls = _diffusers_class(source, class_name)
        module: nn.Module = cls.from_config(read_json(source, path))
        return module


def _diffusers_class(source: Source, name: str) -> Any:
    import diffusers

    cls = getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ModelError(
            f"{source.asked} needs diffusers' class {name}, which diffusers "
            f"{diffusers.__version__} has not"
        )
    return cls


def _transformers_model(source: Source, folder: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(source.location, subfolder=folder)
    named: Any = getattr(transformers, (config.architectures or ["AutoModel"])[0], None)
    known = isinstance(named, type) and issubclass(named, nn.Module)
    module: nn.Module = named(config) if known else transformers.AutoModel.from_config(config)
    return module


def demo_folder(source: Source) -> Source:
    """The demo as the folder that it lies in; any other source as it is."""
    if not source.is_demo:
        return source
    from sagepatch.demo.loader import FOLDER

    return Source(source.asked, str(FOLDER))
