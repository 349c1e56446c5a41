"""Launching without a GPU: the memory that the driver would read, and what is refused before."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forked import in_a_child

driver = pytest.importorskip("cuda.bindings.driver")

from sagepatch.backends.cuda import build, launch  # noqa: E402
from sagepatch.backends.cuda.launch import Kernel, Layout  # noqa: E402
from sagepatch.backends.driver import Config  # noqa: E402

SIGNATURE = "PiTfqP"
MAP = bytes(range(128))


def test_parameters_lie_aligned():
    layout = Layout.of(SIGNATURE)
    assert layout.offsets == (0, 8, 64, 192, 200, 208)
    assert layout.sizes == (8, 4, 128, 4, 8, 8)
    assert layout.packer.size == 216


@pytest.fixture
def launched(monkeypatch):
    """What reaches the driver: (blocks, threads, shared bytes, stream, parameters, attributes)."""
    seen = []

    def fake(config, function, params, extra):
        said = Config.from_address(config)
        sizes = Layout.of(SIGNATURE).sizes
        places = (ctypes.c_void_p * len(sizes)).from_address(params)
        values = [ctypes.string_at(at, size) for at, size in zip(places, sizes, strict=True)]
        attribute = (said.attribute.id, said.attribute.value) if said.count else None
        if attribute:
            assert said.attributes == config + Config.attribute.offset
        seen.append(
            (
                *(said.grid_x, said.block_x, said.shared_bytes, said.stream),
                *(values, attribute, places[2] % 64),
            )
        )
        return 0

    monkeypatch.setattr(launch, "launcher", lambda: fake)
    monkeypatch.setattr(launch, "enter", lambda device: None)
    monkeypatch.setattr(launch.Kernel, "_prepare", lambda kernel, device: None)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 64 + device, raising=False
    )
    return seen


def _kernel(**options):
    settings = {"threads": 128, "shared_bytes": 1024, "programmatic": False, **options}
    return Kernel("k", None, 5, Layout.of(SIGNATURE), **settings)


def test_a_launch_hands_over_every_parameter(launched):
    kernel = _kernel()
    for blocks in (7, 70000):
        kernel(3, blocks, 1 << 40, -5, MAP, 0.25, -(1 << 50), 0)
    first, second = launched
    assert first[:4] == (7, 128, 1024, 67)
    assert second[0] == 70000
    expected = [
        struct.pack("<Q", 1 << 40),
        struct.pack("<i", -5),
        MAP,
        struct.pack("<f", 0.25),
        struct.pack("<q", -(1 << 50)),
        struct.pack("<Q", 0),
    ]
    assert first[4] == expected
    assert first[5] is None
    assert first[6] == 0


def test_a_programmatic_launch_says_so(launched):
    _kernel(programmatic=True)(0, 1, 0, 0, MAP, 0.0, 0, 0)
    driver = pytest.importorskip("cuda.bindings.driver")
    serialization = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert launched[0][5] == (int(serialization), 1)


def test_the_settings_of_a_launch_lie_as_in_cuda_h():
    driver = pytest.importorskip("cuda.bindings.driver")
    theirs = driver.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 7, 1, 1
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 96, 1, 1
    theirs.sharedMemBytes, theirs.hStream = 1024, driver.CUstream(64)
    ours = Config.of(7, 96, 1024, False)
    ours.stream = 64
    size = Config.attribute.offset
    assert ctypes.string_at(ctypes.addressof(ours), size) == ctypes.string_at(theirs.getPtr(), size)


def test_maps_are_numbered_as_in_cuda_h(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    told = []
    monkeypatch.setattr(launch, "encode", lambda *arguments: told.append(arguments) or b"")
    launch.tensor_map.cache_clear()
    names = {torch.int8: "UINT8", torch.float8_e4m3fn: "UINT8", torch.float16: "FLOAT16"}
    names |= {torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
    for dtype, name in names.items():
        for swizzle, promotion in ((0, 0), (32, 64), (64, 128), (128, 256)):
            launch.tensor_map(64, dtype, (4, 8), (8,), (1, 8), swizzle, promotion)
            pointer, kind, element_bytes, *_, swizzled, promoted = told[-1]
            assert (pointer, element_bytes) == (64, dtype.itemsize)
            swizzles, promotions = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
            said = f"{swizzle}B" if swizzle else "NONE"
            assert kind == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")
            assert swizzled == getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{said}")
            said = f"L2_{promotion}B" if promotion else "NONE"
            assert promoted == getattr(promotions, f"CU_TENSOR_MAP_L2_PROMOTION_{said}")
    launch.tensor_map.cache_clear()


def test_a_wrong_number_of_arguments_is_told(launched):
    with pytest.raises(struct.error):
        _kernel()(0, 1, 0, 0, MAP, 0.0, 0)


def test_threads_do_not_share_parameters(launched):
    kernel = _kernel()

    def many(value):
        for _ in range(200):
            kernel(0, value, value, value, MAP, float(value), value, value)

    threads = [threading.Thread(target=many, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launched) == 600
    for blocks, _, _, _, values, _, _ in launched:
        assert values[1] == struct.pack("<i", blocks)


def test_a_refusal_of_the_driver_is_raised_with_its_words(monkeypatch, launched):
    monkeypatch.setattr(launch, "launcher", lambda: lambda *arguments: 1)
    monkeypatch.setattr(launch, "words", lambda status: f"status {status}")
    with pytest.raises(RuntimeError, match="kernel k with 5 blocks: status 1"):
        _kernel()(0, 5, 0, 0, MAP, 0.0, 0, 0)


@pytest.mark.parametrize(
    ("name", "signature", "said"),
    [("one", "P", "parameters of"), ("two", "Pi", "no kernel two: one")],
)
def test_a_signature_is_held_to_the_machine_code(monkeypatch, name, signature, said):
    monkeypatch.setattr(launch, "_loaded", lambda program: (None, {"one": (8, 4)}))
    with pytest.raises(ValueError, match=said):
        launch.load(build.Program("one.cu"), name, signature, threads=32)


@pytest.mark.parametrize(
    ("compiler", "found", "said"),
    [
        ((13, 0), None, "no NVIDIA driver"),
        ((13, 0), (12, 4), r"serves CUDA 12\.4, and NVRTC 13\.0 makes code for CUDA 13\.0"),
        ((13, 5), (13, 0), None),
        ((12, 8), (13, 0), None),
    ],
)
def test_an_old_driver_is_one_sentence(monkeypatch, compiler, found, said):
    launch.missing.cache_clear()
    monkeypatch.setattr(launch, "missing_compiler", lambda target: None)
    monkeypatch.setattr(launch, "nvrtc_version", lambda: compiler)
    monkeypatch.setattr(launch, "driver_version", lambda: found)
    sentence = launch.missing("sm_90a")
    launch.missing.cache_clear()
    if said is None:
        assert sentence is None
    else:
        import re

        assert re.search(said, sentence)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_run_on_the_current_stream_and_in_fresh_threads(tmp_path, monkeypatch):
    source = """
