"""Modules that call torch's SDPA in every way to write it: `DIRECT` those whose method can run over
globals of its own, `BY_MODE` those that need a mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

SCALE = 1.0
CALLS = 0


def modes() -> int:
    """Function modes on this thread's stack."""
    return int(torch._C._len_torch_function_stack())


class Base(nn.Module):
    seen: int | None = None

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.flip(2), x.roll(1, 2)


class ByModule(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = modes()
        q, k, v = self.qkv(x)
        y = F.scaled_dot_product_attention(q, k, v)
        return F.silu(y) if self.inner is None else self.inner(y)


class ByName(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = modes()
        return sdpa(*self.qkv(x))


class InNested(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = modes()
        return torch.cat([F.scaled_dot_product_attention(*self.qkv(part)) for part in x.split(1)])


class ByFullName(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.qkv(x))


def helper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class InHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return helper(*self.qkv(x))


class Around(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert self.inner is not None
        return helper(*self.qkv(self.inner(x)))


class InBoth(Base):
    def forward(self, x: Tensor) -> Tensor:
        return helper(*self.qkv(x)) + F.scaled_dot_product_attention(*self.qkv(2 * x))


class Counting(Base):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return F.scaled_dot_product_attention(*self.qkv(x))


def twice(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def wrapped(self: Any, x: Tensor) -> Tensor:
        return 2 * method(self, x)

    return wrapped


class Decorated(Base):
    @twice
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x))


class Reading(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x), scale=SCALE)


class Failing(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.qkv(x))
        if y.shape[2] == 3:
            raise ValueError("three tokens")
        return y


class ByPackage(Base):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*self.qkv(F.silu(x)))


class Beside(ByName):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.scaled_dot_product_attention(*self.qkv(2 * x))


class ByDefault(Base):
    def forward(
        self, x: Tensor, attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    ) -> Tensor:
        return attend(*self.qkv(x)) + F.scaled_dot_product_attention(*self.qkv(2 * x))


def closed_over(attend: Callable[..., Tensor]) -> type[Base]:
    class ByClosure(Base):
        def forward(self, x: Tensor) -> Tensor:
            return attend(*self.qkv(x)) + F.scaled_dot_product_attention(*self.qkv(2 * x))

    return ByClosure


ByClosure = closed_over(F.scaled_dot_product_attention)


class ByMixin(ByName):
    """`forward` of another class calls SDPA, too: `attend` here, as if it came from elsewhere."""

    attend: Callable[..., Tensor] = ByName.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) + F.scaled_dot_product_attention(*self.qkv(2 * x))


class Extra(Base):
    def extra(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x)) + self.extra(x)


class ExtraAttention(Extra):
    def extra(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(2 * x))


class InClassBody(Base):
    def forward(self, x: Tensor) -> Tensor:
        class Settings:
            scale = SCALE

        return F.scaled_dot_product_attention(*self.qkv(x), scale=Settings.scale)


class LookingAround(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x), scale=globals().get("SCALE", 0.0))


DIRECT = [ByModule, ByName, InNested, Reading, Failing, Extra]
BY_MODE = [
    *(ByFullName, InHelper, InBoth, Counting, Decorated, ByPackage, Beside, ByDefault, ByClosure),
    *(InClassBody, LookingAround, ByMixin, ExtraAttention),
]
CALLS_OF = dict.fromkeys((InBoth, Beside, ByDefault, ByClosure, ByMixin, ExtraAttention), 2)
