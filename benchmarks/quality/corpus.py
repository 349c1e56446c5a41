"""Text under open licences that packages ship: the Python sources of this interpreter and of what
is installed beside it, as tokens of a tokenizer that is trained on them.

    python -m benchmarks.quality.corpus --out FOLDER [--most-megabytes 160]

writes `tokens.npz` (one stream a part: train, held), `tokenizer.json` and `sources.csv` (what was
taken, its version, licence and size). Whole folders of packages are held out, by a hash of their
path, never single files: nothing of a held-out folder is trained on.
"""

from __future__ import annotations

import argparse
import csv
import platform
import re
import sysconfig
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

import numpy as np

from benchmarks.quality.tables import provenance, write

VOCABULARY = 4096
# Tokens that no text contains; the tasks are made of them.
SPECIAL = ("<file>", "<end>", "<copy>", "<paste>", "<key>", "<value>", "<ask>")
# One folder in so many is held out.
HELD = 24
LARGEST_FILE = 400_000
TOKENIZER_BYTES = 6_000_000
# Licences of which text may be taken and models made; a distribution that names another, or none,
# is left out.
OPEN = re.compile(
    r"^(apache|bsd|mit\b|isc|psf|python software foundation|0bsd|zlib|hpnd|new bsd|modified bsd"
    r"|3-clause bsd|\(?bsd)",
    re.IGNORECASE,
)
CLASSIFIER = "License :: OSI Approved :: "


@dataclass(frozen=True, slots=True)
class Source:
    """One package: its Python files under `root`."""

    name: str
    version: str
    licence: str
    root: Path
    files: tuple[Path, ...]


def licence_of(distribution: Distribution) -> str:
    """What a distribution says its licence is, on one line, "" where it says nothing short."""
    metadata = distribution.metadata
    expression = metadata.get("License-Expression")
    classified = [
        text.removeprefix(CLASSIFIER)
        for text in metadata.get_all("Classifier") or ()
        if text.startswith(CLASSIFIER)
    ]
    told = expression or " and ".join(classified) or metadata.get("License") or ""
    first = told.strip().splitlines()
    return first[0][:80] if first else ""


def is_open(licence: str) -> bool:
    """Whether every licence of the line is one of `OPEN`; "or" leaves the choice to us.

    >>> is_open("Apache-2.0 OR BSD-3-Clause"), is_open("MIT AND GPL-3.0-only")
    (True, False)
    """
    parts = re.split(r"\s+and\s+", licence, flags=re.IGNORECASE)
    return bool(licence) and all(
        any(OPEN.match(choice) for choice in re.split(r"\s+or\s+", part, flags=re.IGNORECASE))
        for part in parts
    )


def sources() -> Iterator[Source]:
    """The standard library, then every distribution under an open licence, by name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    yield Source(
        "Python standard library", platform.python_version(), "PSF-2.0", library, tuple(files)
    )
    seen = set()
    for found in sorted(distributions(), key=lambda d: d.metadata["Name"].lower()):
        name, licence = found.metadata["Name"], licence_of(found)
        if name in seen or name == "sagepatch" or not is_open(licence):
            continue
        seen.add(name)
        root = Path(str(found.locate_file("")))
        # Not `found.files`, which looks for every file on the disk.
        listed = csv.reader((found.read_text("RECORD") or "").splitlines())
        paths = sorted(root / row[0] for row in listed if row and row[0].endswith(".py"))
        kept = tuple(path for path in paths if ".." not in path.parts)
        if kept:
            yield Source(name, found.version, licence, root, kept)


def text_of(path: Path) -> str:
    """A file's text, "" where it is not UTF-8, gone, or larger than `LARGEST_FILE` (tables of data
    more than code).
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_held(source: Source, path: Path) -> bool:
    """Whether the folder that this file lies in is held out."""
    folder = f"{source.name}/{path.relative_to(source.root).parent.as_posix()}"
    return zlib.crc32(folder.encode()) % HELD == 0


def tokenizer_of(texts: list[str]):  # type: ignore[no-untyped-def]
    """A byte-level BPE tokenizer of `VOCABULARY` tokens, the special ones first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Read, train the tokenizer, encode, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most-megabytes", type=float, default=160)
    parser.add_argument("--commit")
    options = parser.parse_args()
    build(options.out, int(options.most_megabytes * 1e6), options.commit)


def build(out: Path, most_bytes: int, commit: str | None) -> None:
    """Write the corpus to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    rows, pieces, seen, total = [], [], set(), 0
    with ThreadPoolExecutor(16) as pool:
        for source in sources():
            if total > most_bytes:
                break
            size = [0, 0]
            for path, text in zip(source.files, pool.map(text_of, source.files), strict=True):
                # Equal files are taken once, wherever they lie.
                mark = hash(text)
                if len(text) < 200 or mark in seen or total > most_bytes:
                    continue
                seen.add(mark)
                held = is_held(source, path)
                named = f"# {source.name}: {path.relative_to(source.root).as_posix()}\n"
                pieces.append((held, named + text))
                size[held] += len(text)
                total += len(text)
            if any(size):
                rows.append(
                    {
                        "package": source.name,
                        "version": source.version,
                        "licence": source.licence,
                        "characters_train": size[0],
                        "characters_held": size[1],
                    }
                )
    step = max(1, total // TOKENIZER_BYTES)
    tokenizer = tokenizer_of([text for held, text in pieces if not held][::step])
    tokenizer.save(str(out / "tokenizer.json"))
    streams: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for at in range(0, len(pieces), 2048):
        batch = pieces[at : at + 2048]
        encoded = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        for (held, _), found in zip(batch, encoded, strict=True):
            ids = np.asarray(found.ids, dtype=np.uint16)
            # A text that spells a special token stays text.
            ids = ids[ids >= len(SPECIAL)]
            streams[held].append(np.concatenate([np.zeros(1, np.uint16), ids]))
    np.savez(
        out / "tokens.npz",
        train=np.concatenate(streams[False]),
        held=np.concatenate(streams[True]),
    )
    command = f"python -m benchmarks.quality.corpus --most-megabytes {most_bytes / 1e6:g}"
    write(out / "sources.csv", rows, provenance(command, commit))


if __name__ == "__main__":
    main()
