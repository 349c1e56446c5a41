"""Every module class of the installed transformers and what our patchers make of it, read from its
code alone: nothing is built. What holds attention is told here by rules of their own.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from timm_models import INSTALLED, import_timm
from torch import nn

from sagepatch.patchers.model import Parts, search

# Families whose modeling file needs a package that we do not install.
UNIMPORTABLE = {"higgs_audio_v2_tokenizer": "torchaudio"}

# Classes that multiply and take a softmax and yet attend to nothing, with what they do.
NOT_ATTENTION = {
    "CHMv2FeaturesToDepth": "an average over depth bins",
    "DiffusionGemmaDecoderModel": "a mean embedding over the vocabulary",
    "DogeCDMoE": "retrieval of experts",
    "EfficientLoFTRForKeypointMatching": "matching of two pictures' points",
    "EomtDinov3HungarianMatcher": "a matching cost of training",
    "EomtHungarianMatcher": "a matching cost of training",
    "EsmFold2ConfidenceHead": "an average over bins",
    "EsmFold2LanguageModelEncoder": "an average over layers",
    "EsmFold2MSAPairWeightedAveraging": "weights from a pair bias: no queries, no keys",
    "EsmForProteinFolding": "an average over layers",
    "FlaubertSQuADHead": "an average of start states",
    "Glm5NextTextIndexer": "it chooses keys for the attention",
    "Mask2FormerHungarianMatcher": "a matching cost of training",
    "MaskFormerHungarianMatcher": "a matching cost of training",
    "MgpstrA3Module": "weights from a convolution: no keys",
    "OneFormerHungarianMatcher": "a matching cost of training",
    "PatchTSMixerGatedAttention": "a gate over its own features",
    "RagTokenForGeneration": "a mean over retrieved documents",
    "SuperGlueForKeypointMatching": "matching of two pictures' points",
    "TapasForQuestionAnswering": "a choice of columns",
    "VideomtHungarianMatcher": "a matching cost of training",
    "XLMSQuADHead": "an average of start states",
    "XLNetForQuestionAnswering": "an average of start states",
}

_FUSED = frozenset(
    {
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "flex_attention",
        "get_interface",
        "ALL_ATTENTION_FUNCTIONS",
        "_flash_attention_forward",
        "flash_attn_varlen_func",
        "MultiheadAttention",
    }
)
# Where the classes come from that count as a model's own code.
_PACKAGES = ("transformers.models", "timm.")
_SOFTMAX = frozenset({"softmax", "Softmax", "logsumexp"})
_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})
FUSED_MODULE = "torch.nn.MultiheadAttention"


@dataclass(frozen=True)
class Verdict:
    """What becomes of one attention class: the patcher that reaches it, or why it is left."""

    owner: type
    patcher: str | None
    reason: str | None


@functools.cache
def modeling_modules() -> dict[str, tuple[types.ModuleType, ...]]:
    """The modeling files of each family that can be imported here, by the family's folder."""
    import transformers.models

    if INSTALLED:
        import_timm()  # some families wrap it
    found: dict[str, tuple[types.ModuleType, ...]] = {}
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        if folder.name in UNIMPORTABLE or not folder.ispkg:
            continue
        package = importlib.import_module(f"transformers.models.{folder.name}")
        names = [m.name for m in pkgutil.iter_modules(package.__path__)]
        found[folder.name] = tuple(
            importlib.import_module(f"{package.__name__}.{name}")
            for name in names
            if name.startswith("modeling_")
        )
    return found


def module_classes(family: str) -> Iterator[type]:
    """The nn.Module classes that a family's own files define."""
    for file in modeling_modules()[family]:
        for value in vars(file).values():
            own = isinstance(value, type) and value.__module__ == file.__name__
            if own and issubclass(value, nn.Module):
                yield value


def holds_attention(owner: type) -> bool:
    """Whether a class computes attention: it calls a fused function, or takes a softmax and
    multiplies, or is called attention and multiplies or runs a kernel of its own.
    """
    names: set[str] = set()
    product = False
    for code in _codes_of(owner):
        names.update(code.co_names)
        product = product or any(
            step.opname == "BINARY_OP" and step.argrepr == "@"
            for step in dis.get_instructions(code)
        )
    product = product or bool(names & _PRODUCTS)
    called = any(word in owner.__name__.lower() for word in ("attention", "attn"))
    if called and "Loss" in owner.__name__:
        return False
    return bool(
        names & _FUSED
        or (names & _SOFTMAX and (product or called))
        or (called and (product or "apply" in names))
    )


def verdict(owner: type) -> Verdict | None:
    """What `search` makes of an instance of this class; None where it finds nothing in it."""
    holder = nn.Module()
    part: Any = nn.Module()
    try:
        part.__class__ = owner
    except TypeError:  # a class with another layout, as TorchScript's are
        return None
    part.__dict__["config"] = SimpleNamespace(_attn_implementation="sdpa")
    holder._modules["it"] = part
    found = search(Parts("", {"": holder}))
    if found.sites:
        return Verdict(owner, found.sites[0].patcher, None)
    if found.left:
        return Verdict(owner, None, found.left[0].reason)
    if any("MultiheadAttention" in code.co_names for code in _codes_of(owner)):
        return Verdict(owner, None, f"{owner.__name__} holds a {FUSED_MODULE}, a fused path")
    return None


@functools.cache
def verdicts() -> dict[str, tuple[Verdict, ...]]:
    """Every class that our patchers find something in, by family."""
    return {
        family: tuple(v for owner in module_classes(family) if (v := verdict(owner)) is not None)
        for family in modeling_modules()
    }


def _codes_of(owner: type) -> Iterator[types.CodeType]:
    """The code of a class's own and inherited methods, and of what they call in the same file."""
    seen: set[types.FunctionType] = set()
    queue = [
        function
        for base in owner.__mro__
        if base.__module__.startswith(_PACKAGES)
        for name, value in vars(base).items()
        if name != "_init_weights" and (function := _function(value)) is not None
    ]
    while queue:
        function = queue.pop()
        if function not in seen:
            seen.add(function)
            codes, called = _reach(function)
            yield from codes
            queue.extend(called)


@functools.cache
def _reach(
    function: types.FunctionType,
) -> tuple[tuple[types.CodeType, ...], tuple[types.FunctionType, ...]]:
    """The code objects of one function, and the functions of the same file that it calls."""
    codes = tuple(_nested(function.__code__))
    named = {name for code in codes for name in code.co_names}
    others = (_function(function.__globals__.get(name)) for name in named)
    called = (f for f in others if f is not None and f.__module__ == function.__module__)
    return codes, tuple(called)


def _function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    if not callable(value):
        return None
    value = inspect.unwrap(value)
    return value if isinstance(value, types.FunctionType) else None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
