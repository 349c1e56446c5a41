"""What the host does for a call like one before it: the same launches, the same account, nothing
chosen anew, and few steps of Python. Nothing runs: what reaches the driver is looked at.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_stub import STREAM, install
from models.layers import layer as make_layer
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("triton")

import sagepatch
from sagepatch import known, ops
from sagepatch.backends import chain, prepared
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.backends.cuda import attention as cuda_attention
from sagepatch.backends.triton import attention as triton_attention
from sagepatch.dispatch import Request
from sagepatch.errors import InvalidArgument
from sagepatch.functional import run
from sagepatch.layer import PatchedLayer
from sagepatch.spec import Call

pytestmark = pytest.mark.skipif(
    triton_attention.INTERPRETED, reason="interpreted kernels are not launched"
)
CUDA, TRITON = "cuda.sage2pp_8_d4", "triton.sage2_8"
both = pytest.mark.parametrize("name", [CUDA, TRITON])
# Python functions that one warm call may enter, its own included; a call has no loop over tensors,
# so that each of them is paid for in every call of every layer.
MOST_STEPS = {"call": 11, "layer": 20}


@pytest.fixture
def driver(monkeypatch):
    made = install(monkeypatch)
    monkeypatch.setattr(known, "_KNOWN", type(known._KNOWN)(known.MOST_KNOWN))
    # As on a GPU: nothing is computed, so the output is not to be looked at.
    for module in (ops, known):
        monkeypatch.setattr(module, "comes_again", lambda call: True)
    monkeypatch.setattr(ops, "_host_checks", lambda layer, call: False)
    chosen = lambda spec, variant: BY_NAME[variant]  # noqa: E731
    for module in (ops, known):
        monkeypatch.setattr(module, "chosen_for", chosen)
    monkeypatch.setattr(
        PatchedLayer, "_decide", lambda self, spec, request: (BY_NAME[request.variant], None)
    )
    with torch.no_grad():
        yield made


def tensors(seed: int = 0, length: int = 130, layout: str = "BHSD") -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shape = (1, 2, length, 64) if layout == "BHSD" else (1, length, 2, 64)
    return [torch.randn(shape, generator=gen).bfloat16() for _ in range(3)]


def steps(work) -> Counter[str]:
    """The Python functions that `work` enters."""
    entered: Counter[str] = Counter()
    # Not the stand-ins for the driver.
    places = tuple(str(Path(module.__file__).parent) for module in (sagepatch, torch))

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(places):
            entered[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


@both
def test_a_warm_call_takes_few_steps(driver, name):
    q, k, v = tensors()
    for _ in range(2):
        sagepatch.attention(q, k, v, variant=name)
    entered = steps(lambda: sagepatch.attention(q, k, v, variant=name))
    assert entered.total() <= MOST_STEPS["call"], entered
    for chosen in ("spec", "select", "rejects", "check_options", "serve", "kind_of"):
        assert chosen not in entered


@both
def test_a_warm_call_of_a_layer_takes_few_steps(driver, name):
    one = make_layer()
    one.run_with(Request(name), "asked")
    q, k, v = tensors()
    for _ in range(2):
        run(Call(q, k, v, 0.125), handle=one.handle)
    entered = steps(lambda: run(Call(q, k, v, 0.125), handle=one.handle))
    assert entered.total() <= MOST_STEPS["layer"], entered
    for chosen in ("spec", "select", "choose", "rejects"):
        assert chosen not in entered


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("lse", [False, True])
@both
def test_a_known_call_gives_what_the_first_gave(driver, name, lse, layout):
    axis = 1 if layout == "BHSD" else 2

    def ask(seed):
        q, k, v = tensors(seed, layout=layout)
        return sagepatch.attention(q, k, v, variant=name, layout=layout, return_lse=lse)

    first, second = ask(0), ask(1)
    assert len(known._KNOWN) == 1
    if lse:
        assert second[1].shape == first[1].shape == (1, 2, 130)
        first, second = first[0], second[0]
    assert second.shape[axis] == 2
    assert (second.shape, second.stride(), second.dtype) == (
        *(first.shape, first.stride(), first.dtype),
    )
    assert second.is_contiguous()


def test_without_a_batch(driver):
    q, k, v = (t[0] for t in tensors())
    for _ in range(2):
        out, lse = sagepatch.attention(q, k, v, variant=CUDA, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, (2, 130))
    assert len(known._KNOWN) == 1


OPTIONS = {
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "causal_offset": 3},
    "window": {"window": 9},
    "lse": {"return_lse": True},
    "kernel": {"variant": "cuda.sage2_8"},
    "mask": {"attn_mask": torch.ones(1, 1, 1, 130, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_another_option_is_another_call(driver, name):
    q, k, v = tensors()
    options = {"variant": CUDA, **OPTIONS[name]}
    for asked in ({"variant": CUDA}, options):
        for _ in range(2):
            sagepatch.attention(q, k, v, **asked)
    assert len(known._KNOWN) == 2
    assert len(prepared._PREPARED) == 2


def test_the_scale_moves_and_is_not_remembered(driver):
    q, k, v = tensors()
    sagepatch.attention(q, k, v, variant=CUDA)
    factors = []
    for scale in (None, 0.5, -2):
        sagepatch.attention(q, k, v, scale=scale, variant=CUDA)
        factors.append(driver.values(-1)[-2])
    assert [f / factors[0] for f in factors] == pytest.approx([1, 4, -16])
    assert len(known._KNOWN) == 1


REFUSED = {
    "window as a float": {"window": 9.0},
    "window as a bool": {"window": True},
    "dropout": {"dropout_p": 0.1},
    "scale": {"scale": float("nan")},
    "offset alone": {"causal_offset": 3},
}


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "window as a bool"])
def test_what_was_refused_is_refused_after_a_call_like_it(driver, name):
    q, k, v = tensors()
    for _ in range(2):
        sagepatch.attention(q, k, v, window=9, variant=CUDA)
        sagepatch.attention(q, k, v, variant=CUDA)
    with pytest.raises(InvalidArgument):
        sagepatch.attention(q, k, v, variant=CUDA, **REFUSED[name])


@both
def test_scratch_memory_is_of_the_stream_and_given_back(driver, name, monkeypatch):
    monkeypatch.setattr(chain.driver, "words", lambda status: f"status {status}")
    q, k, v = tensors()
    for _ in range(3):
        sagepatch.attention(q, k, v, variant=name)
    assert driver.asked
    assert {stream for _, stream in driver.asked} == {STREAM}
    assert not driver.taken
    driver.status = 700
    with pytest.raises(RuntimeError, match="status 700"):
        sagepatch.attention(q, k, v, variant=name)
    assert not driver.taken


OTHER_LAYOUTS = {
    "sparse": lambda t: t.float().to_sparse(),
    "compressed": lambda t: t[0, 0].float().to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]),
    "opaque": lambda t: t.float().to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_other_layouts_are_refused_after_a_call_like_them(driver, name):
    q, k, v = tensors()
    for _ in range(2):
        sagepatch.attention(q, k, v, variant=CUDA)
    for place in range(3):
        given = [q, k, v]
        given[place] = OTHER_LAYOUTS[name](given[place])
        assert known.seen_of(*given, None) is None
        with pytest.raises(InvalidArgument, match="needs a dense one"):
            sagepatch.attention(*given, variant=CUDA)


WATCHED = {
    "lazily negative": lambda q: torch._neg_view(q),
    "a parameter": lambda q: torch.nn.Parameter(q, requires_grad=False),
}


@pytest.mark.parametrize("name", WATCHED)
def test_tensors_that_are_more_than_memory_go_through_the_op(driver, name):
    q, k, v = tensors()
    for _ in range(2):
        sagepatch.attention(q, k, v, variant=CUDA)
    assert ops.tensors_need_op(WATCHED[name](q), k, v)
    assert known.seen_of(WATCHED[name](q), k, v, None) is None
    bias = torch.zeros(130, 130)
    assert known.seen_of(q, k, v, bias) is not None
    assert known.seen_of(q, k, v, WATCHED[name](bias)) is None


def test_gradients_autocast_and_modes_are_looked_at_one_by_one(driver, monkeypatch):
    q, k, v = tensors()
    assert known.seen_of(q, k, v, None) is not None
    with torch.enable_grad():
        assert known.seen_of(q, k, v, None) is not None
        assert known.seen_of(q.clone().requires_grad_(), k, v, None) is None
        bias = torch.zeros(130, 130, requires_grad=True)
        assert known.seen_of(q, k, v, bias) is None
    with forward_ad.dual_level():
        assert known.seen_of(q, k, v, None) is None
    with FlopCounterMode(display=False):
        assert known.seen_of(q, k, v, None) is None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert known.seen_of(q, k, v, None) is None


def test_a_single_query_does_not_come_again():
    q, k, v = tensors()
    on_a_gpu = SimpleNamespace(is_cuda=True, shape=q.shape)
    one_query = SimpleNamespace(is_cuda=True, shape=q[:, :, :1].shape)
    assert prepared.comes_again(replace(Call(q, k, v, 0.125), q=on_a_gpu))
    assert not prepared.comes_again(replace(Call(q, k, v, 0.125), q=one_query))
    assert not prepared.comes_again(Call(q, k, v, 0.125))


def test_keys_on_another_device_are_no_call_like_it(driver):
    one = make_layer()
    one.run_with(Request(CUDA), "asked")
    q, k, v = tensors()
    for _ in range(2):
        run(Call(q, k, v, 0.125), handle=one.handle)
        sagepatch.attention(q, k, v, variant=CUDA)
    elsewhere = k.to("meta")
    with pytest.raises(InvalidArgument, match="one device"):
        sagepatch.attention(q, elsewhere, v, variant=CUDA)
    with pytest.raises(InvalidArgument, match="one device"):
        ops.run_layer(one, Call(q, elsewhere, v, 0.125))


def test_a_layer_keeps_its_account_and_forgets_with_its_choice(driver):
    one = make_layer()
    one.run_with(Request(CUDA), "asked")
    q, k, v = tensors()
    for _ in range(3):
        run(Call(q, k, v, 0.125), handle=one.handle)
    assert one.record.calls == 3
    assert one.record.by_variant == {CUDA: 3}
    assert list(one.record.specs.values()) == [3]
    assert len(one.ways) == 1
    one.run_with(Request("cuda.sage2_8"), "asked")
    assert not one.ways
    run(Call(q, k, v, 0.125), handle=one.handle)
    assert one.record.by_variant == {CUDA: 3, "cuda.sage2_8": 1}
    one.demote("told to")
    assert not one.ways


def test_the_guard_of_a_layer_is_asked_in_every_call(driver, monkeypatch):
    flags = torch.zeros(2, dtype=torch.int32)
    verdicts = iter([None, None, "kernel"])
    guard = SimpleNamespace(
        flags=flags,
        run=lambda variant, call: cuda_attention.run_guarded(call, variant.recipe, flags),
        verdict=lambda: next(verdicts),
    )
    monkeypatch.setattr(PatchedLayer, "guard", lambda self, device: guard)
    one = make_layer()
    one.run_with(Request(CUDA), "asked")
    q, k, v = tensors()
    for _ in range(3):
        run(Call(q, k, v, 0.125), handle=one.handle)
        assert flags.data_ptr() in driver.values(-1)
    assert one.demoted is not None
    assert not one.ways


@pytest.mark.parametrize("reason", [None, "no kernel for it"])
def test_exact_layers_choose_once_too(driver, monkeypatch, reason):
    monkeypatch.setattr(PatchedLayer, "_decide", lambda self, spec, request: (SDPA, reason))
    one = make_layer()
    one.run_with(Request(CUDA), "asked")
    q, k, v = tensors()
    outs = [run(Call(q, k, v, 0.125), handle=one.handle)[0] for _ in range(2)]
    entered = steps(lambda: outs.append(run(Call(q, k, v, 0.125), handle=one.handle)[0]))
    assert not {"spec", "choose"} & set(entered)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert one.record.by_variant == {SDPA.name: 3}
    assert one.record.fallbacks == ({} if reason is None else {reason: 3})
    one.run_with(Request(CUDA), "asked again")
    assert not one.ways


def test_a_failing_launch_names_its_layer(driver, monkeypatch):
    monkeypatch.setattr(chain.driver, "words", lambda status: f"status {status}")
    one = make_layer()
    one.run_with(Request(CUDA), "asked")
    q, k, v = tensors()
    run(Call(q, k, v, 0.125), handle=one.handle)
    driver.status = 700
    with pytest.raises(RuntimeError, match="status 700") as raised:
        run(Call(q, k, v, 0.125), handle=one.handle)
    assert f"in layer {one.name}" in raised.value.__notes__[0]


def test_a_layer_that_is_looked_at_or_follows_a_schedule_keeps_no_way(driver):
    q, k, v = tensors()
    for change in (
        lambda one: one.run_with(Request(CUDA), "", parts=((0.5, Request(CUDA)),)),
        lambda one: setattr(one, "policy", replace(one.policy, guard="off")),
    ):
        one = make_layer()
        one.run_with(Request(CUDA), "")
        change(one)
        for _ in range(2):
            run(Call(q, k, v, 0.125), handle=one.handle)
        assert bool(one.ways) is not bool(one.parts)
