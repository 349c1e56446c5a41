"""A remembered call of the Triton kernels: their machine code for sm_90, launched by ourselves,
every pointer anew. Nothing runs: what reaches the driver is compared.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.nvrtc")

from host_stub import install

from sagepatch.backends import prepared
from sagepatch.backends.links import Moving, MovingMap
from sagepatch.backends.triton import attention, launching
from sagepatch.backends.triton.launching import ALIGNMENT, Recording, links_of
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

pytestmark = pytest.mark.skipif(
    attention.INTERPRETED, reason="interpreted kernels have no machine code"
)
RECIPE = RECIPES["sage2_8"]
slow = pytest.mark.slow


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch)


def make(seed: int = 0, dim: int = 64, dtype=torch.bfloat16, **options) -> Call:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 130, dim, generator=gen).to(dtype) for _ in range(3))
    return Call(q, k, v, options.pop("scale", 0.125), **options)


def the_chain():
    (known,) = prepared._PREPARED.values()
    return known.chain, known


@pytest.mark.parametrize(
    ("name", "dim", "options", "guarded"),
    [
        ("sage2_8", 64, {}, True),
        ("sage1_b", 80, {"return_lse": True}, False),
        # Compiling takes most of the time.
        pytest.param("sage1_b", 80, {"return_lse": True}, True, marks=slow),
        pytest.param("sage2_8", 128, {"causal_offset": 3, "window": 50}, True, marks=slow),
        pytest.param("sage2pp_4", 128, {"softcap": 20.0}, False, marks=slow),
    ],
    ids=str,
)
def test_every_parameter_fits_the_machine_code(driver, name, dim, options, guarded):
    flags = torch.zeros(2, dtype=torch.int32)
    call = make(dim=dim, **options)
    run = (
        (lambda c: attention.run_guarded(c, RECIPES[name], flags))
        if guarded
        else (lambda c: attention.run(c, RECIPES[name]))
    )
    run(call)
    assert not driver.launches
    out, lse = run(make(1, dim, **options))
    assert (lse is not None) == call.return_lse
    names = ["stats", "quantise", "attention", *(["exact_where"] if guarded else [])]
    chain, _ = the_chain()
    assert [link.name for link in chain.links] == names
    assert len(driver.launches) == len(names)
    at = driver.values(2)
    assert out.data_ptr() in at
    assert not guarded or (flags.data_ptr() in at and flags.data_ptr() in driver.values(3))


def test_a_call_of_a_known_kind_moves_its_tensors_and_its_scale(driver):
    attention.run(make(), RECIPE)
    other = make(1, scale=0.3)
    attention.run(other, RECIPE)
    chain, known = the_chain()
    stats, quantise = driver.values(0), driver.values(1)
    assert stats[:2] == (other.k.data_ptr(), other.v.data_ptr())
    assert quantise[:3] == tuple(t.data_ptr() for t in (other.q, other.k, other.v))
    factors = [
        found
        for found, arg in zip(quantise, chain.links[1].args, strict=True)
        if isinstance(arg, Moving) and arg.value == prepared.FACTOR
    ]
    assert factors == [pytest.approx(0.3 * LOG2E)]
    # Scratch memory: what one launch writes the next reads, whole and at addresses of its own.
    spans = {
        arg.offset
        for link in chain.links
        for arg in link.args
        if isinstance(arg, Moving | MovingMap) and arg.value == prepared.SCRATCH
    }
    assert all(at % ALIGNMENT == 0 for at in spans)
    assert max(spans) < known.scratch_bytes
    maps = [arg for arg in chain.links[2].args if isinstance(arg, MovingMap)]
    written = {arg.offset for arg in chain.links[1].args if isinstance(arg, Moving)}
    assert len(maps) == 2
    assert {arg.offset for arg in maps} <= written


@pytest.mark.parametrize("pair", [("q", "k"), ("k", "v"), ("q", "v")])
def test_one_tensor_in_two_places_is_not_one_place(driver, pair):
    call = make()
    first, second = pair
    attention.run(replace(call, **{second: getattr(call, first)}), RECIPE)
    other = make(1)
    attention.run(other, RECIPE)
    assert len(prepared._PREPARED) == 1
    quantise = driver.values(1)
    assert quantise[:3] == tuple(t.data_ptr() for t in (other.q, other.k, other.v))


KINDS = {
    "length": lambda call: replace(call, q=call.q[:, :, :100]),
    "strides": lambda call: replace(call, k=call.k.mT.contiguous().mT),
    "dtype": lambda call: make(dtype=torch.float16),
    "alignment": lambda call: replace(
        call, v=torch.cat([call.v.flatten()[:1], call.v.flatten()])[1:].view_as(call.v)
    ),
    "layout": lambda call: replace(call, bshd_out=True),
}


@pytest.mark.parametrize(
    "name", ["layout", *(pytest.param(k, marks=slow) for k in KINDS if k != "layout")]
)
def test_what_machine_code_depends_on_is_another_kind(driver, name):
    call = make()
    attention.run(call, RECIPE)
    other = KINDS[name](call)
    out, _ = attention.run(other, RECIPE)
    assert len(prepared._PREPARED) == 2
    assert out.stride() == other.empty_out().stride()
    assert not driver.launches


def test_a_launch_of_another_kind_is_left_to_triton(driver, monkeypatch):
    """A cluster, a cooperative launch, scratch memory, parameters that are not as expected."""
    noted = []
    monkeypatch.setattr(attention, "links_of", lambda recording, tensors: noted.append(recording))
    call = make()
    attention.run(call, RECIPE)
    attention.run(call, RECIPE)
    assert not driver.launches
    assert not prepared._PREPARED
    recording = noted[0]
    assert links_of(recording, {}) is not None
    assert links_of(Recording(), {}) is None
    compiled, programs, args = recording.launches[0]
    said = compiled.metadata
    for change in (
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
    ):
        other = replace(compiled, metadata=said._replace(**change))
        assert links_of(Recording([(other, programs, args)]), {}) is None
    signature = dict(compiled.src.signature)
    name = next(name for name, kind in signature.items() if kind == "i32")
    for kind in ("i64", "fp64"):
        src = SimpleNamespace(signature={**signature, name: kind})
        other = replace(compiled, src=src)
        assert links_of(Recording([(other, programs, args)]), {}) is None


def test_maps_are_as_the_driver_numbers_types():
    # Of cuda.h: UINT8 0, FLOAT16 6, FLOAT32 7, BFLOAT16 9; triton/backends/nvidia/driver.py.
    assert [launching._TYPES.get(kind, kind) for kind in (0, 6, 7, 10)] == [0, 6, 7, 9]
