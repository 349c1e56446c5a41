"""Launches with parameters packed once: what moves is new in every call, and all else as it was."""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import replace

import pytest
import torch
from host_stub import STREAM, install

pytest.importorskip("cuda.bindings.nvrtc")

from sagepatch.backends import chain as chains
from sagepatch.backends import frame, prepared
from sagepatch.backends.chain import Chain
from sagepatch.backends.cuda import attention, prepass
from sagepatch.backends.links import Link, Moving, MovingMap, filled
from sagepatch.backends.parameters import Layout
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

RECIPE = RECIPES["sage2pp_8_d4"]


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch)


def two_links(driver) -> tuple[Link, Link]:
    first, second = Layout.of("Pi{qPf}T"), Layout.of("fPP")
    driver.layouts |= {7: first, 8: second}
    encode = lambda pointer: struct.pack("<Q", pointer) * 16  # noqa: E731
    moving = (Moving(0), 5, 1 << 40, Moving(1, 64), Moving(2), MovingMap(1, 128, encode))
    return (
        Link("one", 7, 3, 128, 0, first, moving),
        Link("two", 8, 70000, 256, 1024, second, (0.5, 9, Moving(0, 16)), True),
    )


@pytest.mark.parametrize("values", [(64, 1 << 45, 0.25), (0, 256, -3.0)])
def test_every_parameter_reaches_the_driver(driver, values):
    links = two_links(driver)
    run = Chain(links, "PPf")
    for moved in ((1, 2, 3.0), values, values):
        run(0, STREAM, moved)
    for number, link in enumerate(links):
        found = driver.values(number + 4)
        assert found == driver.values(number + 2) == tuple(filled(link.args, values))
        assert found != driver.values(number)
    assert [launch[1:4] for launch in driver.launches[4:]] == [
        (3, 128, STREAM),
        (70000, 256, STREAM),
    ]


def test_one_value_moves_alone(driver):
    run = Chain(two_links(driver), "PPf")
    run(0, STREAM, (64, 128, 0.25))
    run(0, STREAM, (64, 256, 0.25))
    first, second = driver.values(0), driver.values(2)
    assert [a == b for a, b in zip(first, second, strict=True)] == [
        *(True, True, True, False, True, False)
    ]
    assert driver.values(1) == driver.values(3)


def test_another_stream_is_followed(driver):
    run = Chain(two_links(driver), "PPf")
    for stream in (64, 65, 64):
        run(0, stream, (1, 2, 3.0))
    assert [launch[3] for launch in driver.launches] == [64, 64, 65, 65, 64, 64]


def test_a_refusal_is_raised_and_the_next_call_is_whole(driver, monkeypatch):
    monkeypatch.setattr(chains.driver, "words", lambda status: f"status {status}")
    run = Chain(two_links(driver), "PPf")
    run(0, STREAM, (1, 2, 3.0))
    driver.status = 700
    with pytest.raises(RuntimeError, match="kernel one: status 700"):
        run(0, STREAM, (5, 2, 3.0))
    driver.status = 0
    run(0, STREAM, (1, 2, 3.0))
    assert driver.values(-2) == driver.values(0)


def test_a_scale_beyond_fp32_is_infinite(driver):
    run = Chain(two_links(driver), "PPf")
    for scale in (1e300, -1e300, 0.5):
        run(0, STREAM, (64, 128, scale))
    assert [driver.values(number)[4] for number in (0, 2, 4)] == [math.inf, -math.inf, 0.5]
    assert driver.values(5) == driver.values(1)


def test_members_of_a_structure_move_each_with_its_value(driver):
    layout = Layout.of("P{PqPf}i{PP}T")
    driver.layouts[9] = layout
    encode = lambda pointer: struct.pack("<Q", pointer) * 16  # noqa: E731
    args = (
        *(Moving(0), Moving(0, 8), 11, Moving(1), Moving(3), 5, Moving(2, 256), 0),
        MovingMap(2, 512, encode),
    )
    run = Chain([Link("one", 9, 1, 32, 0, layout, args)], "PPPf")
    values = (1 << 44, 0, 4096, 0.5)
    run(0, STREAM, values)
    for number, moved in enumerate((32, 48, 8192, 0.25)):
        changed = (*values[:number], moved, *values[number + 1 :])
        for now in (changed, values, changed):
            run(0, STREAM, now)
            assert driver.values(-1) == tuple(filled(args, now))


