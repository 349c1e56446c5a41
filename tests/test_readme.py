"""The code blocks of the README and of the quick start run as they stand, hub ids replaced by tiny
models of those classes (on the CPU, where there is no GPU); commands and numbers in them are real.
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from models import saved

from sagepatch import cli
from sagepatch.errors import MachineError

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCKS = [
    pytest.param(code, id=f"{name}-{number}")
    for name, text in (("readme", TEXT), ("quickstart", QUICK_START))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), 1)
]
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


def test_two_commands_do_all_the_set_up() -> None:
    assert SHELL == [
        'pip install -e . && sagepatch run demo --prompt "a red apple"\n',
        'pip install -e ".[test]" && pytest\n',
    ]


@pytest.mark.parametrize("code", BLOCKS)
def test_code_blocks(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        code = code.replace(", dtype=torch.bfloat16)", ")").replace('pipe.to("cuda")\n', "")
        code = code.replace(', device_map="cuda"', "")
    if "FLUX" in code:
        model = saved.save_tiny_flux(tmp_path / "flux")
        code = code.replace("black-forest-labs/FLUX.1-schnell", str(model))
        # The size of a thumbnail instead of the model's own.
        code = code.replace("num_inference_steps=4", "num_inference_steps=4, height=32, width=32")
    if "Llama" in code:
        model = saved.save_tiny_llama(tmp_path / "llama")
        code = code.replace("meta-llama/Llama-2-7b-hf", str(model))
    exec(compile(code, "code block", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(
    "line", re.findall(r"^sagepatch (.*)$", TEXT, re.MULTILINE), ids=lambda line: line.split()[0]
)
def test_commands_take_these_options(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed to the end by the real command line; the work itself is left out."""
    words = shlex.split(line, comments=True)
    reached = []

    def stop(*given: object, **named: object) -> None:
        reached.append(given)
        raise MachineError("as far as this test goes")

    for command in (cli.run, cli.inspect, cli.calibrate):
        monkeypatch.setattr(command, "resolve", stop)
    monkeypatch.setattr(cli.explain, "read_spec", stop)
    assert cli.run_command(words) == 3
    assert len(reached) == 1


def test_who_has_a_gpu_uses_it() -> None:
    """A model that a block loads in FP32 or leaves on the CPU would stay exact."""
    lines = [line for text in (TEXT, QUICK_START) for line in text.split("\n")]
    loading = [number for number, line in enumerate(lines) if "from_pretrained" in line]
    pipelines = [number for number in loading if "FLUX" in lines[number]]
    assert len(pipelines) == 6  # one shows it without a GPU
    fast = [number for number in pipelines if "bfloat16" in lines[number]]
    assert len(fast) == 5
    assert all(lines[number + 1] == 'pipe.to("cuda")' for number in fast)


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_numbers_come_from_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = runpy.run_path(str(ROOT / "benchmarks" / "readme_tables.py"))
    for page in tables["TABLES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["filled"](page) == text, "run python benchmarks/readme_tables.py"
