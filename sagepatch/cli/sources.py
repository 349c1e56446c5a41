"""Where a model comes from: a preset, a folder or a hub id becomes a `Source`. Loads nothing."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from sagepatch.cli.presets import PRESETS, Preset, Task
from sagepatch.errors import ModelError

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """A model by where it lies. `location` is a folder, a hub id, or "demo" for the bundled
    pipeline; `asked` is what the user wrote.
    """

    asked: str
    location: str
    preset: Preset | None = None

    @property
    def is_demo(self) -> bool:
        return self.location == DEMO

    @property
    def is_local(self) -> bool:
        return not self.is_demo and Path(self.location).is_dir()

    @property
    def task(self) -> Task | None:
        """What the model makes, None where only loading will tell."""
        if self.is_demo:
            return "image"
        return None if self.preset is None else self.preset.task

    @property
    def slug(self) -> str:
        """A short name for files."""
        name = self.preset.name if self.preset else Path(self.location).name or self.location
        return re.sub(r"[^\w.-]+", "-", name).strip("-") or "model"


def hub_location(hub_id: str) -> str:
    """Where a hub id is loaded from: the hub itself. The one place to map ids to mirrors."""
    return hub_id


def resolve(asked: str) -> Source:
    """Find what the user means; raises `ModelError` with the nearest names where nothing fits."""
    if not asked.strip():
        raise ModelError(f"no model was named: give {DEMO}, a preset, a folder or a hub id")
    if asked == DEMO:
        return Source(asked, DEMO)
    preset = PRESETS.get(asked)
    if preset is not None:
        return Source(asked, hub_location(preset.hub_id), preset)
    path = Path(asked).expanduser()
    if path.is_dir():
        return Source(asked, os.fspath(path))
    if path.exists():
        raise ModelError(f"{asked} is a file; give the folder of a pipeline or model")
    looks_like_path = asked.startswith((".", "/", "~", os.sep)) or asked.count("/") > 1
    if not looks_like_path and _HUB_ID.fullmatch(asked):
        return Source(asked, hub_location(asked))
    if looks_like_path:
        raise ModelError(f"there is no folder {asked}")
    near = difflib.get_close_matches(asked, [DEMO, *PRESETS], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(PRESETS)}"
    raise ModelError(f"no model {asked!r}: not a preset, a folder or a hub id (owner/name); {hint}")