def test_a_tensor_map_is_made_once_for_an_address(driver, monkeypatch):
    monkeypatch.setattr(frame, "MOST_IMAGES", 3)
    asked = []

    def encode(pointer):
        asked.append(pointer)
        return bytes([pointer % 251]) * 128

    layout = Layout.of("TP")
    driver.layouts[9] = layout
    run = Chain([Link("one", 9, 1, 32, 0, layout, (MovingMap(0, 1, encode), Moving(1)))], "PP")
    for turn in range(6):
        run(0, STREAM, (turn % 3, turn))
    assert asked == [1, 2, 3]
    # What is remembered is bounded, and right where it is made again.
    for turn in range(40):
        run(0, STREAM, (turn, 0))
        assert driver.values(-1) == (bytes([(turn + 1) % 251]) * 128, 0)
    assert all(len(images.seen) <= 3 for _, images in run._plan.by_one)


def test_arguments_must_fit_their_signature():
    layout = Layout.of("Pi")
    with pytest.raises(ValueError, match="argument"):
        Chain([Link("k", 7, 1, 32, 0, layout, (Moving(0),))], "P")


def test_a_value_is_taken_as_what_it_is():
    layout = Layout.of("Pf")
    with pytest.raises(ValueError, match="kernel k takes value 1 of a call, which is 'P', as 'f'"):
        Chain([Link("k", 7, 1, 32, 0, layout, (Moving(0), Moving(1)))], "PP")


# Once wrong: what was a number was known by who took it, and a scale that nobody took was packed
# as an address.
def test_a_value_that_no_kernel_takes_may_be_anything(driver):
    layout = Layout.of("P")
    driver.layouts[9] = layout
    run = Chain([Link("one", 9, 1, 32, 0, layout, (Moving(0),))], prepared.VALUES)
    call = make(scale=0.3)
    run(0, STREAM, prepared.values_of(call, factor=0.3 * LOG2E))
    assert driver.values(-1) == (call.q.data_ptr(),)


def test_threads_do_not_share_parameters(driver):
    run = Chain(two_links(driver), "PPf")
    start = threading.Barrier(8)

    def many(value):
        start.wait()
        for _ in range(100):
            run(0, STREAM, (value, 2 * value, float(value)))

    threads = [threading.Thread(target=many, args=(value,)) for value in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 1600
    for number, launch in enumerate(driver.launches):
        found = driver.values(number)
        value = found[0] if launch[0] == 7 else found[2] - 16
        assert 1 <= value <= 8
        if launch[0] == 7:
            assert found[3] == 2 * value + 64
            assert found[4] == float(value)


def make(**options) -> Call:
    shape = {"B": 1, "H": 2, "S": 130, "D": 64, **options.pop("shape", {})}
    gen = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(*shape.values(), generator=gen).to(options.get("dtype", torch.bfloat16))
        for _ in range(3)
    )
    options.pop("dtype", None)
    return Call(q, k, v, options.pop("scale", 0.125), **options)


