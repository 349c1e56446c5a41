"""Tiny models on disk, hub ids mapped to them, and a way to run one command line in-process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from models.saved import save_tiny_flux, save_tiny_llama, save_tiny_wan

from sagepatch.cli import run_command, sources


@dataclass(frozen=True)
class Ended:
    """What a command line left: its exit code and both streams."""

    code: int
    out: str
    err: str


Sage = Callable[..., Ended]


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Hub ids to folders; fill it in a test."""
    places: dict[str, str] = {}
    monkeypatch.setattr(sources, "hub_location", lambda hub_id: places.get(hub_id, hub_id))
    return places


@pytest.fixture
def flux_from_hub(hub: dict[str, str], tiny_flux: Path) -> None:
    hub["black-forest-labs/FLUX.1-schnell"] = os.fspath(tiny_flux)


@pytest.fixture
def sage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sage:
    """Run `sagepatch ARGUMENTS` in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def ended(*arguments: object) -> Ended:
        capsys.readouterr()
        code = run_command([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        return Ended(code, streams.out, streams.err)

    return ended
