"""Files that a run leaves: checked before the work, written after it, never lost on the way."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sagepatch.cli.generation import DEFAULT_FPS, Made
from sagepatch.errors import InvalidArgument, MachineError
from sagepatch.plan import write_bytes
from sagepatch.report.model import Report
from sagepatch.report.pictures import Frame, png_bytes

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".webp", ".gif", ".png")
TEXTS = (".txt",)
# By the end of a file's name, what writes a report as such a file.
WRITERS: dict[str, Callable[[Report, Path], object]] = {
    ".html": Report.to_html,
    ".json": Report.to_json,
    ".png": Report.plot,
}
REPORTS = tuple(WRITERS)
_GAP = 8


def check_target(path: Path, suffixes: tuple[str, ...], option: str) -> None:
    """Refuse a file that could not be written, before any work is done for it."""
    if path.suffix.lower() not in suffixes:
        raise InvalidArgument(f"{option} {path} must end in {', '.join(suffixes)}")
    if path.is_dir():
        raise InvalidArgument(f"{option} {path} is a folder: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise MachineError(f"{option} {path} cannot be written: {error.strerror}") from error


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Refuse two options that name one file: what is written last would replace the other. A device
    or a pipe takes both.
    """
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        first = seen.setdefault(path.resolve(), option)
        if first != option:
            raise InvalidArgument(f"{first} and {option} are one file, {path}: name two")


def check_report(path: Path, option: str = "--report") -> None:
    """As `check_target` for a report; a plot also needs matplotlib."""
    check_target(path, REPORTS, option)
    if path.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise MachineError(
            f"{option} {path} is a plot and needs matplotlib: "
            'pip install "sagepatch[plot]", or ask for .html or .json'
        )


def write_report(report: Report, path: Path) -> None:
    """Write the report in the format that its file name asks for."""
    WRITERS[path.suffix.lower()](report, path)


def save(runs: list[Made], path: Path) -> Path:
    """Write what was made: one run as it is, two side by side. Returns where it lies: a video that
    the asked-for format cannot hold becomes .webp.

    Where `path` fails (a full disk), the work is kept in the folder for temporary files, and the
    error says where.
    """
    if runs[0].is_video and path.suffix.lower() not in VIDEOS:
        path = path.with_suffix(".webp")
    data = encode(runs, path.suffix.lower())
    try:
        write_bytes(path, data)
    except MachineError as error:
        spare = Path(tempfile.gettempdir(), path.name)
        if spare.parent.resolve() == path.parent.resolve():
            raise
        write_bytes(spare, data)
        raise MachineError(f"{error}; what was made is kept at {spare}") from error
    return path


def encode(runs: list[Made], suffix: str) -> bytes:
    """The bytes of a picture, an animation or a text file."""
    if not runs[0].frames:
        return "\n".join(f"{run.text}" for run in runs).encode() + b"\n"
    frames = [_side_by_side(pair) for pair in zip(*(run.frames for run in runs), strict=True)]
    if runs[0].is_video and len(frames) > 1:
        return _animation(frames, suffix)
    if not runs[0].is_video and len(frames) > 1:
        frames = [np.concatenate(frames, 0)]
    if suffix == ".png":
        return png_bytes(frames[0])
    buffer = io.BytesIO()
    _image(frames[0]).save(buffer, "JPEG" if suffix in (".jpg", ".jpeg") else suffix[1:].upper())
    return buffer.getvalue()


def default_target(slug: str, suffix: str) -> Path:
    """The file, in the current folder, that is written where the user names none."""
    return Path(f"sagepatch-{slug}{suffix}")


def _side_by_side(pair: tuple[Frame, ...]) -> Frame:
    gap = np.full((pair[0].shape[0], _GAP, 3), 255, np.uint8)
    joined: list[Any] = []
    for picture in pair:
        joined += [picture] if not joined else [gap, picture]
    return np.concatenate(joined, 1)


def _animation(frames: list[Frame], suffix: str) -> bytes:
    buffer = io.BytesIO()
    first, *others = [_image(one) for one in frames]
    first.save(
        buffer,
        suffix[1:].upper(),
        save_all=True,
        append_images=others,
        duration=round(1000 / DEFAULT_FPS),
        loop=0,
    )
    return buffer.getvalue()


def _image(picture: Frame) -> Any:
    from PIL import Image

    return Image.fromarray(picture)
