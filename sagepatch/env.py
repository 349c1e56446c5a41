"""Facts about this machine: versions, GPUs, what is missing and what to do about it. Decides
nothing.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import stat
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sagepatch.errors import MachineError

VERSION = "0.1.0"
# What a report names, with the distributions that bring it.
PACKAGES = {
    "torch": ("torch",),
    "diffusers": ("diffusers",),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "triton": ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm"),
}
# The oldest releases that the tests have seen.
OLDEST = {"torch": (2, 11), "diffusers": (0, 42), "transformers": (5, 17), "triton": (3, 6)}
WITHOUT = {
    "diffusers": "pipelines cannot be loaded",
    "transformers": "language models and text encoders cannot be loaded",
    "accelerate": "models cannot be offloaded",
    "triton": "the Triton kernels cannot run",
}
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device: its name, compute capability as an integer (90 for sm_90) and memory."""

    name: str
    arch: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a report or a bug report must name. `problems` are sentences: cause and next step."""

    system: str
    python: str
    versions: dict[str, str | None]
    cuda: str | None
    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...]
    driver: str | None = None

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine; nothing is imported or initialised beyond torch's device query."""
        versions = {name: installed(*names) for name, names in PACKAGES.items()}
        versions["sagepatch"] = VERSION
        gpus = tuple(_gpus())
        driver = nvidia_driver()
        told = problems(versions, gpus, torch.version.cuda, sys.platform, torch.version.hip, driver)
        if gpus and (compiler := compiler_wanted(versions["triton"])):
            told.append(compiler)
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            versions=versions,
            cuda=torch.version.cuda,
            gpus=gpus,
            problems=tuple(told),
            driver=driver,
        )

    @property
    def gpu_name(self) -> str:
        """Names of the GPUs, each kind once, "CPU" without one."""
        return " + ".join(dict.fromkeys(gpu.name for gpu in self.gpus)) or "CPU"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def installed(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed, None where none is."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver that is loaded, as Linux tells it; None elsewhere."""
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module[^\n]*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else None


def compiler_wanted(triton: str | None) -> str | None:
    """Triton up to 3.6 builds the launcher of each kernel with a C compiler; a sentence where there
    is none.
    """
    if triton is None or _release(triton) > (3, 6, 99) or sys.platform == "win32":
        return None
    named = os.environ.get("CC")
    if any(shutil.which(name) for name in ([named] if named else ["gcc", "clang", "cc"])):
        return None
    return (
        f"Triton {triton} builds its launchers with a C compiler and finds none "
        f"({named or 'gcc, clang'}), so the Triton kernels cannot run: install gcc, or set CC"
    )


def problems(
    versions: dict[str, str | None],
    gpus: tuple[Gpu, ...],
    cuda: str | None,
    system: str,
    hip: str | None = None,
    driver: str | None = None,
) -> list[str]:
    """What keeps quantised kernels from running here, a sentence each with cause and next step."""
    found = []
    for package, oldest in OLDEST.items():
        here = versions.get(package)
        if here is not None and _release(here) < oldest:
            needed = ".".join(map(str, oldest))
            found.append(
                f"{package} is {here}, sagepatch needs {needed} or newer: "
                f'pip install "{package}>={needed}"'
            )
    if hip is not None:
        found.append(
            f"this torch is built for ROCm {hip}, which no kernel of ours serves: "
            "layers run exact attention"
        )
    elif cuda is None:
        found.append("this torch is built without CUDA: install a CUDA build to use a GPU")
    elif not gpus:
        seen = f"driver {driver} is loaded" if driver else "no NVIDIA driver is loaded"
        found.append(
            f"torch sees no GPU ({seen}): check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    for package, lost in WITHOUT.items():
        if versions.get(package) is None:
            windows = package == "triton" and system == "win32"
            name = "triton-windows" if windows else package
            found.append(f"{package} is not installed, so {lost}: pip install {name}")
    too_old = [gpu for gpu in gpus if gpu.arch < 80 and hip is None]
    found += [
        f"{gpu.name} is sm_{gpu.arch}; our kernels start at sm_80: layers on it run exact attention"
        for gpu in too_old
    ]
    if len({gpu.arch for gpu in gpus}) > 1:
        listed = ", ".join(f"{gpu.name} (sm_{gpu.arch})" for gpu in gpus)
        found.append(
            f"the GPUs differ ({listed}): each call takes a kernel for its own GPU, "
            "and a plan holds for the whole set"
        )
    return found


def cache_dir() -> Path | None:
    """Where plans are kept: SAGEPATCH_CACHE_DIR, else XDG's cache; mode 0700. None where
    SAGEPATCH_CACHE_DIR is set to nothing, which switches keeping off.

    Raises `MachineError` where the directory cannot be made, or belongs to or can be written by
    others.
    """
    root = os.environ.get("SAGEPATCH_CACHE_DIR")
    if root == "":
        return None
    if root is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        root = os.path.join(base, "sagepatch")
    try:
        path = Path(root).expanduser()
    except RuntimeError as error:
        raise MachineError(
            f"the cache directory {root} has no place, as this user has no home directory: "
            "set SAGEPATCH_CACHE_DIR to a directory, or to nothing to keep no plans"
        ) from error
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.stat()
    except OSError as error:
        raise MachineError(
            f"the cache directory {path} cannot be used ({error.strerror}): "
            "set SAGEPATCH_CACHE_DIR to a writable one, or to nothing to keep no plans"
        ) from error
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        raise MachineError(
            f"the cache directory {path} belongs to user {facts.st_uid}, not to you: "
            "set SAGEPATCH_CACHE_DIR to one of your own"
        )
    if hasattr(os, "getuid") and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise MachineError(
            f"others may write to the cache directory {path}: chmod 700 it, "
            "or set SAGEPATCH_CACHE_DIR to another one"
        )
    return path


def set_log_level() -> None:
    """Follow SAGEPATCH_LOG (debug, info, warning, error; anything else: info) where it is set."""
    wanted = os.environ.get("SAGEPATCH_LOG", "")
    if not wanted:
        return
    ours = logging.getLogger("sagepatch")
    level = logging.getLevelNamesMapping().get(wanted.upper(), logging.INFO)
    ours.setLevel(level)
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())


def disabled() -> bool:
    """Whether SAGEPATCH_DISABLE switches sagepatch off."""
    said = os.environ.get("SAGEPATCH_DISABLE", "").strip().lower()
    return said not in ("", "0", "false", "no", "off")


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(Gpu(facts.name, facts.major * 10 + facts.minor, facts.total_memory))
    return found


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
