"""The op behind everything: its fake, its handles, and what one call of a patched layer does."""

from __future__ import annotations

import math

import pytest
import torch
from models.layers import call, layer
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from sagepatch import attention, ops
from sagepatch.backends.catalogue import SDPA
from sagepatch.dispatch import Request
from sagepatch.errors import StrictFallback
from sagepatch.functional import run
from sagepatch.layer import find_layer
from sagepatch.ops import run_exact, run_layer

FAST = "emulated.sage2_8"


def arguments(one, variant: str, handle=None) -> tuple:
    packed = (one.cu_seqlens_q, one.cu_seqlens_kv)
    options = (one.scale, one.causal_offset, one.window, one.softcap)
    tensors = (one.q, one.k, one.v, one.attn_mask, one.sinks, *packed, handle)
    return (*tensors, *options, variant, one.bshd_out, one.return_lse)


OPTIONS = {
    "plain": {},
    "bshd, lse": {"bshd_out": True, "return_lse": True},
    "causal window": {"causal_offset": 14, "window": 5},
    "mask, sinks, cap": {
        "attn_mask": torch.ones(1, 1, 1, 12, dtype=torch.bool),
        "sinks": torch.zeros(2),
        "softcap": 4.0,
    },
    "packed": {
        "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 7, 12], dtype=torch.int32),
    },
}


# case 51
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("variant", ["exact", "emulated.sage1_b", FAST])
def test_opcheck(variant: str, options) -> None:
    one = call(Sq=9, Skv=12, **options)
    torch.library.opcheck(torch.ops.sagepatch.attention.default, arguments(one, variant))


# case 53
@pytest.mark.parametrize("D", [40, 64, 72])
@pytest.mark.parametrize("bshd_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_the_fake_promises_the_strides_of_the_real(variant, dtype, bshd_out: bool, D) -> None:
    one = call(Sq=9, Skv=12, D=D, bshd_out=bshd_out, return_lse=True)
    given = [t.to(dtype) for t in (one.q, one.k, one.v)]
    rest = arguments(one, variant)[3:]
    real = torch.ops.sagepatch.attention(*given, *rest)
    with FakeTensorMode() as mode:
        fake = torch.ops.sagepatch.attention(*map(mode.from_tensor, given), *rest)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_a_handle_that_outlived_its_layer_runs_exact() -> None:
    one = layer()
    handle = one.handle
    assert find_layer(handle) is one
    del one
    assert find_layer(handle) is None
    given = call()
    assert torch.equal(run(given, handle=handle)[0], run_exact(given)[0])


def test_handles_differ_and_are_read_inside_the_graph() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    layers = [layer(str(index)) for index in range(12)]
    for index, one in enumerate(layers):
        one.run_with(Request(FAST if index % 2 else "exact"), "asked")

    class Attend(torch.nn.Module):
        def __init__(self, handle: torch.Tensor) -> None:
            super().__init__()
            self.handle = handle

        def forward(self, q, k, v):
            from dataclasses import replace

            return run(replace(given, q=q, k=k, v=v), handle=self.handle)[0]

    given = call()
    for one in layers:
        attend = torch.compile(Attend(one.handle), fullgraph=True, backend=counter)
        attend(given.q, given.k, given.v)
    assert counter.frame_count == 1
    assert [one.record.by_variant for one in layers] == [{SDPA.name: 1}, {FAST: 1}] * 6


def test_an_observer_serves_the_call_or_settles_the_layer() -> None:
    one, given = layer(), call()
    one.observer = lambda same, seen: run_exact(seen)
    assert torch.equal(run_layer(one, given)[0], run_exact(given)[0])

    def settle(same, seen) -> None:
        same.run_with(Request(FAST), "seen enough")

    one.observer = settle
    run_layer(one, given)
    assert one.record.by_variant == {SDPA.name: 1, FAST: 1}
    assert one.record.calls == 2


def test_what_a_layer_runs_is_named() -> None:
    one, given = layer(), call()
    assert one.runs == SDPA.name
    one.run_with(Request("sage1_b", emulate=True), "asked")
    assert one.runs == SDPA.name
    run_layer(one, given)
    assert one.runs == "emulated.sage1_b"
    one.run_with(Request(FAST), "asked")
    assert one.runs == FAST
    one.demote("a reason")
    assert one.runs == SDPA.name
    assert one.choose(given.spec())[0] is SDPA


# case 47
@pytest.mark.parametrize(
    ("guard", "recomputed"), [("auto", True), ("sync", True), ("off", False)], ids=str
)
def test_the_guard_recomputes_and_demotes(monkeypatch, guard: str, recomputed: bool) -> None:
    from dataclasses import replace

    import sagepatch.backends.emulated as emulated

    one, given = layer(), call()
    one.policy = replace(one.policy, guard=guard)
    one.run_with(Request(FAST), "asked")

    def poisoned(seen, recipe):
        return torch.full_like(seen.q[..., :1].expand(-1, -1, -1, 32), math.nan), None

    monkeypatch.setattr(emulated, "emulate", poisoned)
    out, _ = run_layer(one, given)
    assert bool(out.isfinite().all()) is recomputed
    assert (one.demoted is not None) is recomputed
    if recomputed:
        assert torch.equal(out, run_exact(given)[0])
        assert one.record.by_variant == {SDPA.name: 1}
        assert one.record.calls == 1


def test_strict_raises_where_the_guard_would_recompute(monkeypatch) -> None:
    import sagepatch.backends.emulated as emulated

    one, given = layer(strict=True), call()
    one.run_with(Request(FAST), "asked")

    def poisoned(seen, recipe):
        return torch.full_like(seen.q[..., :1].expand(-1, -1, -1, 32), math.nan), None

    monkeypatch.setattr(emulated, "emulate", poisoned)
    # Now, and at each later call: a demoted layer would run exact for ever.
    for _ in range(2):
        with pytest.raises(StrictFallback, match=r"demoted: .* gave a non-finite output"):
            run_layer(one, given)
    # What a plan or the user left exact is no fallback.
    one.run_with(Request("exact"), "asked")
    run_layer(one, given)


# case 14
def test_single_queries_are_exact_by_rule_and_counted() -> None:
    one, given = layer(), call(Sq=1)
    one.run_with(Request("sage2_8", emulate=True), "asked")
    run_layer(one, given)
    assert one.record.by_variant == {SDPA.name: 1}
    assert any("short" in reason for reason in one.record.fallbacks)


def test_offsets_of_packed_calls_reach_kernels_in_32_bits(monkeypatch) -> None:
    seen = []

    served = ops.run_variant

    def spy(variant, given):
        seen.append((given.cu_seqlens_q.dtype, given.cu_seqlens_kv.dtype))
        return served(variant, given)

    monkeypatch.setattr(ops, "run_variant", spy)
    q = torch.randn(1, 2, 9, 8)
    ends = torch.tensor([0, 4, 9], dtype=torch.int64)
    mixed = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends.int()}
    attention(q, q, q, **mixed)
    assert seen == [(torch.int32, torch.int32)]


