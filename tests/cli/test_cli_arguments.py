"""What commands are told: numbers that say nothing and names of files that fit no picture are
refused before the work, and a fault of ours is a sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from cli.conftest import Sage
from report.tables import table

import sagepatch
from sagepatch.cli import COMMANDS, app, run_command
from sagepatch.cli.generation import Made
from sagepatch.cli.run import took
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
        (("explain", "1x8x128x128x64", "--packed", "--mask", "bool"), "no mask", 2),
        (("explain", "2x8x128x128x64", "--packed"), "has batch 1", 2),
        (("explain", "1x8x128x128x64", "--window", "9" * 20), "64 bits", 2),
        (("explain", "1x8x1x1x64", "--causal", "--causal-offset", "-" + "9" * 20), "64 bits", 2),
        (("run", "demo", "--prompt", "caf\udce9"), "bytes that are no text", 2),
        (("calibrate", "demo", "--prompt", "x", "--time-us", "9"), "only a GPU gives", 3),
        (("calibrate", "demo", "--prompt", "x", "--tokens", "9"), "is for language models", 2),
        (("run", "wan", "--prompt", "x", "--tokens", "9"), "is for language models", 2),
        (("report", "x.json", "--out", "x.pdf"), "--out x.pdf must end in", 2),
    ],
    ids=lambda value: (
        " ".join(value[1:]).encode("ascii", "replace").decode() if isinstance(value, tuple) else ""
    ),
)
def test_what_commands_once_took_without_a_word(arguments, says: str, code: int, capsys) -> None:
    assert run_command(arguments) == code
    assert says in capsys.readouterr().err


def test_a_folder_of_a_pipeline_takes_no_tokens(sage: Sage, tiny_flux: Path) -> None:
    ended = sage("run", tiny_flux, "--prompt", "x", "--tokens", 9)
    assert ended.code == 2
    assert "FluxPipeline writes no text" in ended.err


@pytest.mark.parametrize(
    ("seconds", "measured", "emulated", "says"),
    [
        ([4.0], False, False, "Took 4.0 s."),
        ([4.0], True, False, "Took 4.0 s (calibrating too)."),
        ([4.0, 3.0], True, False, "Took 4.0 s exact (calibrating too), 3.0 s quantised."),
        ([4.0, 5.0], False, True, "4.0 s exact, 5.0 s emulated, which says nothing of speed."),
    ],
)
def test_times_say_what_they_are_of(seconds, measured, emulated, says: str) -> None:
    assert took(seconds, measured, emulated).endswith(says)


def test_the_version(capsys) -> None:
    assert run_command(("--version",)) == 0
    assert capsys.readouterr().out == f"sagepatch {sagepatch.__version__}\n"


@pytest.mark.parametrize("command", ["", *(one.__name__ for one in COMMANDS)])
def test_help_breaks_no_paragraph_and_types_no_flag(command: str, capsys) -> None:
    assert run_command((*command.split(), "--help")) == 0
    assert "<bool>" not in capsys.readouterr().out
    known = typer.main.get_command(app)
    told = known if not command else known.commands[command]
    assert all("\n" not in paragraph for paragraph in told.help.split("\n\n"))


def test_a_picture_is_not_drawn_for_a_text_file(monkeypatch, tmp_path, capsys) -> None:
    # Before, the picture was drawn and lost to a KeyError.
    monkeypatch.setattr("sagepatch.cli.run.compared", lambda *_: pytest.fail("it was drawn"))
    command = ("run", "demo", "--prompt", "x", "--out", str(tmp_path / "x.txt"))
    assert run_command(command) == 2
    assert "must end in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "both"),
    [
        ("run demo --prompt x --report a.png --out a.png", "--out and --report"),
        ("run demo --prompt x --report sagepatch-demo.png", "--out and --report"),
        ("run demo --prompt x --plan p.json --report ./p.json", "--plan and --report"),
        ("calibrate demo --prompt x --out a.json --table a.json", "--out and --table"),
        ("calibrate demo --prompts p.json --out p.json", "--prompts and --out"),
        ("report r.json --against p.json --out p.json", "--against and --out"),
    ],
)
def test_one_file_is_not_written_over_another(
    command: str, both: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    table(1).plan(0.998).save("p.json")
    before = (tmp_path / "p.json").read_bytes()
    assert run_command(command.split()) == 2
    assert f"{both} are one file" in capsys.readouterr().err
    assert (tmp_path / "p.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), True),
        (("--variant", "emulated.sage2_8", "--no-emulate"), True),
        (("--variant", "exact"), False),
        (("--variant", "triton.sage2_8"), False),
        (("--no-emulate",), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_emulation_is_told_where_a_layer_may_be_emulated(
    options, said: bool, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for ending in ("compared", "single"):
        monkeypatch.setattr(f"sagepatch.cli.run.{ending}", lambda *_: None)
    assert run_command(("run", "demo", "--prompt", "a cat", *options)) == 0
    assert ("Emulated kernels" in capsys.readouterr().err) is said


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
    ids=["python", "torch"],
)
def test_too_little_memory_is_no_fault_of_ours(error: Exception, monkeypatch, capsys) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("sagepatch.cli.info.state", fails)
    assert run_command(("info",)) == 3
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="a shell closes the output")
@pytest.mark.parametrize("arguments", ["info", "info --json"])
def test_a_closed_output_is_no_fault(arguments: str) -> None:
    code = f"import sys; sys.argv[1:] = {arguments.split()}; from sagepatch.cli import main; main()"
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_lacks_a_character_shows_another() -> None:
    code = (
        "import sys, sagepatch.cli as cli\n"
        "cli.info.state = lambda *_: 'bar \\u2588 caf\\u00e9'\n"
        "sys.argv[1:] = ['info']\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"bar ? caf?" in done.stdout


def test_a_video_that_the_format_cannot_hold_is_kept(tmp_path) -> None:
    frames = tuple(np.full((8, 8, 3), shade, np.uint8) for shade in (0, 200))
    kept = save([Made(frames=frames, is_video=True)], tmp_path / "clip.jpg")
    assert kept == tmp_path / "clip.webp"
    assert kept.stat().st_size > 0
