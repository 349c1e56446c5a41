"""Puts the rows of a round's archive into the tables under benchmarks/: a row of the same key is
replaced where it stands, a new one joins its group, and all of it is said.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.bench_table import rows as rows_of_bench
from benchmarks.end_to_end_rows import Row, read
from benchmarks.gpu_round.kept import OK, ROOT, SUMMARY, told_of_files

BENCHMARKS = ROOT / "benchmarks"
UNKNOWN = ("", "unknown")
MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Table:
    """What makes rows the same. All rows with one key are replaced together, so that an empty key
    replaces the whole table; of columns in `cut` only what stands before the separator counts. Rows
    of one `group`, its key if None, compare only if one run made them.
    """

    key: tuple[str, ...] = ()
    group: tuple[str, ...] | None = None
    cut: Mapping[str, str] = field(default_factory=dict)

    def key_of(self, row: Row) -> tuple[str, ...]:
        return self._values(row, self.key)

    def group_of(self, row: Row) -> tuple[str, ...]:
        return self._values(row, self.key if self.group is None else self.group)

    def _values(self, row: Row, columns: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            row[name].partition(self.cut[name])[0] if name in self.cut else row[name]
            for name in columns
        )


_FORWARD = Table(("model", "mode", "compile"), ("model", "compile"), {"mode": " ("})
_LANGUAGE = ("training", "sources", "layers", "perplexity", "positions", "recall")
TABLES = {
    "h200_attention.csv": Table(("shape", "variant"), ("shape",)),
    "h200_masked.csv": Table(("shape", "variant", "mask"), ("shape",)),
    "h200_end_to_end.csv": _FORWARD,
    "h200_end_to_end_parts.csv": _FORWARD,
    "h200_fuzz.csv": Table(("toolchain", "recipe")),
    "h200_sanitizers.csv": Table(("tool", "recipe")),
    "h200_schedule.csv": Table(("kind", "what", "recipe", "dim", "form")),
    "h200_counters.csv": Table(("kernel", "way", "b", "h", "s", "d")),
    "h200_cuda_tiles.csv": Table(("shape", "recipe", "way"), ("shape", "recipe")),
    "h200_triton_tiles.csv": Table(
        (
            *("recipe", "head_dim", "causal", "block_m", "block_n"),
            *("warps", "stages", "tma", "registers"),
        ),
        ("recipe", "head_dim", "causal"),
    ),
    "h200_rotary.csv": Table(("model", "what", "mode"), ("model",)),
    "h200_mma_speed.csv": Table(("shape", "variant"), ("shape",)),
    "host_overhead.csv": Table(("toolchain", "recipe", "row"), ("toolchain", "recipe")),
    "host_stages.csv": Table(("toolchain", "recipe", "stage"), ("toolchain", "recipe")),
    "short_calls.csv": Table(("shape", "kernel"), ("shape",)),
    "calibration_cost.csv": Table(("model", "steps", "about"), cut={"about": ","}),
    "ablations_gpu.csv": Table(("ablation", "setting", "data", "kernel"), ("data",)),
    "ulysses_exchange.csv": Table(("shape", "way", "gpus"), ("shape", "gpus")),
    "quality/demo_all_captions.csv": Table(("condition",)),
    "quality/demo_pictures.csv": Table(("condition",), ()),
    "quality/demo_steps.csv": Table(("condition", "step"), ()),
    "quality/demo_layers.csv": Table(("layer", "call", "condition"), ("layer",)),
    **{f"quality/language_{part}.csv": Table() for part in _LANGUAGE},
}


@dataclass(frozen=True, slots=True)
class Merged:
    """A table after new rows: all of it, what to say of it, and the commits of what was there."""

    rows: list[Row]
    said: list[str]
    commits: tuple[str, ...]


def merged(name: str, old: Sequence[Row], new: Sequence[Row]) -> Merged:
    """New rows in the place of old ones of their key, the others behind the last row of their
    group, or last.
    """
    table = TABLES[name]
    fresh: dict[tuple[str, ...], list[Row]] = {}
    for row in new:
        fresh.setdefault(table.key_of(row), []).append(row)
    placed: set[tuple[str, ...]] = set()
    rows: list[Row] = []
    gone: list[Row] = []
    for row in old:
        key = table.key_of(row)
        if key not in fresh:
            rows.append(row)
            continue
        gone.append(row)
        if key not in placed:
            rows.extend(fresh[key])
            placed.add(key)
    left = [row for row in rows if table.key_of(row) not in fresh]
    added = 0
    for key, some in fresh.items():
        if key not in placed:
            group = table.group_of(some[0])
            places = [at for at, row in enumerate(rows, 1) if table.group_of(row) == group]
            at = places[-1] if places else len(rows)
            rows[at:at] = some
            added += len(some)
    said = [f"{name}: {len(gone)} rows replaced{_of(gone)}, {added} new ones{_of(new)}"]
    said += _listed("  ", [key for key in fresh if key in placed])
    groups = {table.group_of(row) for row in new}
    older = [row for row in left if table.group_of(row) in groups]
    if older:
        said.append(f"  beside them, of another run{_of(older)}:")
        said += _listed("    ", [table.key_of(row) for row in older])
    return Merged(
        rows, said, tuple(dict.fromkeys(row["commit"] for row in gone if "commit" in row))
    )


def _listed(indent: str, keys: Sequence[tuple[str, ...]]) -> list[str]:
    """One key a line, not too many."""
    lines = [indent + (" ".join(key) or "all of it") for key in keys[:MOST_LISTED]]
    more = len(keys) - MOST_LISTED
    return [*lines, f"{indent}and {more} more"] if more > 0 else lines


def _of(rows: Sequence[Row]) -> str:
    commits = dict.fromkeys(row["commit"] for row in rows if row.get("commit"))
    return f" of {', '.join(commits)}" if commits else ""


def fitted(row: Mapping[str, Any], columns: Sequence[str], about: Mapping[str, str]) -> Row:
    """A row with a table's columns; those that its script leaves out or knew nothing of are taken
    from what the round knew.

    Raises `ValueError` for a column that the table lacks.
    """
    extra = [name for name in row if name not in columns]
    if extra:
        raise ValueError(f"the table has no column {', '.join(extra)}")
    found = {name: str(row.get(name, "")) for name in columns}
    for name in columns:
        unsaid = found[name] in UNKNOWN if name == "commit" else name not in row
        found[name] = about.get(name, "") if unsaid else found[name]
    return found


class Archive:
    """A round's archive: its summary, and the files of its jobs."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.files = {
                member.name: held.read()
                for member in tar.getmembers()
                if (held := tar.extractfile(member)) is not None
            }
        self.summary: dict[str, Any] = json.loads(self.files[f"{SUMMARY}.json"])

    def jobs(self, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Those to take, and what to say of the others. Unasked only those that ended well."""
        taken, said = [], []
        for job in self.summary["jobs"]:
            asked = any(fnmatchcase(job["job"], word) for word in words)
            if asked or (not words and job["outcome"] == OK):
                taken.append(job)
            elif not words and job["writes"]:
                said.append(f"{job['job']}: {job['outcome']}, not taken unless it is named")
        return taken, said

    def rows(self, job: Mapping[str, Any], file: str, columns: Sequence[str]) -> list[Row]:
        """What a job left in a file, as rows of a table."""
        data = self.files.get(f"{job['job']}/{file}", b"").decode()
        # A job that was ended may have written half a line.
        data = data[: data.rfind("\n") + 1]
        if not data:
            return []
        folder = f"{self.summary['out']}/"
        about = {
            **{name: str(self.summary[name] or "") for name in ("gpu", "driver", "cuda", "commit")},
            **{name: found or "" for name, found in self.summary["versions"].items()},
            "command": job["command"],
        }
        if file.endswith(".json"):
            found = rows_of_bench(json.loads(data), self.summary["commit"])
        else:
            found = list(csv.DictReader(io.StringIO(data, newline="")))
        made = [fitted(row, columns, about) for row in found]
        for row in made:
            # Where it was written is nobody's business.
            for name in ("command", "about"):
                if name in row:
                    row[name] = row[name].replace(f"{folder}{job['job']}/", "")
                    row[name] = row[name].replace(f"{folder}{job['job']}", ".").replace(folder, "")
        return made


def write(path: Path, rows: Sequence[Row]) -> None:
    """A table with the line ends that it has."""
    ends = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator=ends)
        writer.writeheader()
        writer.writerows(rows)


def merge(archive: Archive, words: Sequence[str], folder: Path, *, dry: bool = False) -> list[str]:
    """Take the rows of an archive's jobs into the tables of a folder; what was done, in lines."""
    taken, said = archive.jobs(words)
    if differing := told_of_files(archive.summary):
        said.append(f"the round's files: {differing}")
    fresh: dict[str, list[Row]] = {}
    columns: dict[str, list[str]] = {}
    for job in taken:
        for file, name in job["writes"].items():
            if not name:
                continue
            if name not in TABLES:
                raise ValueError(f"{job['job']} writes {name}, which is no table")
            if not (there := read(folder / name)):
                raise ValueError(f"{folder / name} has no rows")
            columns.setdefault(name, list(there[0]))
            found = archive.rows(job, file, columns[name])
            # Of the same key the last job counts.
            keys = {TABLES[name].key_of(row) for row in found}
            before = [row for row in fresh.get(name, []) if TABLES[name].key_of(row) not in keys]
            fresh[name] = before + found
    commits: dict[str, None] = {}
    for name, new in fresh.items():
        if not new:
            continue
        made = merged(name, read(folder / name), new)
        said += made.said
        if not dry:
            write(folder / name, made.rows)
        commits |= dict.fromkeys(made.commits)
    return said + naming(folder.parent, [commit for commit in commits if commit not in UNKNOWN])


def naming(root: Path, commits: Sequence[str]) -> list[str]:
    """Pages that say a commit whose rows were replaced, which no script writes anew."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = []
    for page in (page for page in pages if page.exists()):
        text = page.read_text(encoding="utf-8")
        named = [commit for commit in commits if commit in text]
        if named:
            found.append(f"{page.relative_to(root)} names {', '.join(named)}: read it again")
    return found


def main(words: list[str]) -> int:
    """The command line of merging."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_round merge")
    parser.add_argument("archive", type=Path)
    parser.add_argument("names", nargs="*", help="jobs by name or glob; else all that ended well")
    parser.add_argument("--dry-run", action="store_true", help="say it and write nothing")
    options = parser.parse_args(words)
    try:
        said = merge(Archive(options.archive), options.names, BENCHMARKS, dry=options.dry_run)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        print(f"{options.archive}: {error}", file=sys.stderr)
        return 2
    print("\n".join(said) or "nothing to merge")
    return 0
