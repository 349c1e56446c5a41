"""The command line: one file per command, errors as one sentence and an exit code, never a
traceback.
"""

from __future__ import annotations

import os
import sys

import typer

from sagepatch.cli import bench, calibrate, explain, info, inspect, report, run
from sagepatch.cli.console import err
from sagepatch.errors import SagepatchError

app = typer.Typer(
    name="sagepatch",
    help="Quantised attention for diffusers and transformers models, layer by layer, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    run.run,
    inspect.inspect,
    calibrate.calibrate,
    report.report,
    explain.explain,
    bench.bench,
    info.info,
):
    app.command()(command)


def main() -> None:
    """Run the command line. Exit codes: 0 ok, 1 a fault of ours, 2 usage, 3 model, network, machine
    or nothing patched, 4 plan or variant refused. SAGEPATCH_LOG=debug shows tracebacks.
    """
    _configure_logging()
    try:
        app()
    except SagepatchError as error:
        _fail(str(error), error.exit_code, error)
    except KeyboardInterrupt:
        _fail("stopped", 130, None)
    except Exception as error:  # noqa: BLE001 - the last line of defence: one sentence, exit code 1
        _fail(f"{type(error).__name__}: {error} (a fault of sagepatch's)", 1, error)


def _fail(text: str, code: int, error: BaseException | None) -> None:
    err().print(f"sagepatch: {text}", style="red", highlight=False, markup=False)
    if error is not None and os.environ.get("SAGEPATCH_LOG", "").lower() == "debug":
        raise error
    sys.exit(code)


def _configure_logging() -> None:
    import logging

    level = os.environ.get("SAGEPATCH_LOG", "warning").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("sagepatch").setLevel(known.get(level, logging.WARNING))
