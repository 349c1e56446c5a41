"""Writes docs/coverage-transformers.md: one row a family, read from the installed transformers.

python tests/coverage/transformers_page.py
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from transformers_types import FATES, model_types  # noqa: E402
from transformers_walk import (  # noqa: E402
    FUSED_MODULE,
    UNIMPORTABLE,
    Verdict,
    modeling_modules,
    module_classes,
    verdicts,
)

from sagepatch.patchers.transformers_attention import eager_function  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "coverage-transformers.md"

# What a modeling file calls to build its masks, and the word for it.
_MASKS = {
    "create_causal_mask": "causal",
    "create_sliding_window_causal_mask": "window",
    "create_chunked_causal_mask": "chunks",
    "create_bidirectional_mask": "padding",
    "create_bidirectional_sliding_window_mask": "two-sided window",
}
_TERMS = {"position_bias": "position bias", "softcap": "soft cap"}
_WAYS = {"transformers": "interface", "sdpa": "its SDPA call"}
# Names under which configs keep a width and a number of heads.
_WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embed_dim",
    "emb_dim",
    "attention_hidden_size",
)
_HEADS = ("num_attention_heads", "encoder_attention_heads", "n_head", "n_heads", "num_heads")

_INTRO = """# What is reached in transformers
Made by `python tests/coverage/transformers_page.py` from transformers {version}; a test fails when
it is stale. {families} families define attention of their own; in {reached} of them every or some
layers run our kernels. {tiny} of these are built tiny from their true classes, patched, compared
with the unpatched model and restored bit-equal by `tests/coverage/test_transformers_matrix.py`.
Families that only combine others (LLaVA, PaliGemma, ...) are reached through their parts.

- **reached**: *interface*, by transformers' attention interface; *its SDPA call*, by redirecting
  the call that the module itself makes; *no*: none of its layers, the last column says why.
- **tested**: a tiny model of it is in the matrix.
- **masks and terms**: what its files build or pass; all of it is honoured. *packed*: windows or
  pictures by offsets.
- **head sizes**: of the default configs; q, k / v where they differ. Our kernels take 8 to 256.
- **caches**: a single new token (decoding) stays exact by rule; the prefill is quantised.
- **stays exact**: classes that are left alone, and why. *softmax*: by hand; *own way*: neither a
  softmax nor SDPA; *fused*: {fused} or its function.

Always exact, in every family: calls that want attention maps, gradients or dropout, and single
queries.

Llama 3.1 8B was also run in its true size, with random weights, unpatched and patched on an H200:
[whole models timed](end-to-end.md).
"""
_HEAD = """
| family | reached | tested | masks and terms | head sizes | caches | stays exact |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    import transformers

    tested = {_folder(name) for fate in FATES for name in model_types(fate)}
    held = {family: found for family, found in verdicts().items() if found}
    reached = [family for family, found in held.items() if any(v.patcher for v in found)]
    rows = "".join(_row(family, found, family in tested) for family, found in sorted(held.items()))
    intro = _INTRO.format(
        version=transformers.__version__,
        families=len(held),
        reached=len(reached),
        tiny=len(tested & set(reached)),
        fused=f"`{FUSED_MODULE}`",
    )
    others = sorted(modeling_modules().keys() - held.keys() - {"auto"})
    combining = [family for family in others if _combines(family)]
    plain = [f for f in others if f not in combining and modeling_modules()[f]]
    unread = [f"{family} ({package})" for family, package in UNIMPORTABLE.items()]
    closing = [
        "Families that combine others, and are reached through what they hold: "
        f"{', '.join(combining)}.",
        f"Families without attention (timm_backbone and timm_wrapper hold timm's, see "
        f"[coverage-timm.md](coverage-timm.md)): {', '.join(plain)}.",
        f"Not read here, for want of a package: {', '.join(unread)}.",
    ]
    return f"{intro}{_HEAD}{rows}\n" + "\n\n".join(closing) + "\n"


def _combines(family: str) -> bool:
    """Whether a model of this family holds models of others, by its config or its imports."""
    configs = (getattr(owner, "config_class", None) for owner in module_classes(family))
    named = (value for file in modeling_modules()[family] for value in vars(file).values())
    modules = (value.__module__ for value in named if isinstance(value, type))
    return any(getattr(config, "sub_configs", None) for config in configs) or any(
        module.startswith("transformers.models.")
        and ".modeling_" in module
        and module.split(".")[2] != family
        for module in modules
    )