class Sees(TorchFunctionMode):
    """Somebody's function mode: takes note of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_one_op_and_not_what_is_inside() -> None:
    q = torch.randn(1, 2, 9, 8)
    with Sees() as mode:
        attention(q, q, q, variant="exact")
    assert "scaled_dot_product_attention" not in mode.names
    assert any("sagepatch" in name or name == "attention" for name in mode.names), mode.names
    with torch.device("cpu"):  # a mode of torch's own, which looks at nothing of ours
        assert not ops.needs_op(call())


def test_exact_attention_for_inputs_that_are_not_finite_is_counted_as_such() -> None:
    one = layer()
    one.run_with(Request(FAST), "")
    given = call()
    given.q[0, 0, 0, 0] = float("nan")
    run_layer(one, given)
    assert one.record.by_variant == {SDPA.name: 1}
    assert one.record.fallbacks == {"inputs were not finite": 1}


@pytest.mark.parametrize("option", ["causal_offset", "window"])
def test_positions_that_follow_from_lengths_are_one_graph(option: str) -> None:
    """Of a cache that grows by a token a call: once a graph for each length, up to the limit."""

    def last(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        more = k.shape[2] - q.shape[2]
        if option == "window":
            return attention(q, k, k, window=more, variant=FAST)
        return attention(q, k, k, is_causal=True, causal_offset=more, variant=FAST)

    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(last, backend=graphs, dynamic=True, fullgraph=True)
    q = torch.randn(1, 2, 4, 16)
    for length in range(20, 32):
        k = torch.randn(1, 2, length, 16)
        assert torch.equal(compiled(q, k), last(q, k))
    assert graphs.frame_count == 1