def addresses(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


def test_a_call_of_a_known_kind_moves_its_tensors_and_its_scale(driver):
    first, second = make(), make(scale=0.5)
    attention.run(first, RECIPE)
    out, lse = attention.run(second, RECIPE)
    assert len(prepared._PREPARED) == 1
    assert lse is None
    names = ("queries", "keys_and_values", "attention")
    assert len(driver.launches) == 2 * len(names)
    queries, keys, attend = (driver.values(3 + i) for i in range(3))
    assert queries[0] == second.q.data_ptr()
    assert keys[:3] == tuple(t.data_ptr() for t in (second.q, second.k, second.v))
    assert out.data_ptr() in attend
    assert attend[-2:] == (pytest.approx(0.5 * LOG2E), 0)
    assert driver.values(2)[-2] == pytest.approx(0.125 * LOG2E)
    # What does not move is what the plain launch of the pre-pass passes.
    plan = prepass.plan_of(prepass.form_of(second, RECIPE, raw_q=True))
    values = prepared.values_of(second, factor=0.5 * LOG2E)
    for found, args in ((queries, plan.queries_args), (keys, plan.keys_args)):
        for number, arg in enumerate(args):
            if not isinstance(arg, Moving) or arg.value != prepared.SCRATCH:
                assert found[number] == pytest.approx(filled(args, values)[number])


def kind(call: Call) -> tuple[object, ...]:
    at = prepared.addresses_of(call)
    return prepared.kind_of(call, prepared.look_of(call.q, call.k, call.v, call.attn_mask, at))


OTHERS = {
    "length": make(shape={"S": 131}),
    "dtype": make(dtype=torch.float16),
    "causal": make(causal_offset=0),
    "window": make(causal_offset=0, window=7),
    "layout": make(bshd_out=True),
    "lse": make(return_lse=True),
    "mask": make(attn_mask=torch.ones(1, 1, 1, 130, dtype=torch.bool)),
    "strides": replace(make(), k=make().k.transpose(1, 2).contiguous().transpose(1, 2)),
    "mask strides": make(attn_mask=torch.ones(1, 1, 1, 260, dtype=torch.bool)[..., ::2]),
    "q alone unaligned": replace(
        make(), q=torch.cat([make().q.flatten()[:1], make().q.flatten()])[1:].view_as(make().q)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_kernels_depend_on_is_another_kind(driver, name):
    plain, other = make(), OTHERS[name]
    assert kind(plain) != kind(other)
    for call in (plain, other):
        for _ in range(2):
            out, lse = attention.run(call, RECIPE)
            assert out.shape == call.q.shape
            assert out.dtype == call.v.dtype
            assert out.stride() == call.empty_out().stride()
            assert (lse is not None) == call.return_lse
    assert len(prepared._PREPARED) == 2


def test_another_recipe_is_another_kind(driver):
    for name in ("sage2_8", "sage2pp_8_d4"):
        attention.run(make(), RECIPES[name])
    assert len(prepared._PREPARED) == 2


def test_what_is_remembered_is_bounded(driver, monkeypatch):
    monkeypatch.setattr(prepared, "_PREPARED", type(prepared._PREPARED)(3))
    for length in range(100, 108):
        attention.run(make(shape={"S": length}), RECIPE)
        assert len(prepared._PREPARED) <= 3


@pytest.mark.parametrize("empty", ["queries", "keys"])
def test_empty_calls_launch_nothing(driver, empty):
    call = make(return_lse=True)
    call = (
        replace(call, q=call.q[:, :, :0])
        if empty == "queries"
        else replace(call, k=call.k[:, :, :0], v=call.v[:, :, :0])
    )
    out, lse = attention.run(call, RECIPE)
    assert not driver.launches
    assert out.shape == call.q.shape
    assert not out.any()
    assert lse.eq(-math.inf).all()


def test_a_guard_is_one_link_more(driver):
    pytest.importorskip("triton")
    flags = torch.zeros(2, dtype=torch.int32)
    for name in ("plain", "mask"):
        call = make() if name == "plain" else OTHERS["mask"]
        for _ in range(2):
            driver.launches.clear()
            out, _ = attention.run_guarded(call, RECIPE, flags)
        known = list(prepared._PREPARED.values())[-1]
        names = [link.name for link in known.chain.links]
        assert names[-2:] == ["attention", "exact_where"]
        assert len(driver.launches) == len(names)
        attend, exact = driver.values(-2), driver.values(-1)
        assert attend[-1] == flags.data_ptr()
        assert exact[:4] == (flags.data_ptr(), *(t.data_ptr() for t in (call.q, call.k, call.v)))
        if call.attn_mask is not None:
            assert exact[4] == call.attn_mask.data_ptr()
        assert out.data_ptr() in exact


# Once wrong: lengths of queries and keys in one tensor were one place in the exact kernel, too, for
# every later call.
def test_lengths_in_one_tensor_are_two_places_of_a_guarded_chain(driver):
    pytest.importorskip("triton")
    flags = torch.zeros(2, dtype=torch.int32)
    same, queries, keys = (torch.tensor([0, n, 130], dtype=torch.int32) for n in (50, 60, 70))
    packed = replace(make(), cu_seqlens_q=same, cu_seqlens_kv=same)
    attention.run_guarded(packed, RECIPE, flags)
    attention.run_guarded(replace(packed, cu_seqlens_q=queries, cu_seqlens_kv=keys), RECIPE, flags)
    assert len(prepared._PREPARED) == 1
    exact = driver.values(-1)
    assert exact[4:6] == (queries.data_ptr(), keys.data_ptr())
