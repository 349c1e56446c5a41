"""The known-answer check: what passes, what fails, what is kept; on a CPU with kernels that lie."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from forked import in_a_child

from sagepatch import ops
from sagepatch.backends import selfcheck
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.backends.cuda import build
from sagepatch.dispatch import Request, select
from sagepatch.errors import VariantRefused
from sagepatch.numerics.attention import emulate
from sagepatch.spec import AttnSpec

VARIANT = BY_NAME["triton.sage2_8"]
GPU = "Pretend GPU"
CPU = torch.device("cpu")


@pytest.fixture
def answer():
    call = selfcheck.known_call(torch.device("cpu"))
    out, lse = emulate(call, VARIANT.recipe)
    return call, out.clone(), lse.clone()


def test_the_emulator_knows_its_answer(answer):
    call, out, lse = answer
    assert selfcheck.verdict(VARIANT, call, out, lse) is None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda out, lse: out.view(-1)[5].fill_(float("nan")), "not finite or was not written"),
        (lambda out, lse: out[:, :, 64:].zero_(), "cosine"),
        (lambda out, lse: out.mul_(1.2), "relative L1"),
        (lambda out, lse: lse.add_(1.0), "log-sum-exp"),
        (lambda out, lse: lse.view(-1)[3].fill_(float("nan")), "log-sum-exp"),
    ],
    ids=["nan", "tile not written", "scale", "lse", "lse nan"],
)
def test_wrong_answers_fail(answer, spoil, told):
    call, out, lse = answer
    spoil(out, lse)
    assert told in selfcheck.verdict(VARIANT, call, out, lse)


def test_a_hopper_kernel_is_asked_both_ways_that_it_has(monkeypatch):
    hopper = BY_NAME["cuda.sage2_8"]
    asked = []

    def kernel(call, recipe):
        asked.append((call.return_lse, call.causal_offset))
        out, lse = emulate(call, recipe)
        spoilt = out if call.return_lse else out * 1.2
        return spoilt, lse if call.return_lse else None

    monkeypatch.setattr(selfcheck, "load", lambda entry: kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    known = selfcheck.known_call
    monkeypatch.setattr(selfcheck, "known_call", lambda device, **seed: known(CPU, **seed))
    assert "relative L1" in (selfcheck._check(hopper, 0) or "")
    assert asked == [(True, 71), (False, None)]
    assert selfcheck._check(VARIANT, 0) is None


@pytest.mark.parametrize("recipe", ["sage2pp_8", "sage2_4"])
def test_an_mma_kernel_is_asked_at_both_usual_head_sizes(monkeypatch, recipe):
    ours = BY_NAME[f"cuda_mma.{recipe}"]
    asked = []

    def kernel(call, recipe):
        asked.append(call.q.shape[3])
        out, lse = emulate(call, recipe)
        return out if call.q.shape[3] == 64 else out * 1.2, lse

    monkeypatch.setattr(selfcheck, "load", lambda entry: kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    known = selfcheck.known_call
    monkeypatch.setattr(
        selfcheck, "known_call", lambda device, *dim, **seed: known(CPU, *dim, **seed)
    )
    assert "relative L1" in (selfcheck._check(ours, 0) or "")
    assert asked == [64, 128]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with one GPU, on which `runs` counts the checks made; `runs.result` is theirs."""

    class Runs(list):
        result: str | None = None

    runs = Runs()

    def check(variant, index):
        runs.append(variant.name)
        return runs.result

    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(selfcheck, "_RESULTS", {})
    monkeypatch.setattr(selfcheck, "_check", check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return runs


def test_a_kernel_is_checked_once_a_kind_of_gpu_and_its_pass_is_kept(gpu, tmp_path):
    assert selfcheck.failure(VARIANT) is None
    assert selfcheck.failure(VARIANT) is None
    selfcheck._RESULTS.clear()  # another process
    assert selfcheck.failure(VARIANT) is None
    assert gpu == [VARIANT.name]
    (kept,) = (tmp_path / "checks").iterdir()
    assert json.loads(kept.read_text())["gpu"] == GPU


@pytest.mark.parametrize(
    "fact", ["driver", "torch", "triton", "numerics", "gpu", "sagepatch", "sources"]
)
def test_a_pass_of_other_versions_does_not_count(gpu, tmp_path, fact):
    selfcheck.failure(VARIANT)
    (kept,) = (tmp_path / "checks").iterdir()
    facts = json.loads(kept.read_text())
    kept.write_text(json.dumps({**facts, fact: "another"}))
    selfcheck._RESULTS.clear()
    selfcheck.failure(VARIANT)
    assert len(gpu) == 2


# Once wrong: another compiler's machine code had passed already.
def test_a_pass_of_another_compiler_does_not_count(gpu, monkeypatch):
    kernel = BY_NAME["cuda.sage2_8"]
    for version in ((12, 9), (13, 0), (13, 0)):
        monkeypatch.setattr(build, "nvrtc_version", lambda version=version: version)
        selfcheck._RESULTS.clear()  # another process
        assert selfcheck.failure(kernel) is None
        assert selfcheck.failure(VARIANT) is None
    assert gpu == [kernel.name, VARIANT.name, kernel.name]


# Once wrong: a checkout updated in place has the same version, and other kernels.
@pytest.mark.parametrize(
    ("file", "asked"),
    [
        ("backends/cuda/codes.cuh", {"cuda", "cuda_mma"}),
        ("backends/cuda_mma/mma_values.cuh", {"cuda_mma"}),
        ("backends/triton/kernel.py", {"triton"}),
        ("numerics/attention.py", {"cuda", "cuda_mma", "triton"}),
        ("backends/catalogue.py", {"cuda", "cuda_mma", "triton"}),
        ("cli/info.py", set()),
    ],
)
def test_a_pass_of_other_sources_does_not_count(monkeypatch, tmp_path, file, asked):
    copy = tmp_path / "sagepatch"
    shutil.copytree(selfcheck.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(selfcheck, "PACKAGE", copy)
    hashed = selfcheck._sources.__wrapped__
    before = {name: hashed(name) for name in selfcheck.CHECKED}
    assert before == {name: hashed(name) for name in selfcheck.CHECKED}
    with (copy / file).open("a", encoding="utf-8") as source:
        source.write("\n")
    assert {name for name in selfcheck.CHECKED if hashed(name) != before[name]} == asked


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"failure": ""}', "null"])
def test_a_damaged_file_is_no_pass(gpu, tmp_path, text):
    selfcheck.failure(VARIANT)
    (kept,) = (tmp_path / "checks").iterdir()
    kept.write_text(text)
    selfcheck._RESULTS.clear()
    selfcheck.failure(VARIANT)
    assert len(gpu) == 2


def test_a_failure_disables_the_kernel_and_the_next_process_tries_again(gpu, caplog):
    gpu.result = "known-answer check: cosine 0.1"
    assert selfcheck.failure(VARIANT) == gpu.result
    assert "is disabled on Pretend GPU" in caplog.text
    assert selfcheck.failure(VARIANT) == gpu.result
    selfcheck._RESULTS.clear()
    assert selfcheck.last_failure(VARIANT) == gpu.result
    assert len(gpu) == 1
    gpu.result = None
    assert selfcheck.failure(VARIANT) is None
    assert selfcheck.last_failure(VARIANT) is None


def test_the_current_gpu_stands_for_its_kind(gpu, monkeypatch):
    names = ["A", "B", "B", "A"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert list(selfcheck._each_kind().values()) == [0, 1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert list(selfcheck._each_kind().values()) == [2, 0]


def test_a_check_without_memory_says_nothing_about_the_kernel(gpu, monkeypatch):
    def hungry(variant, index):
        raise torch.OutOfMemoryError("no room")

    passing = selfcheck._check
    monkeypatch.setattr(selfcheck, "_check", hungry)
    assert "no memory left" in selfcheck.failure(VARIANT)
    assert selfcheck.last_failure(VARIANT) is None
    monkeypatch.setattr(selfcheck, "_check", passing)
    assert selfcheck.failure(VARIANT) is None


def test_nothing_is_checked_while_a_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert selfcheck.failure(VARIANT) is None
    assert gpu == []
    assert selfcheck._RESULTS == {}


# Once wrong: an unchecked kernel went into the user's graph for good. A layer's first call is
# captured where its plan is from a file and nobody warmed it up: it serves, as it did.
@pytest.mark.parametrize("variant", ["fast", "triton.sage2_8", "auto"])
def test_an_unchecked_kernel_of_a_plain_call_is_refused_while_a_graph_is_captured(
    gpu, monkeypatch, variant
):
    monkeypatch.setattr(ops, "_CHOSEN", {})
    monkeypatch.setattr(ops, "unusable", lambda variant: None)
    captured = replace(_spec(), gpu=GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(VariantRefused, match=r"call sagepatch\.attention once before the capture"):
        ops.chosen_for(captured, variant)
    assert gpu == []
    assert selfcheck._RESULTS == ops._CHOSEN == {}
    # Exact attention needs no check.
    assert ops.chosen_for(captured, "exact") is SDPA
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    served = ops.chosen_for(captured, variant)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ops._CHOSEN.clear()
    assert ops.chosen_for(captured, variant) is served
    # In the next process the pass that was kept is enough.
    selfcheck._RESULTS.clear()
    assert ops.chosen_for(captured, variant) is served
    assert len(gpu) == 1


# Once wrong: the thread that held the lock is not there in the child, which waited for ever.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_forked_during_a_check_can_check(gpu, monkeypatch):
    held, done = threading.Event(), threading.Event()
    passing = selfcheck._check

    def slow(variant, index):
        held.set()
        done.wait(30)
        return passing(variant, index)

    monkeypatch.setattr(selfcheck, "_check", slow)
    thread = threading.Thread(target=selfcheck.failure, args=(VARIANT,))
    thread.start()
    held.wait(30)
    try:
        assert in_a_child(lambda: done.set() or selfcheck.failure(VARIANT) is None)
    finally:
        done.set()
        thread.join()


def test_a_gpu_that_a_kernel_does_not_serve_says_nothing_against_it(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert selfcheck.failure(VARIANT) is None
    assert gpu == []


def test_kernels_of_the_cpu_are_not_checked(gpu):
    assert selfcheck.failure(SDPA) is None
    assert selfcheck.failure(BY_NAME["emulated.sage2_8"]) is None
    assert gpu == []


def _spec(**changes):
    known = AttnSpec(
        *(1, 8, 8, 8192, 8192, 64, 64),
        **{"dtype": "bf16", "v_dtype": "bf16", "device": "cuda", "arch": 90},
    )
    return replace(known, **changes)


def test_a_kernel_that_fails_gives_its_place_to_the_next():
    asked = []

    def prove(variant):
        asked.append(variant.name)
        return "lies" if variant.recipe.name == "sage2pp_8_d4" else None

    chosen = select(_spec(), Request("fast"), lambda variant: None, prove=prove)
    assert chosen.variant.name == "cuda.sage2_8"
    # Only those about to be chosen are compiled and run.
    assert asked == ["cuda.sage2pp_8_d4", "cuda.sage2_8"]
    assert chosen.decisions[0].reasons == ("lies",)
    with pytest.raises(VariantRefused, match="lies"):
        select(
            _spec(), Request("triton.sage2_8b_k128"), lambda variant: None, prove=lambda v: "lies"
        )


def test_a_kernel_that_fails_on_one_kind_of_gpu_serves_on_the_other(monkeypatch, gpu):
    names = ["Kind A", "Kind A", "Kind B"]
    checked = []

    def check(variant, index):
        checked.append(index)
        return "wrong answer" if names[index] == "Kind A" else None

    monkeypatch.setattr(selfcheck, "_check", check)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert selfcheck.failure(VARIANT, "Kind B") is None
    assert selfcheck.failure(VARIANT, "Kind A") == "wrong answer"
    assert selfcheck.failure(VARIANT) == "wrong answer"  # the current one is of kind A
    assert checked == [2, 1]
    assert selfcheck.last_failure(VARIANT) == "on Kind A: wrong answer"
    # The same for calls: each goes by the kind of its own GPU.
    monkeypatch.setattr(ops, "_CHOSEN", {})
    monkeypatch.setattr(ops, "unusable", lambda variant: None)
    for kind, served in (("Kind B", True), ("Kind A", False)):
        spec = replace(_spec(), gpu=kind)
        if served:
            assert ops.chosen_for(spec, VARIANT.name) is VARIANT
        else:
            with pytest.raises(VariantRefused, match="wrong answer"):
                ops.chosen_for(spec, VARIANT.name)
