"""Presets name real models: each hub id stands in the installed libraries' own sources."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from sagepatch.cli.presets import PRESETS
from sagepatch.cli.sources import resolve


@cache
def _sources() -> str:
    texts = []
    for library in ("diffusers", "transformers"):
        spec = find_spec(library)
        assert spec is not None
        assert spec.origin is not None
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "/" in text:
                texts.append(text)
    return "\n".join(texts)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_the_hub_id_is_one_that_the_libraries_name(preset) -> None:  # type: ignore[no-untyped-def]
    assert preset.hub_id in _sources()


def test_flux_is_schnell_and_dev_is_gated() -> None:
    assert PRESETS["flux"].hub_id == "black-forest-labs/FLUX.1-schnell"
    assert not PRESETS["flux"].gated
    assert PRESETS["flux-dev"].gated


def test_a_folder_wins_over_a_hub_id_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert resolve("owner/model").is_local
    assert not resolve("owner/other").is_local
