"""Every command has a page in docs/commands, and its options are those of the command."""

from __future__ import annotations

import re

import pytest
from cli.command_pages import BEGIN, END, FOLDER, names, options, page


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(names())
    index = (FOLDER.parent / "commands.md").read_text()
    assert re.findall(r"\(commands/(\w+)\.md\)", index) == names()


@pytest.mark.parametrize("name", names())
def test_a_page_tells_the_options_of_its_command(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == page(name), f"python tests/cli/command_pages.py {name}"


@pytest.mark.parametrize("name", names())
def test_options_that_a_page_speaks_of_exist(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    known = set(re.findall(r"--[\w-]+", "".join(map(options, names())))) | {"--help"}
    assert set(re.findall(r"`[^`]*?(--[a-z][\w-]*)", text)) <= known
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    own = set(re.findall(r"--[\w-]+", options(name)))
    assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", blocks)) <= own
    assert f"sagepatch {name}" in blocks
