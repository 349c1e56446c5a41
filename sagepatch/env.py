"""Facts about this machine: versions, GPUs, what is missing and what to do about it. Decides
nothing.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sagepatch.errors import MachineError

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "triton")
OLDEST_TORCH = (2, 11)


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

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine; nothing is imported or initialised beyond torch's device query."""
        versions = {name: installed(name) for name in PACKAGES}
        gpus = tuple(_gpus())
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            versions=versions,
            cuda=torch.version.cuda,
            gpus=gpus,
            problems=tuple(problems(versions, gpus, torch.version.cuda, sys.platform)),
        )

    @property
    def gpu_name(self) -> str:
        """Name of the first GPU, "CPU" without one."""
        return self.gpus[0].name if self.gpus else "CPU"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def installed(package: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problems(
    versions: dict[str, str | None], gpus: tuple[Gpu, ...], cuda: str | None, system: str
) -> list[str]:
    """What keeps quantised kernels from running here, a sentence each with cause and next step."""
    found = []
    torch_version = versions.get("torch")
    if torch_version is not None and _release(torch_version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        found.append(f"torch is {torch_version}, sagepatch needs {oldest} or newer: upgrade torch")
    if cuda is None:
        found.append("this torch is built without CUDA: install a CUDA build to use a GPU")
    elif not gpus:
        found.append("torch sees no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES")
    if versions.get("triton") is None:
        package = "triton-windows" if system == "win32" else "triton"
        found.append(
            f"triton is not installed, which the Triton kernels need: pip install {package}"
        )
    too_old = [gpu for gpu in gpus if gpu.arch < 80]
    found += [f"{gpu.name} is sm_{gpu.arch}; our kernels start at sm_80" for gpu in too_old]
    return found


def cache_dir() -> Path:
    """Where plans and check results are kept: SAGEPATCH_CACHE_DIR, else XDG's cache; mode 0700.

    Raises `MachineError` where the directory belongs to another user or cannot be made.
    """
    root = os.environ.get("SAGEPATCH_CACHE_DIR")
    if root is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = os.fspath(Path(base) / "sagepatch")
    path = Path(root)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise MachineError(
            f"the cache directory {path} cannot be used ({error.strerror}): "
            "set SAGEPATCH_CACHE_DIR to a writable one"
        ) from error
    if hasattr(os, "getuid") and owner != os.getuid():
        raise MachineError(
            f"the cache directory {path} belongs to user {owner}, not to you: "
            "set SAGEPATCH_CACHE_DIR to one of your own"
        )
    return path


def disabled() -> bool:
    """Whether SAGEPATCH_DISABLE switches sagepatch off."""
    return os.environ.get("SAGEPATCH_DISABLE", "") not in ("", "0")


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
