"""The command line: one file per command, errors as one sentence and an exit code."""

from __future__ import annotations

import inspect as signatures
import io
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Abort, TyperException

import sagepatch
from sagepatch.cli import bench, build, calibrate, explain, info, inspect, report, run
from sagepatch.cli.console import LOG_VARIABLE, CutOffError, say, set_up_logging, tell
from sagepatch.errors import SagepatchError

INTERRUPTED = 130
# Of a reader that had enough, as `head` has: 128 and the number of SIGPIPE, as of any other tool.
CUT_OFF = 141
OUT_OF_MEMORY = "out of memory: try fewer pixels, frames or tokens, or a smaller model"


class _Untyped:
    """Flags in --help without the type that each of them has, <bool>."""

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for one in found:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return found


class _Group(_Untyped, TyperGroup):
    """All commands."""


class _Command(_Untyped, TyperCommand):
    """One command."""


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    run.run,
    inspect.inspect,
    calibrate.calibrate,
    report.report,
    explain.explain,
    bench.bench,
    build.build,
    info.info,
)


def _flowing(text: str | None) -> str:
    """A docstring whose paragraphs are a line each, for terminals of any width."""
    paragraphs = signatures.cleandoc(text or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


for command in COMMANDS:
    app.command(cls=_Command, help=_flowing(command.__doc__))(command)


def _version(wanted: bool) -> None:
    if wanted:
        tell(f"sagepatch {sagepatch.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Quantised attention for diffusers pipelines and transformers models, with proof."""


def main() -> None:
    """The entry point `sagepatch`."""
    _open_output()
    try:
        code = run_command(sys.argv[1:])
    finally:
        # Not before: typer puts a hook of its own there, which prints tracebacks.
        sys.excepthook = _unexpected
    raise SystemExit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code. Only a bug of ours raises."""
    set_up_logging()
    try:
        code = app(list(arguments), prog_name="sagepatch", standalone_mode=False)
    except CutOffError:
        return _cut_off()
    except SagepatchError as error:
        return _fail(str(error), error.exit_code)
    except TyperException as error:
        text = error.format_message()  # empty where the help was printed instead
        return _fail(text, 2) if text else 2
    except torch.OutOfMemoryError:
        return _fail("out of GPU memory: try --offload model, or fewer pixels, frames or tokens", 3)
    except MemoryError:
        return _fail(OUT_OF_MEMORY, 3)
    except RuntimeError as error:
        # On a CPU torch has no class of its own for it.
        if "DefaultCPUAllocator" not in str(error):
            raise
        return _fail(OUT_OF_MEMORY, 3)
    except OSError as error:
        return _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 3)
    except (KeyboardInterrupt, Abort):
        return _fail("interrupted", INTERRUPTED)
    if code == INTERRUPTED:  # typer has met the KeyboardInterrupt first
        return _fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _open_output() -> None:
    """Results go somewhere even where standard output is closed, and a terminal that lacks a
    character shows another one.
    """
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _fail(sentence: str, code: int) -> int:
    say(f"sagepatch: {sentence}", style="red")
    return code


def _cut_off() -> int:
    """Nobody reads the results any more: no more are written, Python's last flush included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return CUT_OFF


def _unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The last resort, for faults of our own; Python exits with 1 after it."""
    import traceback

    if os.environ.get(LOG_VARIABLE):
        traceback.print_exception(kind, error, trace)
    say(
        f"sagepatch: unexpected {kind.__name__}: {error} (a fault of ours; "
        f"{LOG_VARIABLE}=debug shows where)",
        style="red",
    )
