"""The two consoles, the progress bars, and quiet libraries. Knows nothing of models."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Step = Callable[[int, int], None]
LOG_VARIABLE = "SAGEPATCH_LOG"
PIPED_WIDTH = 140


class CutOffError(Exception):
    """Nobody reads standard output any more."""


def out() -> Console:
    """Results: standard output, wide enough for a table where it is no terminal."""
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            # rich would leave with the code of a fault.
            raise CutOffError

    return Results(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def err() -> Console:
    """Progress and remarks: standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """Print one remark to standard error; square brackets in it mean themselves."""
    from rich.text import Text

    err().print(Text(text, style=style or ""), soft_wrap=True)


def tell(text: str, style: str | None = None) -> None:
    """Print one line of results to standard output."""
    from rich.text import Text

    out().print(Text(text, style=style or ""), soft_wrap=True)


def table(*columns: str) -> Table:
    """A plain table; add rows of strings or `rich.text.Text` and print it with `out()`."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_json(value: object) -> None:
    """One JSON document on standard output, nothing else with it."""
    try:
        sys.stdout.write(json.dumps(value, indent=1) + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        # typer would leave with the code of a fault.
        raise CutOffError from error


@contextmanager
def progress(title: str) -> Iterator[Step]:
    """A bar on standard error while the block runs; call what it yields with (done, of)."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err()) as bar:
        task = bar.add_task(title, total=1)

        def step(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        yield step
        total = bar.tasks[0].total
        bar.update(task, completed=total)


def set_up_logging() -> None:
    """Show sagepatch's own warnings; SAGEPATCH_LOG names another level and shows everyone's."""
    level = os.environ.get(LOG_VARIABLE, "").upper()
    if level:
        logging.basicConfig(level=logging.getLevelNamesMapping().get(level, logging.INFO))
        return
    ours = logging.getLogger("sagepatch")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        ours.addHandler(handler)
        # A kernel that is compiled for the first time keeps a user waiting: say so.
        logging.getLogger("sagepatch.compile").setLevel(logging.INFO)


def quiet_libraries() -> None:
    """Silence the chatter of the model libraries unless SAGEPATCH_LOG is set."""
    if os.environ.get(LOG_VARIABLE):
        return
    from diffusers.utils import logging as diffusers_logging
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