def _folder(model_type: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return str(model_type_to_module_name(model_type))


def _row(family: str, found: tuple[Verdict, ...], tested: bool) -> str:
    files = modeling_modules()[family]
    ways = sorted({_WAYS[v.patcher] for v in found if v.patcher is not None})
    cells = (
        family,
        " + ".join(ways) or "no",
        "yes" if tested else "",
        ", ".join(_masks(files, found)),
        ", ".join(_head_sizes(family)),
        ", ".join(_caches(files)),
        "; ".join(_left(found)),
    )
    return f"| {' | '.join(cells)} |\n"


def _masks(files: tuple[types.ModuleType, ...], found: tuple[Verdict, ...]) -> list[str]:
    words = [word for name, word in _MASKS.items() if any(hasattr(f, name) for f in files)]
    names = {name for v in found for name in _names(v.owner)}
    for verdict in found:
        if verdict.patcher == "transformers":
            eager = eager_function(verdict.owner)
            names.update(() if eager is None else inspect.signature(eager).parameters)
    words += [word for name, word in _TERMS.items() if name in names]
    words += ["sinks"] if names & {"s_aux", "sinks"} else []
    words += ["packed"] if "cu_seqlens" in names else []
    return words


def _names(owner: type) -> Iterator[str]:
    forward = inspect.unwrap(owner.forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (name for name in constant if isinstance(name, str))


def _head_sizes(family: str) -> list[str]:
    """Sizes of the family's default configs, smallest first."""
    import importlib
    import pkgutil

    package = importlib.import_module(f"transformers.models.{family}")
    sizes: set[tuple[int, int]] = set()
    for file in pkgutil.iter_modules(package.__path__):
        if file.name.startswith("configuration_"):
            module = importlib.import_module(f"{package.__name__}.{file.name}")
            for owner in vars(module).values():
                if isinstance(owner, type) and owner.__module__ == module.__name__:
                    sizes.update(_sizes(vars(owner()) if hasattr(owner, "model_type") else {}))
    return [str(k) if k == v else f"{k} / {v}" for k, v in sorted(sizes)]


def _sizes(config: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """(queries and keys, values) of one config."""
    rope, nope, values = (
        config.get(k) for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    if isinstance(rope, int) and isinstance(nope, int) and isinstance(values, int):
        yield rope + nope, values
        return
    size = config.get("head_dim") or config.get("d_kv")
    if isinstance(size, int):
        yield size, size
        return
    width = next((config[name] for name in _WIDTHS if config.get(name)), None)
    heads = next((config[name] for name in _HEADS if config.get(name)), None)
    widths = width if isinstance(width, list | tuple) else [width]
    counts = heads if isinstance(heads, list | tuple) else [heads]
    for one, count in zip(widths, counts, strict=False):
        if isinstance(one, int) and isinstance(count, int) and count and one % count == 0:
            yield one // count, one // count


def _caches(files: tuple[types.ModuleType, ...]) -> list[str]:
    words = []
    if any(hasattr(f, "DynamicCache") or hasattr(f, "EncoderDecoderCache") for f in files):
        words.append("dynamic")
        if any(
            getattr(value, "_can_compile_fullgraph", False)
            for f in files
            for value in vars(f).values()
        ):
            words.append("static")
        if any(hasattr(f, "create_sliding_window_causal_mask") for f in files):
            words.append("sliding")
        if any(hasattr(f, "EncoderDecoderCache") for f in files):
            words.append("with encoder")
    return words


def _left(found: tuple[Verdict, ...]) -> Iterator[str]:
    """Reasons, each once with the classes that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for verdict in found:
        if verdict.reason is not None:
            by_reason.setdefault(short_reason(verdict), []).append(f"`{verdict.owner.__name__}`")
    for reason, owners in by_reason.items():
        yield f"{reason}: {', '.join(owners)}"


def short_reason(verdict: Verdict) -> str:
    """The reason of the report in a word or two, for a table."""
    reason = verdict.reason or ""
    for words, short in (
        ("by hand", "softmax"),
        ("a way of its own", "own way"),
        ("a fused path", "fused"),
        ("flash attention", "flash attention alone"),
        ("sparse or special masks", "refused, sparse masks by name"),
    ):
        if words in reason:
            return short
    return reason


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    PAGE.write_text(page())
    print(PAGE)
