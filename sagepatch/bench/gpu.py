"""What a GPU is and how it ran: clocks, power and temperature while kernels are timed, as
nvidia-smi tells them. Nothing that tells one card of a kind from another.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import torch

PATIENCE_S = 10.0
FACTS = ("driver_version", "power.limit", "clocks.max.sm")
RUNNING = ("clocks.sm", "power.draw", "temperature.gpu")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU. What nvidia-smi would have to tell is None where there is none."""

    name: str
    arch: int
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    driver: str | None
    power_limit_w: float | None
    max_clock_mhz: float | None

    @classmethod
    def of(cls, device: torch.device) -> GpuFacts:
        """Look at a CUDA device."""
        facts = torch.cuda.get_device_properties(device)
        driver, power, clock = _fields(_ask(device, FACTS), len(FACTS))
        return cls(
            facts.name,
            facts.major * 10 + facts.minor,
            facts.multi_processor_count,
            facts.total_memory,
            facts.L2_cache_size,
            driver,
            _number(power),
            _number(clock),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How a GPU ran at one moment of the timing."""

    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None


class Watch:
    """Asks for clock, power and temperature in a process beside; `read` waits for the answer."""

    def __init__(self, device: torch.device) -> None:
        self._asked = _ask(device, RUNNING)

    def read(self) -> Load:
        """What the GPU was doing when asked."""
        clock, power, temperature = _fields(self._asked, len(RUNNING))
        return Load(_number(clock), _number(power), _number(temperature))


def _ask(device: torch.device, names: tuple[str, ...]) -> subprocess.Popen[str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None or device.type != "cuda":
        return None
    # By its id, as CUDA's numbers follow CUDA_VISIBLE_DEVICES and nvidia-smi's do not.
    unit = torch.cuda.get_device_properties(device).uuid
    wanted = f"--query-gpu={','.join(names)}"
    try:
        return subprocess.Popen(
            [tool, f"--id=GPU-{unit}", wanted, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None


def _fields(asked: subprocess.Popen[str] | None, count: int) -> list[str | None]:
    """The values of one line, None for each where there is no such line."""
    nothing: list[str | None] = [None] * count
    if asked is None:
        return nothing
    try:
        text, _ = asked.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return nothing
    found: list[str | None] = [part.strip() for part in text.strip().split(",")]
    return found if asked.returncode == 0 and len(found) == count else nothing


def _number(text: str | None) -> float | None:
    """A number, None for "[N/A]" and the like."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
