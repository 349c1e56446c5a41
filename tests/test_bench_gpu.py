"""What the bench reads of a GPU: nvidia-smi's answers, by a program that stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sagepatch.bench import gpu

CPU = torch.device("cpu")


class TestSmi:
    """nvidia-smi's answers, by a program that stands for it."""

    @pytest.mark.parametrize(
        ("said", "found"),
        [
            ("2520, 431.2, 61", (2520.0, 431.2, 61.0)),
            ("2520, [N/A], 61", (2520.0, None, 61.0)),
            ("No devices were found", (None, None, None)),
        ],
    )
    def test_what_it_says(
        self,
        said: str,
        found: tuple[float | None, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{said}'\n")
        tool.chmod(0o755)
        properties = type("P", (), {"uuid": "0"})
        monkeypatch.setattr(gpu.shutil, "which", lambda name: str(tool))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        assert gpu.Watch(torch.device("cuda", 0)).read() == gpu.Load(*found)

    def test_where_there_is_none(self) -> None:
        assert gpu.Watch(CPU).read() == gpu.Load(None, None, None)
