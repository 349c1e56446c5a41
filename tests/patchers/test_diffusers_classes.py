"""Every processor class of the installed diffusers is classified, and rightly."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import types
from typing import Any

import pytest
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

from sagepatch.patchers.code import names_in
from sagepatch.patchers.diffusers import _JOINT
from sagepatch.patchers.diffusers_copies import _recreate
from sagepatch.patchers.diffusers_processors import (
    _BACKEND_READ_BY_MODEL,
    DISPATCH,
    Route,
    call_of,
    class_way,
    methods_of,
    way_of,
)

# Classes that a user meets and that stay as they are, with the words that the report gives.
LEFT = {
    "AttnAddedKVProcessor": "computes its scores by hand",
    "AttnProcessor": "computes its scores by hand",
    "CustomDiffusionAttnProcessor": "computes its scores by hand",
    "IPAdapterAttnProcessor": "computes its scores by hand",
    "SlicedAttnAddedKVProcessor": "computes its scores by hand",
    "SlicedAttnProcessor": "computes its scores by hand",
    "CustomDiffusionXFormersAttnProcessor": "calls xformers",
    "IPAdapterXFormersAttnProcessor": "calls xformers",
    "XFormersAttnAddedKVProcessor": "calls xformers",
    "XFormersAttnProcessor": "calls xformers",
    "XFormersJointAttnProcessor": "calls xformers",
    "PAGCFGSanaLinearAttnProcessor2_0": "linear attention",
    "PAGIdentitySanaLinearAttnProcessor2_0": "linear attention",
    "SanaLinearAttnProcessor2_0": "linear attention",
    "SanaLinearAttnProcessor3_0": "linear attention",
    "SanaMultiscaleAttnProcessor2_0": "linear attention",
    "AnyFlowCausalAttnProcessor": "asks for the flex backend",
    "Kandinsky6SRAttnProcessor": "asks for the flex backend",
    "LTX2VideoVaeNeighborhoodAttnProcessor": "asks for the flex backend",
    "LTX2VideoVaeNeighborhoodNattenProcessor": "neither torch's SDPA nor diffusers' dispatcher",
}
# Dispatcher calls that carry no backend, not always their own, or one that the model itself reads.
REDIRECTED = {
    "AceStepAttnProcessor2_0",
    "CosmosAttnProcessor2_0",
    "CosmosAttnProcessor2_5",
    "MMAudioAttnProcessor",
    "QwenImage21AttnProcessor",
}


@functools.cache
def processor_classes() -> tuple[type, ...]:
    """Every class of diffusers.models that is called with an attention module."""
    import diffusers.models

    for found in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        importlib.import_module(found.name)
    return tuple(
        value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("diffusers.models.")
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and value.__name__.replace("AttentionProc", "AttnProc").find("Processor") > 0
        and call_of(value) is not None
    )


def test_walk_finds_the_processors() -> None:
    names = {cls.__name__ for cls in processor_classes()}
    assert len(names) > 100
    assert {"FluxAttnProcessor", "AttnProcessor2_0", "AttnAddedKVProcessor"} <= names


def test_only_known_classes_are_left() -> None:
    left = {
        cls.__name__: class_way(cls).reason
        for cls in processor_classes()
        if class_way(cls).route is Route.NONE
    }
    assert left.keys() == LEFT.keys()
    for name, words in LEFT.items():
        assert words in left[name]


def test_route_agrees_with_what_each_file_imports() -> None:
    for cls in processor_classes():
        call = call_of(cls)
        assert call is not None
        route = class_way(cls).route
        if route is Route.DISPATCH:
            assert DISPATCH in call.__globals__, cls
            assert cls._attention_backend is None, cls
        elif route is Route.SDPA:
            dispatches = DISPATCH in set(names_in(call.__code__))
            assert dispatches == (cls.__name__ in REDIRECTED), cls


def test_every_dispatching_class_is_re_created_with_its_own_signature() -> None:
    for cls in processor_classes():
        route = class_way(cls).route
        if route is not Route.NONE:
            copy = _recreate(cls, route, None, methods_of(cls))
            assert issubclass(copy, cls)
            original = call_of(cls)
            assert original is not None
            ours = call_of(copy)
            assert ours is not None
            if route is Route.DISPATCH:
                # An object of its own: a compiler keeps what it makes of a frame by it.
                assert ours.__code__ == original.__code__
                assert ours.__code__ is not original.__code__
                assert ours.__globals__ is not original.__globals__
                assert ours.__globals__[DISPATCH] is not original.__globals__[DISPATCH]
                private = ours.__globals__
                # Dynamo's guards look for the globals under their name.
                assert vars(sys.modules[private["__name__"]]) is private


def test_helpers_that_dispatch_for_a_processor_are_private_too() -> None:
    from diffusers.models.transformers import transformer_flux2

    owner = transformer_flux2.Flux2KVAttnProcessor
    copy = _recreate(owner, Route.DISPATCH, None, methods_of(owner))
    helper = vars(copy)["__call__"].__globals__["_flux2_kv_causal_attention"]
    assert helper.__code__ == transformer_flux2._flux2_kv_causal_attention.__code__
    assert helper is not transformer_flux2._flux2_kv_causal_attention
    assert helper.__globals__[DISPATCH] is vars(copy)["__call__"].__globals__[DISPATCH]


def test_nobody_but_processors_reads_their_backend() -> None:
    """A model that reads `_attention_backend` itself would meet our handle there."""

    def consts(code: types.CodeType) -> set[Any]:
        inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
        own = {c for c in code.co_consts if isinstance(c, str)}
        return own.union(*(consts(c) for c in inner))

    processor_classes()
    readers = {
        module.__name__
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("diffusers.models.")
        for value in vars(module).values()
        if isinstance(value, types.FunctionType)
        and value.__module__ == module.__name__
        and "_attention_backend" in consts(value.__code__)
    }
    known = {
        cls.__module__ for cls in processor_classes() if cls.__name__ in _BACKEND_READ_BY_MODEL
    }
    assert readers == known


def test_joint_table_names_real_classes() -> None:
    assert {cls.__name__ for cls in processor_classes()} >= _JOINT


class Wrapping(FluxAttnProcessor):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnSdpa:
    def __call__(self, attn: Any, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x)


class OwnSoftmax:
    def __call__(self, attn: Any, x: Any) -> Any:
        return (x @ x.mT).softmax(-1) @ x


class AsModule(nn.Module):
    def forward(self, attn: Any, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x)


class Inheriting(AttnProcessor2_0):
    pass


@pytest.mark.parametrize(
    ("processor", "route"),
    [
        (Wrapping(), Route.SDPA),
        (OwnSdpa(), Route.SDPA),
        (OwnSoftmax(), Route.NONE),
        (AsModule(), Route.SDPA),
        (Inheriting(), Route.SDPA),
        (lambda attn, x: x, Route.NONE),
    ],
    ids=["calls its base", "own sdpa", "own softmax", "a module", "inherits", "a function"],
)
def test_processors_of_other_people(processor: Any, route: Route) -> None:
    way = way_of(processor)
    assert way.route is route
    assert bool(way.reason) == (route is Route.NONE)
