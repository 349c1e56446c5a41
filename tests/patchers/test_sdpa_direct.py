"""Methods that call torch's SDPA run over globals of their own: the same as under a mode, and no
other operation of torch is met.
"""

from __future__ import annotations

import gc
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import sdpa_callers
from models.sdpa_callers import (
    BY_MODE,
    CALLS_OF,
    DIRECT,
    SCALE,
    Around,
    Base,
    ByFullName,
    ByModule,
    ByName,
    Counting,
    Failing,
    InHelper,
    InNested,
    Reading,
    modes,
)
from torch import Tensor, nn

import sagepatch
from sagepatch.patchers.sdpa_direct import GENUINE, direct


def test_torch_has_one_sdpa() -> None:
    """All that is met is met by this identity."""
    assert F.scaled_dot_product_attention is GENUINE


def x(tokens: int = 40) -> Tensor:
    return torch.randn(1, 2, tokens, 16, generator=torch.Generator().manual_seed(0))


def patched(model: nn.Module) -> sagepatch.Patch:
    return sagepatch.apply(model, variant="sage1_b", emulate=True)


@pytest.mark.parametrize("owner", DIRECT + BY_MODE)
def test_every_way_to_write_the_call_is_met(owner: type[nn.Module]) -> None:
    model = owner().eval()
    with torch.no_grad():
        plain = model(x())
        with patched(model) as patch:
            out = model(x())
            assert sum(patch.layers[0].record.by_variant.values()) == CALLS_OF.get(owner, 1)
        assert torch.equal(model(x()), plain)
    assert not torch.equal(out, plain)
    assert (out - plain).norm() < 0.03 * plain.norm()


@pytest.mark.parametrize("owner", DIRECT + BY_MODE)
def test_which_need_a_mode(owner: type[nn.Module]) -> None:
    copy = direct(owner.forward, owner)
    assert (copy is not None) == (owner in DIRECT)


@pytest.mark.parametrize("owner", [ByModule, ByName, InNested])
def test_no_other_operation_is_met(owner: type[Base]) -> None:
    model = owner().eval()
    with torch.no_grad(), patched(model):
        model(x())
    assert model.seen == 0


def test_globals_are_read_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reading().eval()
    with torch.no_grad(), patched(model):
        before = model(x())
        monkeypatch.setitem(Reading.forward.__globals__, "SCALE", 0.01)
        after = model(x())
    assert not torch.allclose(before, after, atol=0.05)


def test_a_name_that_comes_to_mean_something_else_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that wraps SDPA where a module finds it keeps its say, as without the patch."""
    model = ByName().eval()
    with torch.no_grad(), patched(model) as patch:
        ours = model(x())

        def tripled(*args: Any, **kwargs: Any) -> Tensor:
            return 3 * F.scaled_dot_product_attention(*args, **kwargs)

        monkeypatch.setitem(ByName.forward.__globals__, "sdpa", tripled)
        assert torch.equal(model(x()), 3 * ours)
        assert patch.layers[0].record.calls == 2


class Telling(Base):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("once a place", stacklevel=1)
        return F.scaled_dot_product_attention(*self.qkv(x))


def test_a_warning_is_given_once() -> None:
    model = Telling().eval()
    with warnings.catch_warnings(record=True) as told, torch.no_grad(), patched(model):
        warnings.simplefilter("default")
        for _ in range(3):
            model(x())
    assert [str(w.message) for w in told] == ["once a place"]


def test_code_replaced_in_place_is_followed() -> None:
    """As IPython's autoreload does."""

    class Reloaded(Base):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x))

    def newer(self: Base, x: Tensor) -> Tensor:
        return 3 * F.scaled_dot_product_attention(*self.qkv(x))

    model = Reloaded().eval()
    with torch.no_grad(), patched(model):
        before = model(x())
        Reloaded.forward.__code__ = newer.__code__
        assert torch.equal(model(x()), 3 * before)


def test_a_method_over_globals_of_its_own() -> None:
    class Made(Base):
        forward = types.FunctionType(ByModule.forward.__code__, {"F": F, "modes": modes})

    model = Made().eval()
    with torch.no_grad(), patched(model) as patch:
        model(x())
        assert patch.layers[0].record.calls == 1


def test_a_method_that_compiles_something_itself() -> None:
    class Compiling(Base):
        def forward(self, x: Tensor) -> Tensor:
            scaled = torch.compile(lambda t: torch.tanh(t) * SCALE, backend="eager", fullgraph=True)
            return scaled(F.scaled_dot_product_attention(*self.qkv(x)))

    model = Compiling().eval()
    with torch.no_grad(), patched(model) as patch:
        model(x())
        assert patch.layers[0].record.calls == 1


def test_a_generator_is_left() -> None:
    class Yielding(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield F.scaled_dot_product_attention(x, x, x)

    patch = sagepatch.apply(nn.Sequential(ByModule(), Yielding()), variant="exact")
    assert len(patch.layers) == 1
    patch.restore()


def test_no_class_is_kept_alive() -> None:
    def scope() -> weakref.ref[type[Base]]:
        class Local(Base):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(*self.qkv(x))

        model = Local().eval()
        with torch.no_grad(), patched(model):
            model(x())
        assert direct(Local.forward, Local) is not None
        return weakref.ref(Local)

    gone = scope()
    gc.collect()
    assert gone() is None


def test_a_call_left_to_torch_is_no_other_layer_s() -> None:
    model = Around(InHelper()).train()
    with patched(model) as patch:
        model(x().requires_grad_())
    assert [layer.record.calls for layer in patch.layers] == [1, 1]


def test_globals_are_written_where_they_live() -> None:
    model = Counting().eval()
    before = sdpa_callers.CALLS
    with torch.no_grad(), patched(model):
        model(x())
    assert sdpa_callers.CALLS - before == 1


def test_a_layer_inside_another_keeps_its_own() -> None:
    model = ByModule(ByName()).eval()
    with torch.no_grad(), patched(model) as patch:
        model(x())
        assert [sum(layer.record.by_variant.values()) for layer in patch.layers] == [1, 1]


def test_an_error_leaves_nothing_behind() -> None:
    model, other = Failing().eval(), ByName().eval()
    with torch.no_grad(), patched(model) as patch:
        with pytest.raises(ValueError, match="three tokens"):
            model(x(3))
        plain = other(x())
        assert sum(patch.layers[0].record.by_variant.values()) == 1
    assert torch.equal(plain, other(x()))


def test_threads_do_not_meet() -> None:
    models = [ByModule().eval() for _ in range(4)]
    patches = [patched(model) for model in models]

    def run(model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(20):
                model(x())

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(p.layers[0].record.by_variant.values()) for p in patches] == [20] * 4
    for patch in patches:
        patch.restore()


@pytest.mark.parametrize("owner", [ByModule, ByFullName])
def test_a_wrapper_of_torch_s_own_keeps_its_say(
    owner: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has wrapped `F.scaled_dot_product_attention` is called; the call inside is ours."""
    model = owner().eval()
    plain = F.scaled_dot_product_attention
    heard: list[int] = []

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        heard.append(1)
        return plain(*args, **kwargs)

    with torch.no_grad(), patched(model) as patch:
        ours = model(x())
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper)
        assert torch.equal(model(x()), ours)
        assert heard == [1]
        assert patch.layers[0].record.calls == 2
    with torch.no_grad(), sagepatch.apply(model, variant="exact"):
        for calls in (2, 3):
            model(x())
            assert len(heard) == calls
