"""The run-time compiler, without a GPU: what it makes, what it says, what it refuses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from sagepatch.backends.cuda import build, cubin
from sagepatch.errors import MachineError

if build.nvrtc_version() is None:
    pytest.skip("no NVRTC here", allow_module_level=True)

SOURCE = """
#include "piece.cuh"
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void __launch_bounds__(128) scale(
    const float* a, float* b, int n, const __grid_constant__ Map map, float factor, long long s) {
  __shared__ float tile[256];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x + s] = tile[127 - threadIdx.x] * factor * TIMES + n + map.words[threadIdx.x & 15];
}
extern "C" __global__ void indexed(float* a, int n) {
  float v[64];
  for (int i = 0; i < 64; i++) v[i] = a[i * n];
  for (int i = 0; i < n; i++) v[(i * 7) & 63] += twice(a[i]);
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += v[i] * i;
  a[0] = sum;
}
"""
PIECE = "__device__ inline float twice(float x) { return 2 * x; }\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of sources in place of the package's."""
    (tmp_path / "first.cu").write_text(SOURCE)
    (tmp_path / "piece.cuh").write_text(PIECE)
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { nothing(); }')
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    return tmp_path


def test_a_source_becomes_kernels_without_a_gpu(folder):
    made = build.compile_program(build.Program("first.cu", (("TIMES", 3),)))
    assert made.kernels == ("indexed", "scale")
    assert cubin.is_cubin(made.cubin)
    indexed, scale = made.resources
    # Offsets are the compiler's own; sizes are the ABI.
    assert [size for _, size in scale.params] == [8, 8, 4, 128, 4, 8]
    assert [size for _, size in indexed.params] == [8, 4]
    assert scale.stack_bytes == 0
    assert indexed.stack_bytes == 256
    assert scale.shared_bytes >= 1024


def test_resources_are_those_that_cuobjdump_prints(folder):
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists() and shutil.which("cuobjdump") is None:
        pytest.skip("no cuobjdump here")
    made = build.compile_program(build.Program("first.cu", (("TIMES", 3),)))
    file = folder / "first.cubin"
    file.write_bytes(made.cubin)
    command = [str(tool) if tool.exists() else "cuobjdump", "--dump-resource-usage", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for kernel in made.resources:
        line = printed.split(f"Function {kernel.kernel}:")[1].splitlines()[1]
        assert (
            f"REG:{kernel.registers} STACK:{kernel.stack_bytes} SHARED:{kernel.shared_bytes} "
            in (line)
        )


def test_a_wrong_source_is_refused_with_the_compilers_words(folder):
    with pytest.raises(MachineError, match=r'cannot compile wrong.cu for sm_90a.*"nothing"'):
        build.compile_program(build.Program("wrong.cu"))


def test_single_bytes_of_the_process_stay_what_they_are(folder):
    """A log without words is one byte long, and Python shares its single bytes."""
    build.compile_program(build.Program("first.cu", (("TIMES", 3),)))
    assert [bytes([value])[0] for value in range(256)] == list(range(256))


def test_the_key_follows_all_that_the_machine_code_depends_on(folder):
    program = build.Program("first.cu", (("TIMES", 3),))
    keys = {
        program.key((13, 0)),
        program.key((13, 1)),
        build.Program("first.cu", (("TIMES", 4),)).key((13, 0)),
        build.Program("first.cu", (("TIMES", 3),), "sm_90").key((13, 0)),
        build.Program("first.cu", (("TIMES", 3),), options=("-G",)).key((13, 0)),
    }
    assert program.key((13, 0)) in keys
    (folder / "piece.cuh").write_text(PIECE + "// changed\n")
    keys.add(program.key((13, 0)))
    (folder / "first.cu").write_text(SOURCE + "// changed\n")
    keys.add(program.key((13, 0)))
    assert len(keys) == 7


def test_only_files_of_the_folder_are_sources(folder):
    with pytest.raises(ValueError, match="no file name"):
        build.Program("../first.cu").text()


@pytest.mark.parametrize("end", [0, 3, 70, 500])
def test_a_cut_cubin_is_told(folder, end):
    made = build.compile_program(build.Program("first.cu", (("TIMES", 3),)))
    with pytest.raises(ValueError, match=r"ELF|cubin"):
        cubin.resources(made.cubin[:end])


@pytest.mark.parametrize(
    ("found", "said"),
    [(None, "not installed"), ((12, 4), r"NVRTC is 12\.4.*12\.8 or newer"), ((13, 0), "no sm_99a")],
)
def test_what_is_missing_is_one_sentence_with_a_way_out(monkeypatch, found, said):
    build.missing.cache_clear()
    monkeypatch.setattr(build, "nvrtc_version", lambda: found)
    import re

    sentence = build.missing("sm_99a")
    assert re.search(said, sentence)
    assert "pip install" in sentence
    build.missing.cache_clear()


def test_hopper_can_be_compiled_for_here():
    assert build.missing("sm_90a") is None
