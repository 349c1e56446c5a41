"""Compiled kernels on disk: made once, checked at every reading, made anew when one is wrong."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from forked import in_a_child

pytest.importorskip("cuda.bindings.nvrtc")

from sagepatch.backends.cuda import build, cache
from sagepatch.backends.cuda.build import Program

if build.nvrtc_version() is None:
    pytest.skip("no NVRTC here", allow_module_level=True)

ONE = 'extern "C" __global__ void one(float* a) { a[threadIdx.x] = VALUE; }'


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A small program, and a cache directory of its own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cu").write_text(ONE)
    monkeypatch.setattr(build, "FOLDER", sources)
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "kept"))
    return Program("one.cu", (("VALUE", 1),))


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were really compiled."""
    seen = []
    real = build.compile_program

    def counting(program):
        seen.append(program)
        return real(program)

    monkeypatch.setattr(cache, "compile_program", counting)
    return seen


def _entries(tmp_path):
    return sorted((tmp_path / "kept/kernels").glob("*.cubin"))


def test_a_program_is_compiled_once_and_then_read(program, compiled, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "sagepatch.compile"):
        first = cache.kept(program)
        second = cache.kept(program)
    assert first == second
    assert len(compiled) == 1
    assert caplog.messages == ["compiling one.cu for sm_90a (once)"]
    (entry,) = _entries(tmp_path)
    assert entry.name.startswith("one-sm_90a-")
    assert entry.stat().st_mode & 0o777 == 0o600
    assert not list(entry.parent.glob("*.new"))
    header = json.loads(entry.read_bytes().split(b"\n", 1)[0])
    assert header["arguments"][-1] == "-DVALUE=1"
    cache.kept(Program("one.cu", (("VALUE", 2),)))
    assert len(_entries(tmp_path)) == 2


def _cut(entry):
    entry.write_bytes(entry.read_bytes()[:-7])


def _flip(entry):
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes(data)


def _no_header(entry):
    entry.write_bytes(entry.read_bytes().split(b"\n", 1)[1])


def _empty(entry):
    entry.write_bytes(b"")


def _other_key(entry):
    line, body = entry.read_bytes().split(b"\n", 1)
    header = json.loads(line)
    header["key"] = "0" * 64
    entry.write_bytes(json.dumps(header).encode() + b"\n" + body)


def _list_header(entry):
    entry.write_bytes(b"[1]\n" + entry.read_bytes().split(b"\n", 1)[1])


def _group_writes(entry):
    entry.chmod(0o660)


def _link(entry):
    copy = entry.with_suffix(".copy")
    entry.rename(copy)
    entry.symlink_to(copy)


@pytest.mark.parametrize(
    "harm", [_cut, _flip, _no_header, _empty, _other_key, _list_header, _group_writes, _link]
)
def test_a_harmed_entry_is_made_anew_and_never_returned(program, compiled, tmp_path, caplog, harm):
    good = cache.kept(program)
    (entry,) = _entries(tmp_path)
    harm(entry)
    caplog.clear()
    assert cache.kept(program) == good
    assert len(compiled) == 2
    assert "anew" in caplog.text
    (entry,) = _entries(tmp_path)
    assert not entry.is_symlink()
    caplog.clear()
    assert cache.kept(program) == good
    assert len(compiled) == 2
    assert not caplog.text


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users here")
def test_an_entry_of_another_user_is_not_read(program, compiled, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "own"
    folder.mkdir()
    cache.kept(program, folder=folder)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    cache.kept(program, folder=folder)
    assert len(compiled) == 2
    assert "belongs to user" in caplog.text


def test_keeping_can_be_switched_off(program, compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", "")
    assert cache.kept(program) == cache.kept(program)
    assert len(compiled) == 2
    assert not (tmp_path / "kept").exists()


def test_a_directory_that_cannot_be_used_costs_time_only(program, compiled, monkeypatch, caplog):
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", "/proc/nothing")
    assert cache.kept(program).kernels == ("one",)
    assert "not kept" in caplog.text


def test_a_full_disk_costs_time_only(program, compiled, tmp_path, monkeypatch, caplog):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cache.kept(program).kernels == ("one",)
    assert "not kept" in caplog.text
    assert not list((tmp_path / "kept/kernels").glob("*.new"))


def test_threads_compile_one_program_once(program, compiled):
    threads = [threading.Thread(target=cache.kept, args=(program,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


# Once wrong: the child waited for a thread that it does not have, and held the parent's file lock.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_forked_while_a_thread_compiles_can_compile(program, compiled, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    real = cache.compile_program

    def slow(program):
        inside.set()
        go_on.wait(30)
        return real(program)

    monkeypatch.setattr(cache, "compile_program", slow)
    thread = threading.Thread(target=cache.kept, args=(program,))
    thread.start()
    inside.wait(30)
    # The thread ends its work only after the fork.
    threading.Timer(0.5, go_on.set).start()
    try:
        assert in_a_child(lambda: go_on.set() or cache.kept(program).kernels == ("one",))
    finally:
        go_on.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_forked_inside_the_lock_of_locks_can_go_on(program, compiled):
    with cache._LOCKS_LOCK:
        assert in_a_child(lambda: cache.kept(program).kernels == ("one",))


def test_processes_compile_one_program_once(program, tmp_path):
    code = f"""
import pathlib
from sagepatch.backends.cuda import build, cache
build.FOLDER = pathlib.Path({str(build.FOLDER)!r})
real = build.compile_program
def counting(program):
    with open({str(tmp_path / "count")!r}, "a") as file:
        file.write("x")
    return real(program)
cache.compile_program = counting
cache.kept(build.Program("one.cu", (("VALUE", 1),)))
"""
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "x"


def test_a_lock_held_elsewhere_is_waited_for(program, compiled, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "own"
    folder.mkdir()
    cache.kept(program, folder=folder)
    (entry,) = folder.glob("*.cubin")
    entry.unlink()
    with open(entry.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=cache.kept, args=(program,), kwargs={"folder": folder})
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        assert len(compiled) == 1
    waiting.join(timeout=60)
    assert len(compiled) == 2
