"""Writes docs/coverage-timm.md: one row a file of the installed timm that holds attention.

python tests/coverage/timm_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from timm_models import import_timm, module_classes  # noqa: E402
from transformers_page import short_reason  # noqa: E402
from transformers_walk import Verdict, verdict  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "coverage-timm.md"

_INTRO = """# What is reached in timm
Made by `python tests/coverage/timm_page.py` from timm {version}; a test fails when it is stale.
timm's attention calls torch's SDPA in its own forward; that one call of each patched instance is
redirected. `tests/coverage/test_timm.py` builds a model for most of these files and compares.

*softmax*: by hand; *own way*: neither a softmax nor SDPA; *fused*: `torch.nn.MultiheadAttention`.
Where timm's `fused_attn` is off (some classes unless
`timm.layers.set_fused_attn(True, experimental=True)`, or `TIMM_FUSED_ATTN=2`), a class that is
listed as reached computes its softmax by hand and is left, with that reason. Inputs that are not
4-dimensional (windows of SAM, Hiera and Twins) stay torch's own and are counted.

| file | reached | stays exact |
|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    by_file: dict[str, list[Verdict]] = {}
    for owner in module_classes():
        found = verdict(owner)
        if found is not None:
            by_file.setdefault(owner.__module__.removeprefix("timm."), []).append(found)
    rows = "".join(_row(file, found) for file, found in sorted(by_file.items()))
    return _INTRO.format(version=import_timm().__version__) + rows


def _row(file: str, found: list[Verdict]) -> str:
    reached = ", ".join(f"`{v.owner.__name__}`" for v in found if v.patcher is not None)
    return f"| {file} | {reached} | {', '.join(_left(found))} |\n"


def _left(found: list[Verdict]) -> Iterator[str]:
    for one in found:
        if one.reason is not None:
            yield f"`{one.owner.__name__}` ({short_reason(one)})"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
