"""Layers that run exact attention: calls go to torch as they came, and the account is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.transformers_models import tiny_falcon
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sagepatch
from sagepatch.dispatch import Request
from sagepatch.patchers import sdpa_redirect


class Attention(nn.Module):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(x, x.flip(2), x.roll(1, 2), **options)


def x(tokens: int = 40) -> Tensor:
    return torch.randn(1, 2, tokens, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    return Attention().eval()


def account(patch: sagepatch.Patch) -> dict[tuple[int, bool], int]:
    """Calls by tokens and whether they were causal."""
    specs = patch.layers[0].record.specs
    return {(spec.q_len, spec.causal_offset is not None): count for spec, count in specs.items()}


def test_every_call_is_counted_by_its_kind(model: nn.Module) -> None:
    with torch.no_grad(), sagepatch.apply(model, variant="exact") as patch:
        for tokens, options in ((40, {}), (40, {}), (24, {}), (40, {"is_causal": True}), (40, {})):
            plain = Attention()(x(tokens), **options)
            assert torch.equal(model(x(tokens), **options), plain)
        assert account(patch) == {(40, False): 3, (24, False): 1, (40, True): 1}
        assert dict(patch.layers[0].record.by_variant) == {"sdpa.exact": 5}


def test_the_second_call_reaches_torch_itself(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[Any, ...]] = []
    plain = F.scaled_dot_product_attention
    mask = torch.ones(40, 40, dtype=torch.bool)
    with torch.no_grad(), sagepatch.apply(model, variant="exact"):
        model(x(), attn_mask=mask)

        def other(*args: Any, **kwargs: Any) -> Tensor:
            heard.append((args, kwargs))
            return plain(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", other)
        model(x(), attn_mask=mask)
    ((args, kwargs),) = heard
    assert len(args) == 3
    # Untouched: not expanded, no scale written in.
    assert list(kwargs) == ["attn_mask"]
    assert kwargs["attn_mask"] is mask


def test_a_layer_told_otherwise_passes_nothing(model: nn.Module) -> None:
    with torch.no_grad(), sagepatch.apply(model, variant="exact", emulate=True) as patch:
        exact = [model(x()) for _ in range(2)][1]
        patch.layers[0].run_with(Request("emulated.sage1_b", emulate=True), "test")
        assert not torch.equal(model(x()), exact)
        patch.layers[0].run_with(Request("exact"), "test")
        assert torch.equal(model(x()), exact)


def test_gradients_are_counted_as_such(model: nn.Module) -> None:
    with sagepatch.apply(model, variant="exact") as patch:
        with torch.no_grad():
            model(x())
            model(x())
        y = x().requires_grad_()
        model(y).sum().backward()
        assert y.grad is not None
        assert patch.layers[0].record.calls == 3
        assert [count for reason, count in patch.layers[0].record.fallbacks.items()] == [1]


def test_another_mode_is_told_of_the_call(model: nn.Module) -> None:
    class Watching(TorchFunctionMode):
        seen = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), sagepatch.apply(model, variant="exact"):
        model(x())
        with Watching() as watching:
            model(x())
    assert watching.seen == 1


def test_autocast_is_accounted_for(model: nn.Module) -> None:
    with torch.no_grad(), sagepatch.apply(model, variant="exact") as patch:
        with torch.autocast("cpu", torch.bfloat16):
            model(x())
            assert model(x()).dtype == torch.bfloat16
        model(x())
        dtypes = {spec.dtype: count for spec, count in patch.layers[0].record.specs.items()}
    assert dtypes == {"bf16": 2, "fp32": 1}


def test_tensors_without_numbers_pass(model: nn.Module) -> None:
    with torch.no_grad(), sagepatch.apply(model, variant="exact"):
        for _ in range(2):
            assert model(x().to("meta")).shape == x().shape


@pytest.mark.parametrize(
    "options", [{"attn_mask": torch.ones(40, dtype=torch.bool)}, {"is_causal": 2}]
)
@pytest.mark.parametrize("variant", ["exact", "sage1_b"])
def test_what_torch_refuses_is_refused_every_time(
    model: nn.Module, options: dict[str, Any], variant: str
) -> None:
    with torch.no_grad():
        with pytest.raises((TypeError, IndexError, RuntimeError)) as plain:
            model(x(), **options)
        with sagepatch.apply(model, variant=variant, emulate=True):
            for _ in range(2):
                with pytest.raises(plain.type):
                    model(x(), **options)


class Twice(nn.Module):
    """Calls attention once, or as often as it is told, or not at all."""

    times = 1

    def forward(self, x: Tensor, again: bool = False, other: Any = None) -> Tensor:
        for _ in range(self.times + again):
            x = F.scaled_dot_product_attention(x, x, x)
        return x


def test_a_method_seen_before_runs_as_it_is_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = Twice().eval(), Twice().eval()
    heard = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal heard
        heard += 1
        return real(*args, **kwargs)

    real = sdpa_redirect.answer
    monkeypatch.setattr(sdpa_redirect, "answer", counting)
    with torch.no_grad(), sagepatch.apply(model, variant="exact") as patch:
        for again in (False, True, False, True, True):
            assert torch.equal(model(x(), again), plain(x(), again))
        assert patch.layers[0].record.calls == 1 + 2 + 1 + 2 + 2
        assert heard == 1 + 2
        # What it does changed without a sign: the count is of what was seen, the result is right.
        model.times = plain.times = 3
        assert torch.equal(model(x(), False), plain(x(), False))
        assert patch.layers[0].record.calls == 8 + 1
        # Arguments that say nothing of themselves are looked into each time.
        assert torch.equal(model(x(), other=[1]), plain(x()))
        assert torch.equal(model(x(), other=[1]), plain(x()))
        assert patch.layers[0].record.calls == 9 + 3 + 3
        # So are calls under another kernel, and those after it.
        patch.layers[0].run_with(Request("emulated.sage1_b", emulate=True), "test")
        assert not torch.equal(model(x()), plain(x()))
        patch.layers[0].run_with(Request("exact"), "test")
        assert torch.equal(model(x()), plain(x()))
        assert patch.layers[0].record.calls == 15 + 3 + 3


def test_a_method_that_made_no_call_is_looked_into_again() -> None:
    model = Twice().eval()
    model.times = 0
    with torch.no_grad(), sagepatch.apply(model, variant="exact") as patch:
        model(x())
        model.times = 1
        model(x())
        model(x())
    assert patch.layers[0].record.calls == 2


def test_a_method_whose_calls_fail_is_not_taken_for_known(model: nn.Module) -> None:
    with torch.no_grad(), sagepatch.apply(model, variant="exact") as patch:
        for _ in range(2):
            with pytest.raises((TypeError, IndexError, RuntimeError)):
                model(x(), attn_mask=torch.ones(7, dtype=torch.bool))
        assert not patch.layers[0].passes_whole
        model(x())
        assert len(patch.layers[0].passes_whole) == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_one_key_head_for_all_is_torch_s_own_from_the_first_call(autocast: bool) -> None:
    # SDPA broadcasts it; as grouped heads the bits would be others.
    model, inputs = tiny_falcon()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = model(**inputs).logits
        with sagepatch.apply(model, variant="exact") as patch:
            assert all(torch.equal(model(**inputs).logits, plain) for _ in range(3))
            assert {layer.record.calls for layer in patch.layers} == {3}
