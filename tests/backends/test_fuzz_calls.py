"""What the fuzz draws and how it judges, on the CPU: calls are as their lanes say, a right kernel
passes, a wrong one does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fuzz_calls import EVERY_FAMILY, FAMILIES, Lane, lane_of, specs, steady
from fuzz_judges import judge, share
from hypothesis import HealthCheck, Phase, given, settings

pytest.importorskip("cuda.bindings.nvrtc")

import cuda_support

from sagepatch.numerics.masks import seen_keys
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import MaskKind, mask_kind

CPU = torch.device("cpu")
LANE = Lane(32, 32, torch.float16, batch=2, kv_heads=1, group=2, q_len=(2, 150), kv_len=(3, 200))
few = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("inner", ["channels", "tokens"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_calls_are_as_their_lane_says(family, aligned, inner):
    lane = replace(LANE, family=family, aligned=aligned, inner=inner)

    @few
    @given(spec=specs(lane))
    def every_call(spec):
        call = spec.call(CPU)
        found = call.spec()  # refuses what is no call
        assert found.packed == ("packed" in family)
        assert found.causal == bool(lane.options & {"causal", "window"})
        assert (found.window is not None) == ("window" in family)
        assert (found.sinks, found.softcap) == ("sinks" in family, "softcap" in family)
        kinds = {"keys": MaskKind.KEY_PADDING, "bool": MaskKind.BOOL, "bias": MaskKind.ADDITIVE}
        wanted = next((kinds[n] for n in lane.options & kinds.keys()), MaskKind.NONE)
        assert mask_kind(call.attn_mask) is wanted
        seen = seen_keys(call)
        for t in (call.k, call.v):
            rows = t.isfinite().all(3).all(1)
            assert torch.equal(rows, torch.ones_like(rows) if seen is None else seen)
        assert call.q.isfinite().all()
        for t in (call.q, call.k, call.v):
            outer = [s for s, n in zip(t.stride(), t.shape, strict=True) if s != 1 and n > 1]
            assert all(s % 16 == 0 if aligned else s % 2 for s in outer)
            assert (t.data_ptr() % 16 == 0) == aligned
            # What lies around it is poison.
            storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
            assert not storage.isfinite().all()
        if call.packed:
            assert call.cu_seqlens_q.diff().ge(0).all()
            assert call.cu_seqlens_kv[-1] == call.k.shape[2]

    every_call()


@pytest.mark.parametrize("number", range(8))
def test_steady_lanes_keep_to_one_kind_of_number(number):
    lane = steady(lane_of(number, FAMILIES, [torch.float16]), number)

    @few
    @given(spec=specs(lane))
    def every_call(spec):
        assert spec.q_len > 1
        assert spec.kv_len > 1 or number % 3 == 0
        for n in (spec.q_len, spec.kv_len):
            assert n % 16 == 0 if lane.even else n % 2 == 1
        assert spec.causal_offset % 16
        assert spec.causal_offset != 1
        assert spec.window % 16

    every_call()


def test_lanes_differ():
    lanes = {lane_of(5 * number, EVERY_FAMILY, [torch.float16]) for number in range(60)}
    assert len(lanes) == 60
    assert {lane.family for lane in lanes} == set(EVERY_FAMILY)
    assert {lane.aligned for lane in lanes} == {True, False}


def _kernel(call, recipe):
    """The reference itself, in the call's types."""
    parts = [cuda_support.by_tiles(c, recipe) for c in cuda_support.alone(call)]
    axis = 2 if call.packed else 0
    out = torch.cat([part[0] for part in parts], axis).to(call.v.dtype)
    return out, torch.cat([part[1] for part in parts], axis) if call.return_lse else None


def _one_key_too_many(call, recipe):
    """Sees a key that a mask hides, as if its bytes were zeros."""
    hidden = ~seen_keys(call)
    if not hidden.any():
        return _kernel(call, recipe)
    member, key = hidden.nonzero()[0].tolist()
    mask = call.attn_mask.expand(call.q.shape[0], -1, -1, -1).clone()
    mask[member, ..., key] = True
    k, v = call.k.clone(), call.v.clone()
    k[member, :, key], v[member, :, key] = 0.0, 0.0
    return _kernel(replace(call, attn_mask=mask, k=k, v=v), recipe)


def _one_key_further(call, recipe):
    return _kernel(replace(call, causal_offset=call.causal_offset + 1), recipe)


def _poison_in_the_mean(call, recipe):
    out, lse = _kernel(call, recipe)
    return out + torch.nan, lse


def _last_row_unwritten(call, recipe):
    out, lse = _kernel(call, recipe)
    out[:, :, -1] = torch.nan
    return out, lse


FAULTS = {
    "one key too many": (_one_key_too_many, "keys"),
    "one key further": (_one_key_further, "causal"),
    "poison in the mean": (_poison_in_the_mean, "keys"),
    "last row unwritten": (_last_row_unwritten, "packed"),
}


@pytest.mark.parametrize("name", ["sage2_8", "sage1_b_f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_kernel_passes(family, name, monkeypatch):
    monkeypatch.setattr(cuda_support.attention, "run", _kernel)
    monkeypatch.setattr(cuda_support, "is_shared", lambda *facts: False)

    @few
    @given(spec=specs(replace(LANE, family=family)))
    def every_call(spec):
        far = judge("cuda", spec.call(CPU), RECIPES[name])
        assert share(far) <= 1, far

    every_call()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_does_not(fault, monkeypatch):
    kernel, family = FAULTS[fault]
    monkeypatch.setattr(cuda_support.attention, "run", kernel)
    monkeypatch.setattr(cuda_support, "is_shared", lambda *facts: False)
    shares = []

    @few
    @given(spec=specs(replace(LANE, family=family, q_len=(20, 60), kv_len=(9, 60))))
    def every_call(spec):
        shares.append(share(judge("cuda", spec.call(CPU), RECIPES["sage1_b_f32"])))

    every_call()
    assert max(shares) > 1
