"""What a forward costs and what patching can gain: Amdahl's law on known numbers, counts on known
layers, times on a clock that is told what to say.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.measure import TIMERS
from sagepatch.calibration.timing import CallTime
from sagepatch.cli import forward_times
from sagepatch.cli.forward_cost import Cost, Shape, Times, cost, gain
from sagepatch.cli.forward_count import Asked, count
from sagepatch.cli.forward_inputs import FORWARDS
from sagepatch.cli.forward_sizes import Size
from sagepatch.patchers.model import Parts, search

SHAPE = Shape(1, 24, 24, 4608, 4608, 128, 128, mask=False, causal=False)
CAUSAL = Shape(1, 32, 8, 4096, 4096, 128, 128, mask=False, causal=True)


def test_operations() -> None:
    assert SHAPE.operations == 4 * 24 * 4608**2 * 128
    assert CAUSAL.operations == 2 * 32 * 4096**2 * 128
    assert str(SHAPE) == "1x24x4608x4608x128"
    assert str(CAUSAL) == "1x32/8x4096x4096x128 causal"


class Block(nn.Module):
    """One projection and two attention calls, of 4 heads of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.to_q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q)
        z = nn.functional.scaled_dot_product_attention(q, q[..., :3, :], q[..., :3, :])
        return (y + z).transpose(1, 2).flatten(-2)


def test_a_forward_is_counted_by_layer() -> None:
    model = nn.Sequential(Block(), nn.Linear(32, 32, bias=False), Block()).to("meta")
    sites = search(Parts("own", {"": model})).sites
    assert [site.name for site in sites] == ["0", "2"]
    made = cost(model, sites, lambda: model(torch.empty(2, 10, 32, device="meta")))
    assert {name: [str(one) for one in calls] for name, calls in made.calls.items()} == {
        "0": ["2x4x10x10x8", "2x4x10x3x8"],
        "2": ["2x4x10x10x8", "2x4x10x3x8"],
    }
    attention = 2 * (4 * 2 * 4 * 10 * (10 + 3) * 8)
    products = 3 * 2 * 2 * 10 * 32 * 32
    assert (made.attention, made.rest) == (attention, products)
    assert made.share(["2"]) == pytest.approx(attention / 2 / (attention + products))
    # The hooks are gone.
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model)


def test_the_gain_by_amdahl() -> None:
    # 1000 us of rest; attention takes 3 x 100 us, of which one layer is not reached.
    made = Cost({"a": (SHAPE,), "b": (SHAPE,), "": (SHAPE,)}, rest=10**6)
    times = {SHAPE: Times(exact=100.0, fast=50.0, safe=80.0)}
    found = gain(made, ["a", "b"], times, operations_per_us=1000.0)
    assert found.share == pytest.approx(300 / 1300)
    assert found.fast == pytest.approx(1300 / (1000 + 50 + 50 + 100))
    assert found.safe == pytest.approx(1300 / (1000 + 80 + 80 + 100))


def test_a_slower_kernel_is_not_taken() -> None:
    made = Cost({"a": (SHAPE,)}, rest=0)
    slower = {SHAPE: Times(exact=100.0, fast=150.0, safe=None)}
    found = gain(made, ["a"], slower, 1.0)
    assert (found.share, found.fast, found.safe) == (1.0, 1.0, 1.0)
    better = gain(made, ["a"], {SHAPE: Times(exact=100.0, fast=90.0, safe=60.0)}, 1.0)
    assert better.fast == better.safe == pytest.approx(100 / 60)


def test_times_are_the_lowest_of_each_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("triton.sage2_8", "triton.sage2pp_8", "triton.sage1_b")
    kernels = [BY_NAME[name] for name in names]
    said = {"sdpa.exact": [90.0, 80.0], names[0]: [50.0, 55.0], names[1]: [40.0, 48.0]}
    # Too slow to be the fastest: timed once.
    said[names[2]] = [70.0]
    order = iter([*said["sdpa.exact"], *(us for name in names for us in said[name])])
    monkeypatch.setitem(TIMERS, "cpu", lambda *_: CallTime(next(order), 0.0))
    monkeypatch.setattr("sagepatch.calibration.measure.run_variant", lambda variant, call: None)
    monkeypatch.setattr(forward_times, "candidate_variants", lambda spec, layer: kernels)
    small = Shape(1, 2, 1, 8, 8, 16, 16, mask=True, causal=False)
    seen: list[int] = []
    found = forward_times.measured([small, small], torch.device("cpu"), lambda: seen.append(1))
    assert found == {small: Times(80.0, 40.0, 70.0)}
    assert len(seen) == 1
    assert next(order, None) is None


def test_the_rate_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_times, "SIDE", 64)
    monkeypatch.setitem(TIMERS, "cpu", lambda *_: CallTime(2.0, 0.0))
    assert forward_times.rate(torch.device("cpu")) == 64**3


@pytest.mark.parametrize(
    ("size", "scale", "latent"),
    [
        (Size(1024, 768, 1, 77), None, Size(64, 48, 1, 77)),
        (Size(128, 128, 1, 77), 4, Size(16, 16, 1, 77)),
        (Size(8, 8, 1, 77), None, Size(1, 1, 1, 77)),
    ],
)
def test_pixels_to_latents(size: Size, scale: int | None, latent: Size) -> None:
    assert FORWARDS["FluxTransformer2DModel"].latent(size, scale) == latent


def test_frames_to_latents() -> None:
    wan = FORWARDS["WanTransformer3DModel"]
    assert wan.latent(Size(480, 832, 81, 512)) == Size(60, 104, 21, 512)


def test_what_cannot_be_counted_says_why() -> None:
    (own,) = count({"": nn.Linear(2, 2)}, (), Asked())
    assert own.cost is None
    assert own.why_not == "what a forward of Linear takes is not known here"


def test_experts_are_counted_and_what_eager_attention_does() -> None:
    """Transformers multiplies experts in grouped products that no counter knows, and cannot on the
    meta device in FP32; a soft cap has no SDPA.
    """
    from transformers import (
        AttentionInterface,
        Gemma2Config,
        Gemma2ForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    asked, tokens = Asked(tokens=10), 10
    with torch.device("meta"):
        experts = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
        capped = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager"))
    projections = 2 * tokens * 32 * (32 + 16 + 16 + 32)
    outer = 2 * tokens * 32 * 50
    of_two_experts = 2 * (2 * tokens) * (32 * 128 + 64 * 32)
    (made,) = count({"": experts}, search(Parts("", {"": experts})).sites, asked)
    assert made.cost is not None, made.why_not
    assert made.cost.rest == projections + outer + 2 * tokens * 32 * 4 + of_two_experts
    assert [str(one) for one in made.shapes["model.layers.0.self_attn"]] == ["1x4/2x10x10x8 causal"]
    (made,) = count({"": capped}, search(Parts("", {"": capped})).sites, asked)
    assert made.cost is not None, made.why_not
    assert made.cost.rest == projections + outer + 2 * tokens * 3 * 32 * 64
    assert [str(one) for one in made.shapes["model.layers.0.self_attn"]] == ["1x4/2x10x10x8 causal"]
    assert capped.config._attn_implementation == "eager"
    assert "sagepatch_counted" not in AttentionInterface._global_mapping
    assert experts.config._experts_implementation == "grouped_mm"
