"""What the published geometry of a family does in one forward, counted on shapes alone: the meta
device computes nothing and holds no weights.

python tests/coverage/diffusers_shares.py    writes diffusers_shares.csv, takes minutes
"""

from __future__ import annotations

import contextlib
import csv
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from diffusers_family import Family
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from sagepatch.cli.inspect import heads_of
from sagepatch.patchers.model import Parts, search

TABLE = Path(__file__).with_name("diffusers_shares.csv")


@dataclass(frozen=True, slots=True)
class Published:
    """One family at its published geometry.

    `layers` is the number of attention layers and `reached` those of them that a patch takes;
    `heads` are "query heads x head size". The rest is empty where shapes alone do not tell:
    `longest` is "queries x keys" of the largest call, `attention_percent` the part of a forward's
    floating point operations that SDPA does, and `tera_operations` the whole.
    """

    family: str
    layers: int
    reached: int
    heads: str
    longest: str = ""
    attention_percent: str = ""
    tera_operations: str = ""


def published(family: Family) -> Published:
    """Build the published geometry and count one forward at the usual size."""
    with torch.device("meta"):
        model = family.built(full=True).to("meta")
    found = search(Parts(family.model, {"": model}))
    layers = len(found.sites) + len(found.left)
    if family.usual is None:
        sizes = [heads_of(site.module) for site in found.sites]
        heads = dict.fromkeys(f"{n} x {d}" for n, d in sizes if n is not None)
        return Published(family.name, layers, len(found.sites), ", ".join(heads))
    seen = _Attention()
    rest = count_rest(model, family, seen)
    attention = seen.operations
    return Published(
        family.name,
        layers,
        len(found.sites),
        ", ".join(seen.heads),
        " x ".join(map(str, seen.longest)),
        f"{100 * attention / (attention + rest):.0f}",
        f"{(attention + rest) / 1e12:.1f}",
    )


def count_rest(model: nn.Module, family: Family, seen: _Attention) -> int:
    """Operations of one forward besides SDPA, whose calls `seen` takes."""
    assert family.usual is not None
    # Some models switch autocast off for a device that meta is not.
    no_autocast = mock.patch("torch.autocast", return_value=contextlib.nullcontext())
    # And a text without padding keeps all its tokens.
    nothing_padded = mock.patch(
        "torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True
    )
    even = mock.patch.object(MOEFeedForwardSwiGLU, "moe_infer", _even)
    with torch.device("meta"), torch.no_grad(), no_autocast, nothing_padded, even:
        inputs = family.inputs(model.config, family.usual)
        with FlopCounterMode(display=False) as rest, seen:
            model(**inputs)
    return rest.get_total_flops()


def _even(experts: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """HiDream's experts where each gets as many tokens as any other."""
    share, left = divmod(len(indices), len(experts.experts))
    assert not left
    for expert in experts.experts:
        expert(x.new_empty(share, x.shape[-1]))
    return x


class _Attention(TorchFunctionMode):
    """Counts SDPA calls instead of making them: 2 products of 2 operations a score and channel."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: Counter[str] = Counter()
        self.longest = (0, 0)
        self.operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # HunyuanVideo 1.5 puts what it keeps of its text first and what it drops last: all of it.
        if func is Tensor.__invert__ and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=torch.bool, device="cpu")
        if func is torch.all:
            return torch.tensor(False, device="cpu")
        # Qwen-Image 2.1 chooses rows by places, which have numbers, among what has none.
        if func is torch.where and any(isinstance(one, Tensor) and one.is_meta for one in args):
            args = args[0].to("meta"), *args[1:]
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._count(*args, **kwargs)

    def _count(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        *batch, queries, size = query.shape
        keys, width = value.shape[-2:]
        scores = queries * keys
        for extent in batch:
            scores *= extent
        self.heads[f"{query.shape[1]} x {size}"] += 1
        self.operations += 2 * scores * (size + width)
        self.longest = max(self.longest, (queries, keys), key=lambda pair: pair[0] * pair[1])
        return query.new_empty(*query.shape[:-1], width)


def kept_table() -> dict[str, Published]:
    """What the table beside this file says, by family."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [
            Published(**row | {"layers": int(row["layers"]), "reached": int(row["reached"])})
            for row in csv.DictReader(file)
        ]
    return {row.family: row for row in rows}


def write(rows: list[Published]) -> None:
    """Write the table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Published.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    from diffusers_families import FAMILIES

    made = []
    for each in FAMILIES:
        if each.full is not None:
            made.append(published(each))
            print(made[-1], flush=True)
    write(made)
