"""The pages of docs/commands: options as the commands themselves tell them. Run it to write them
anew; everything else on a page is written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from sagepatch.cli import app

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "commands"
BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"


def names() -> list[str]:
    """Every command, in the order of --help."""
    return list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(name: str) -> str:
    """What a command takes, as a table."""
    rows = ["| option | does | default |", "|---|---|---|"]
    for one in typer.main.get_command(app).commands[name].params:  # type: ignore[attr-defined]
        if one.param_type_name == "argument":
            spelled, default = one.name.upper(), "" if one.required else str(one.default or "")
        else:
            spelled = " / ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))
            # A default that help tells in words is there already.
            default = "" if one.default in (None, False, ()) else f"`{one.default}`"
            default = (
                (one.opts[0] if one.secondary_opts else "on") if one.default is True else default
            )
        rows.append(f"| {spelled} | {(one.help or '').replace('|', '/')} | {default} |")
    return "\n".join(rows) + "\n"


def page(name: str) -> str:
    """The page of a command with its options as they are now."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{options(name)}{END}{after}"


if __name__ == "__main__":
    for command in sys.argv[1:] or names():
        (FOLDER / f"{command}.md").write_text(page(command), encoding="utf-8")
