"""The README's code blocks run as they stand, hub ids replaced by tiny models of those classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from models import saved

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def test_two_commands_do_all_the_set_up() -> None:
    assert SHELL == [
        'pip install -e . && sagepatch run demo --prompt "a red apple"\n',
        'pip install -e ".[test]" && pytest\n',
    ]


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_code_blocks(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = PYTHON[index]
    if "FLUX" in code:
        model = saved.save_tiny_flux(tmp_path / "flux")
        code = code.replace("black-forest-labs/FLUX.1-schnell", str(model))
        # The size of a thumbnail instead of the model's own.
        code = code.replace("num_inference_steps=4", "num_inference_steps=4, height=32, width=32")
    if "Llama" in code:
        model = saved.save_tiny_llama(tmp_path / "llama")
        code = code.replace("meta-llama/Llama-2-7b-hf", str(model))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        exec(compile(code, f"README block {index}", "exec"), {"__name__": "readme"})
    finally:
        torch.set_num_threads(before)


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_numbers_come_from_the_table_they_name() -> None:
    rows = (ROOT / "benchmarks" / "demo_recipes.csv").read_text(encoding="utf-8").splitlines()
    names = rows[0].split(",")
    measured = {}
    for row in rows[1:]:
        cells = row.split(",")
        measured[cells[0]] = (cells[names.index("psnr_db_worst")], cells[names.index("ssim_worst")])
    shown = re.findall(r"^\| `(\w+)` \| \w+ \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
    assert len(shown) >= 6
    assert all(measured[name] == (psnr, ssim) for name, psnr, ssim in shown)