extern "C" __global__ void fill(float* a, int n, float value) {
  extern __shared__ float row[];
  row[threadIdx.x] = value;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) a[i] += row[blockDim.x - 1 - threadIdx.x];
}
"""
    (tmp_path / "fill.cu").write_text(source)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "kept"))
    kernel = launch.load(
        build.Program("fill.cu"), "fill", "Pif", threads=128, shared_bytes=100 << 10
    )
    a = torch.zeros(1000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        a.add_(1)
        kernel(0, 8, a.data_ptr(), a.numel(), 2.0)
    torch.cuda.current_stream().wait_stream(stream)
    assert a.eq(3).all()
    failed = []

    def fresh():
        try:
            kernel(0, 8, a.data_ptr(), a.numel(), 4.0)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=fresh)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed
    assert a.eq(7).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(0, 8, a.data_ptr(), a.numel(), 1.0)
    graph.replay()
    graph.replay()
    assert a.eq(9).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensor_maps_are_made_once_a_tensor():
    a = torch.zeros(4, 256, 128, dtype=torch.int8, device="cuda")
    arguments = (a.data_ptr(), a.dtype, tuple(a.shape), a.stride()[:-1], (1, 64, 128), 128)
    made = launch.tensor_map(*arguments)
    assert len(made) == 128
    assert launch.tensor_map(*arguments) is made
    with pytest.raises(RuntimeError, match="tensor map of"):
        launch.tensor_map(a.data_ptr() + 1, *arguments[1:])


def test_where_the_cuda_kernels_cannot_run_triton_s_serve(monkeypatch):
    from dataclasses import replace

    from sagepatch import backends
    from sagepatch.backends.catalogue import BY_NAME
    from sagepatch.dispatch import Request, select
    from sagepatch.spec import AttnSpec

    monkeypatch.setattr(launch, "missing", lambda target: f"no NVRTC for {target}")
    monkeypatch.setattr(backends, "missing_package", lambda needs: None)
    cuda, triton = (
        replace(BY_NAME[f"{toolchain}.sage2_8"], withheld=None) for toolchain in ("cuda", "triton")
    )
    assert backends.unusable(cuda) == "no NVRTC for sm_90a"
    spec = AttnSpec(1, 24, 24, 4608, 4608, 128, 128, "bf16", "bf16", "cuda", 90)
    chosen = select(spec, Request("fast"), backends.unusable, (cuda, triton))
    assert chosen.variant is triton
    assert "no NVRTC for sm_90a" in chosen.decisions[0].reasons


def test_threads_load_several_programs_at_once_and_none_twice(monkeypatch):
    programs = [build.Program(f"{name}.cu", (), "sm_90a") for name in "ab"]
    calls = []
    both = threading.Barrier(2, timeout=20)

    def loaded(program):
        calls.append(program)
        both.wait()  # breaks where one waits for the other
        return None, {"one": (8,)}

    monkeypatch.setattr(launch, "_loaded", loaded)
    monkeypatch.setattr(launch, "_LIBRARIES", {})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(launch._library, programs * 2))
    assert found == [(None, {"one": (8,)})] * 4
    assert sorted(calls, key=programs.index) == programs


# Once wrong: the child waited for a thread that it does not have.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_forked_while_a_thread_loads_can_load(monkeypatch):
    program = build.Program("a.cu", (), "sm_90a")
    inside, go_on = threading.Event(), threading.Event()

    def loaded(program):
        inside.set()
        go_on.wait(30)
        return None, {"one": (8,)}

    monkeypatch.setattr(launch, "_loaded", loaded)
    monkeypatch.setattr(launch, "_LIBRARIES", {})
    thread = threading.Thread(target=launch._library, args=(program,))
    thread.start()
    inside.wait(30)
    try:
        with launch._LOADING_LOCK:
            assert in_a_child(lambda: go_on.set() or launch._library(program)[1] == {"one": (8,)})
    finally:
        go_on.set()
        thread.join()
