"""`sagepatch calibrate`: prompts from a file, a table to go on from, kernels by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Sage

SMALL = ("--steps", 3, "--width", 16, "--height", 16, "--emulate")

pytestmark = pytest.mark.usefixtures("flux_from_hub")


def test_prompts_come_from_a_file_too(sage: Sage) -> None:
    Path("prompts.txt").write_text("a cat\n\n  a dog  \n")
    made = sage("calibrate", "flux", "--prompt", "a cow", "--prompts", "prompts.txt", *SMALL)
    assert made.code == 0, made.err
    assert "prompt 3 of 3" in made.err
    assert "Measuring took" in made.err + made.out
    assert json.loads(Path("plan.json").read_text())["schema"] == 3


def test_a_table_is_kept_and_gone_on_from(sage: Sage) -> None:
    wanted = ("calibrate", "flux", *SMALL, "--table", "t.json")
    assert sage(*wanted, "--prompt", "a cat").code == 0
    table = json.loads(Path("t.json").read_text())
    assert len(table["runs"]) == 1
    again = sage(*wanted, "--prompt", "a cat", "--budget", 0)
    assert again.code == 0, again.err
    # Solved anew for another bound, without another generation.
    assert "calibrating on prompt" not in again.err
    assert "0 fast, 0 safe, 4 exact" in again.out
    assert json.loads(Path("t.json").read_text()) == table
    more = sage(*wanted, "--prompt", "a cat", "--prompt", "a dog")
    assert "calibrating on prompt 2 of 2" in more.err
    assert len(json.loads(Path("t.json").read_text())["runs"]) == 2


def test_what_cannot_be_is_a_sentence(sage: Sage) -> None:
    wanted = ("calibrate", "flux", *SMALL)
    nothing = sage(*wanted)
    assert (nothing.code, "give --prompt, or --prompts" in nothing.err) == (2, True)
    absent = sage(*wanted, "--prompts", "absent.txt")
    assert (absent.code, "cannot read the prompts absent.txt" in absent.err) == (3, True)
    Path("empty.txt").write_text("\n \n")
    empty = sage(*wanted, "--prompts", "empty.txt")
    assert (empty.code, "empty.txt holds no prompt" in empty.err) == (2, True)
    Path("picture.txt").write_bytes(b"\x89PNG\xff\xfe")
    assert "picture.txt is no text file" in sage(*wanted, "--prompts", "picture.txt").err
    Path("t.json").write_text("{}")
    other = sage(*wanted, "--prompt", "a", "--table", "t.json")
    assert (other.code, "no table of measurements" in other.err) == (4, True)
    odd = sage(*wanted, "--prompt", "a", "--table", "t.txt")
    assert (odd.code, "--table t.txt must end in .json" in odd.err) == (2, True)


def test_one_kernel_throughout_on_request(sage: Sage) -> None:
    assert sage("calibrate", "flux", *SMALL, "--prompt", "a", "--one-kernel").code == 0
    plan = json.loads(Path("plan.json").read_text())
    assert all(entry["ranges"] == [] for entry in plan["entries"])
    assert all(entry["q_outlier"] > 1 for entry in plan["entries"])
