"""Layers of one patch settled once, whichever of several threads comes first; knows no kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from sagepatch.layer import PatchedLayer

More = ParamSpec("More")


class Settling:
    """The lock under which open layers are settled, or given another observer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def only(
        self, act: Callable[Concatenate[PatchedLayer, More], None]
    ) -> Callable[Concatenate[PatchedLayer, More], None]:
        """`act` for layers that are open; one that was settled meanwhile stays as it is."""

        def acting(layer: PatchedLayer, /, *args: More.args, **more: More.kwargs) -> None:
            with self._lock:
                if layer.observer is not None:
                    act(layer, *args, **more)

        return acting
