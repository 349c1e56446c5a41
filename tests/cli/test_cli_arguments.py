"""What commands are told: numbers that say nothing and names of files that fit no picture are
refused before the work, and a fault of ours is a sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from sagepatch.cli import run_command
from sagepatch.cli.generation import Made
from sagepatch.cli.saving import save


@pytest.mark.parametrize("level", ["", "debug"], ids=["quiet", "debug"])
def test_a_fault_inside_a_command_shows_no_traceback_unasked(level: str) -> None:
    # typer puts a hook of its own where ours was.
    code = (
        "import sagepatch.cli as cli, sys\n"
        "def broken(*_): raise KeyError('left')\n"
        "cli.info.state = broken\n"
        "sys.argv = ['sagepatch', 'info']\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SAGEPATCH_LOG": level},
        check=False,
    )
    assert done.returncode == 1
    assert "unexpected KeyError: 'left' (a fault of ours" in done.stderr.replace("\n", " ")
    assert ("Traceback" in done.stderr) is bool(level)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "demo", "--prompt", "x", "--seed", "99999999999999999999"),
        ("run", "demo", "--prompt", "x", "--threshold", "nan"),
        ("calibrate", "demo", "--prompt", "x", "--threshold", "inf"),
        ("calibrate", "demo", "--prompt", "x", "--budget", "nan"),
        ("calibrate", "demo", "--prompt", "x", "--budget", "-1"),
    ],
    ids=lambda arguments: " ".join(arguments[4:]),
)
def test_numbers_that_say_nothing_are_refused_before_the_run(arguments, monkeypatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("it went on to load the model")

    monkeypatch.setattr("sagepatch.cli.run.load", loaded)
    monkeypatch.setattr("sagepatch.cli.calibrate.load", loaded)
    assert run_command(arguments) == 2


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (("inspect", ""), "no model was named", 3),
        (("run", "demo", "--prompt", "x", "--device", "meta"), "--device is 'meta'", 2),
        (("explain", "1x8x128x128x64", "--causal-offset", "5"), "needs --causal", 2),
        (("explain", "1x8x128x128x64", "--arch", "-5"), "--arch", 2),
    ],
    ids=["no name", "device", "offset", "arch"],
)
def test_what_commands_once_took_without_a_word(arguments, says: str, code: int, capsys) -> None:
    assert run_command(arguments) == code
    assert says in capsys.readouterr().err


def test_a_picture_is_not_drawn_for_a_text_file(monkeypatch, tmp_path, capsys) -> None:
    # Before, the picture was drawn and lost to a KeyError.
    monkeypatch.setattr("sagepatch.cli.run.compared", lambda *_: pytest.fail("it was drawn"))
    command = ("run", "demo", "--prompt", "x", "--out", str(tmp_path / "x.txt"))
    assert run_command(command) == 2
    assert "must end in" in capsys.readouterr().err


def test_a_video_that_the_format_cannot_hold_is_kept(tmp_path) -> None:
    frames = tuple(np.full((8, 8, 3), shade, np.uint8) for shade in (0, 200))
    kept = save([Made(frames=frames, is_video=True)], tmp_path / "clip.jpg")
    assert kept == tmp_path / "clip.webp"
    assert kept.stat().st_size > 0
