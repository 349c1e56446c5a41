"""Facts about the machine, a sentence for each thing missing, and the environment's variables."""

from __future__ import annotations

import json
import logging
import os
import stat
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import sagepatch
from sagepatch import env
from sagepatch.env import Gpu, Machine, cache_dir, installed, nvidia_driver, problems, set_log_level
from sagepatch.errors import MachineError

FINE = {
    "torch": "2.13.0+cu130",
    "diffusers": "0.42.1",
    "transformers": "5.24.0.dev0",
    "accelerate": "1.15.0",
    "triton": "3.9.0",
}
H200 = Gpu("NVIDIA H200", 90, 150_000_000_000)
T4 = Gpu("Tesla T4", 75, 16_000_000_000)


def test_here_is_plain_data() -> None:
    here = Machine.here()
    assert json.loads(json.dumps(here.to_dict()))["python"] == here.python
    # Metadata may lack the local part of a version: 2.14.1 for 2.14.1+cu130.
    assert torch.__version__.startswith(here.versions["torch"])
    assert here.gpu_name == ("CPU" if not here.gpus else here.gpus[0].name)


def test_the_version_is_stated_once_and_the_same() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["version"] == sagepatch.__version__ == env.VERSION
    assert Machine.here().versions["sagepatch"] == env.VERSION


# cases 62, 63, 65
@pytest.mark.parametrize(
    ("changes", "facts", "said"),
    [
        ({"triton": None}, {}, ["triton is not installed, so the Triton kernels cannot run: pip"]),
        ({"triton": None}, {"system": "win32"}, ["pip install triton-windows"]),
        ({"diffusers": None}, {}, ["pipelines cannot be loaded: pip install diffusers"]),
        ({"torch": "2.9.1"}, {}, ['torch is 2.9.1, sagepatch needs 2.11 or newer: pip install "']),
        ({"triton": "3.2.0"}, {}, ["triton is 3.2.0, sagepatch needs 3.6"]),
        ({"transformers": "4.57.1"}, {}, ["transformers is 4.57.1, sagepatch needs 5.17"]),
        ({}, {"gpus": ()}, ["sees no GPU (no NVIDIA driver is loaded)"]),
        ({}, {"gpus": (), "driver": "580.1"}, ["sees no GPU (driver 580.1 is loaded)"]),
        ({}, {"gpus": (), "cuda": None}, ["built without CUDA"]),
        ({}, {"cuda": None, "hip": "7.0"}, ["built for ROCm 7.0"]),
        ({}, {"gpus": (T4,)}, ["Tesla T4 is sm_75; our kernels start at sm_80"]),
        ({}, {"gpus": (H200, T4)}, ["Tesla T4 is sm_75", "the GPUs differ"]),
        ({}, {}, []),
    ],
    ids=lambda x: str(x)[:40],
)
def test_each_state_has_its_own_sentence(changes, facts, said) -> None:
    given = {"gpus": (H200,), "cuda": "13.0", "system": "linux", **facts}
    found = problems({**FINE, **changes}, **given)
    assert len(found) == len(said)
    for sentence, wanted in zip(found, said, strict=True):
        assert wanted in sentence


# case 56
def test_a_mixed_host_is_named_whole() -> None:
    here = Machine("Linux", "3.12", {}, "13.0", (H200, T4, H200), ())
    assert here.gpu_name == "NVIDIA H200 + Tesla T4"


def test_the_first_installed_distribution_counts() -> None:
    assert installed("no-such-distribution", "torch") == version("torch")
    assert installed("no-such-distribution") is None


def test_the_driver_is_read_where_linux_tells_it(tmp_path: Path, monkeypatch) -> None:
    told = tmp_path / "version"
    monkeypatch.setattr(env, "DRIVER_FILE", told)
    assert nvidia_driver() is None
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5 2024\n")
    assert nvidia_driver() == "550.54.15"
    told.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    assert nvidia_driver() == "580.95.05"
    told.write_text("something else\n")
    assert nvidia_driver() is None


class TestCacheDirectory:
    """Private, one's own, or refused in a sentence."""

    def test_is_made_private_in_the_place_that_is_named(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "a" / "b"))
        made = cache_dir()
        assert made == tmp_path / "a" / "b"
        assert stat.S_IMODE(made.stat().st_mode) == 0o700

    def test_follows_xdg(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.delenv("SAGEPATCH_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_dir() == tmp_path / "sagepatch"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_dir() == tmp_path / "home" / ".cache" / "sagepatch"

    def test_set_to_nothing_there_is_none(self, monkeypatch) -> None:
        monkeypatch.setenv("SAGEPATCH_CACHE_DIR", "")
        assert cache_dir() is None

    def test_of_another_user_is_refused(self, monkeypatch) -> None:
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        with pytest.raises(MachineError, match=f"belongs to user {own}, not to you"):
            cache_dir()

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777], ids=oct)
    def test_that_others_can_write_is_refused(self, tmp_path, monkeypatch, mode: int) -> None:
        monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "open"))
        made = cache_dir()
        made.chmod(mode)
        with pytest.raises(MachineError, match="chmod 700"):
            cache_dir()

    def test_that_cannot_be_made_is_a_sentence(self, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
        with pytest.raises(MachineError, match="cannot be used"):
            cache_dir()


@pytest.mark.parametrize(
    ("wanted", "level"),
    [("debug", logging.DEBUG), ("ERROR", logging.ERROR), ("1", logging.INFO), ("", logging.NOTSET)],
)
def test_the_log_level_follows_its_variable(monkeypatch, wanted: str, level: int) -> None:
    ours = logging.getLogger("sagepatch")
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setenv("SAGEPATCH_LOG", wanted)
    set_log_level()
    assert ours.level == level


@pytest.mark.parametrize(
    ("value", "off"),
    [("1", True), ("yes", True), ("0", False), ("", False), ("false", False), ("No ", False)],
)
def test_the_switch(monkeypatch, value: str, off: bool) -> None:
    monkeypatch.setenv("SAGEPATCH_DISABLE", value)
    assert env.disabled() is off


@pytest.mark.parametrize(
    ("triton", "found", "cc", "wanted"),
    [
        ("3.6.0", set(), None, True),
        ("3.6.0", {"gcc"}, None, False),
        ("3.6.0", {"clang"}, None, False),
        ("3.6.0", {"gcc"}, "/opt/cc", True),
        ("3.6.0", {"/opt/cc"}, "/opt/cc", False),
        ("3.9.0", set(), None, False),
        (None, set(), None, False),
    ],
)
def test_an_old_triton_wants_a_c_compiler(monkeypatch, triton, found, cc, wanted) -> None:
    monkeypatch.setattr(env.shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(env.sys, "platform", "linux")
    if cc is None:
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", cc)
    told = env.compiler_wanted(triton)
    assert (told is not None) == wanted
    assert not wanted or "install gcc" in told
