"""Nothing of transformers that holds attention escapes: every class of every family is reached by a
patcher, left with a reason, or listed here as no attention; the page of all that is current.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import transformers
from models.transformers_models import noise
from torch import Tensor, nn
from transformers_page import PAGE, page
from transformers_walk import (
    NOT_ATTENTION,
    holds_attention,
    modeling_modules,
    module_classes,
    verdict,
    verdicts,
)

import sagepatch
from sagepatch.patchers.code import uses_attention_interface
from sagepatch.patchers.transformers import find

# Keywords of calls of an attention function that are no term of the scores, or are in the mask.
_NO_TERM = {
    *("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"),
    *("sliding_window", "position_ids", "output_attentions", "deterministic"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
# Terms that reach the kernel or send the call back to the original.
_TERMS = {"position_bias", "softcap", "s_aux", "sinks", "indices", "block_indices"}


def _of_the_page() -> bool:
    return f"from transformers {transformers.__version__};" in PAGE.read_text()


needs_page_version = pytest.mark.skipif(
    not _of_the_page(), reason="the page was made with another transformers"
)


def test_every_class_that_holds_attention_is_known() -> None:
    # case 37
    lost = []
    for family in modeling_modules():
        known = {v.owner for v in verdicts()[family]}
        for owner in module_classes(family):
            listed = owner in known or owner.__name__ in NOT_ATTENTION
            if not listed and holds_attention(owner):
                lost.append(f"{family}.{owner.__name__}")
    assert not lost


def test_both_ways_to_tell_attention_agree() -> None:
    # What a patcher finds by its rules, the walk finds by its own.
    found = [v.owner for vs in verdicts().values() for v in vs]
    assert len(found) > 400
    assert all(holds_attention(owner) for owner in found)


@needs_page_version
def test_no_exception_is_idle() -> None:
    names = {
        owner.__name__
        for family in modeling_modules()
        for owner in module_classes(family)
        if owner.__name__ in NOT_ATTENTION and holds_attention(owner)
    }
    assert names == NOT_ATTENTION.keys()


@needs_page_version
def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python tests/coverage/transformers_page.py"


def test_no_term_of_the_scores_is_unknown() -> None:
    # A keyword that a family passes to its attention function and that we would swallow.
    seen: set[str] = set()
    for family in verdicts().values():
        for owner in (v.owner for v in family if v.patcher == "transformers"):
            seen.update(_keywords(owner))
    assert {"scaling", "dropout", "position_bias", "softcap", "s_aux"} <= seen
    assert seen <= _NO_TERM | _TERMS


def _keywords(owner: type) -> Iterator[str]:
    code = inspect.unwrap(owner.forward).__code__
    for constant in code.co_consts:
        if isinstance(constant, tuple) and {"scaling", "dropout"} & set(constant):
            yield from constant


# What the rules rest on


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class WrapsAttention(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class AddsAttention(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * x


class MHSA(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return x.matmul(x.transpose(-1, -2)).softmax(-1).matmul(x)


class LinearAttention(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (x.transpose(-1, -2) @ x)


class EinsumAttention(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,bkj->bik", x, x)


class SoftmaxAttention(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


class FlashAttention2(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return _flash_attention_forward(x, x, x)


class TorchAttention(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.multi_head_attention_forward(x, x, x, 4, 2)


def _flash_attention_forward(*tensors: Tensor) -> Tensor:
    return tensors[0]


@pytest.mark.parametrize(
    ("owner", "why"),
    [
        (LinearAttention, "a way of its own: no softmax, no call of SDPA"),
        (EinsumAttention, "a way of its own"),
        (SoftmaxAttention, "computes its softmax by hand"),
        (FlashAttention2, "attn_implementation='sdpa'"),
        (TorchAttention, "multi_head_attention_forward, a fused path"),
        (MHSA, "computes its softmax by hand"),
        (WrapsAttention, None),
        (AddsAttention, None),
    ],
)
def test_attention_of_another_kind_is_named(owner: type, why: str | None) -> None:
    found = verdict(owner)
    assert (found is None) if why is None else (found is not None and why in str(found.reason))


class _Config:
    _attn_implementation = "sdpa"


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    tilt: float,
) -> tuple[Tensor, None]:
    return value * tilt, None


class TiltedAttention(nn.Module):
    config = _Config()

    def forward(self, x: Tensor) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)
        return attend(self, x, x, x, tilt=2.0)[0]


def test_a_term_that_nobody_knows_leaves_the_layer_alone() -> None:
    found = find(nn.Sequential(TiltedAttention()), "")
    assert [left.reason for left in found.left] == [
        "its attention takes tilt, which no kernel here knows"
    ]


def test_an_attention_function_looked_up_by_index() -> None:
    # Qwen2.5-Omni's vocoder indexes the registry and names no eager function to fall back on.
    modeling = pytest.importorskip("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    config = transformers.models.qwen2_5_omni.configuration_qwen2_5_omni.Qwen2_5OmniDiTConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    model = nn.Sequential(modeling.DiTAttention(config)).eval()
    places = torch.zeros(2, 2, 9, 16)
    places[0] = 1
    inputs = {"hidden_states": noise(2, 9, 64), "position_embeddings": places}
    assert uses_attention_interface(modeling.DiTAttention)
    with torch.no_grad():
        plain = model[0](**inputs)
        patch = sagepatch.apply(model, variant="exact")
        assert torch.allclose(model[0](**inputs), plain, atol=1e-6)
        patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
        out = model[0](**inputs)
        assert 0 < (out - plain).norm() < 0.1 * plain.norm()
        assert patch.layers[0].record.by_variant == {"emulated.sage2_8": 1}
        patch.restore()
        assert torch.equal(model[0](**inputs), plain)


def test_a_lookup_that_only_ever_finds_eager_is_no_site() -> None:
    modeling = pytest.importorskip("transformers.models.kosmos2_5.modeling_kosmos2_5")
    assert not uses_attention_interface(modeling.Kosmos2_5VisionAttention)
    assert uses_attention_interface(modeling.Kosmos2_5TextAttention)
