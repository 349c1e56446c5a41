"""Holds the pictures and their captions, with the repainted ones; knows no wordings."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .colours import COLOUR_WORDS, PAINTS, SOURCE_COLOURS, repaint

DATA = Path(__file__).parent / "data"
ARTICLES = ("a", "an", "the")
# Colours so close that a name's word and the computed colour may differ ("red apple" is orange).
NEIGHBOURS = {("red", "orange"), ("orange", "yellow"), ("orange", "brown"), ("purple", "pink")}


@dataclass(frozen=True)
class Picture:
    """One picture to learn: which emoji it shows, its dominant colour, its captions."""

    source: int
    colour: str | None
    captions: tuple[str, ...]
    repainted: bool


def without_article(caption: str) -> str:
    """The caption without its leading "a", "an" or "the"."""
    head, _, rest = caption.partition(" ")
    return rest if head in ARTICLES and rest else caption


def with_article(words: str) -> str:
    """The words led by "a" or "an"."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def read_images(device: str | torch.device = "cpu") -> Tensor:
    """All emoji, uint8 [1347, 3, 128, 128] on white."""
    with np.load(DATA / "images.npz") as archive:
        images = torch.from_numpy(archive["images"])
    return images.permute(0, 3, 1, 2).contiguous().to(device)


def read_entries() -> list[dict[str, object]]:
    """The records of captions.json, in the order of the images."""
    entries: list[dict[str, object]] = json.loads((DATA / "captions.json").read_text())
    return entries


def _colour_slot(entry: dict[str, object]) -> tuple[str, bool, str] | None:
    """(phrase with {} for the colour word, whether it takes an article, source colour), if any."""
    name, colour, category = str(entry["name"]), entry["colour"], entry["category"]
    captions = entry["captions"]
    assert isinstance(captions, list)
    if colour not in SOURCE_COLOURS or category in ("Flags", "People & Body"):
        return None
    assert isinstance(colour, str)
    article = captions[0].split()[0] in ("a", "an")
    words = name.split()
    named = [word for word in words if word in COLOUR_WORDS]
    if named:
        pairs = {(named[0], colour), (colour, named[0])}
        if len(named) > 1 or "light" in words or not (named[0] == colour or pairs & NEIGHBOURS):
            return None
        return " ".join("{}" if word == named[0] else word for word in words), article, colour
    return "{} " + without_article(captions[0]), article, colour


def list_pictures(limit: int | None = None) -> list[Picture]:
    """All emoji in order, then every repainting whose caption no other picture owns."""
    entries = read_entries()[:limit]
    taken = {without_article(str(c)) for entry in entries for c in _captions(entry)}
    plain: list[Picture] = []
    painted: list[Picture] = []
    for index, entry in enumerate(entries):
        captions = _captions(entry)
        slot = _colour_slot(entry)
        colour = entry["colour"]
        if slot is not None:
            phrase, article, colour = slot
            own = phrase.format(colour)
            if own not in taken:
                taken.add(own)
                captions = (*captions, with_article(own) if article else own)
            for target in PAINTS:
                words = phrase.format(target)
                if target == colour or words in taken:
                    continue
                taken.add(words)
                caption = with_article(words) if article else words
                painted.append(Picture(index, target, (caption,), True))
        plain.append(Picture(index, str(colour) if colour else None, captions, False))
    return plain + painted


def _captions(entry: dict[str, object]) -> tuple[str, ...]:
    captions = entry["captions"]
    assert isinstance(captions, list)
    return tuple(str(caption) for caption in captions)


def draw_pictures(images: Tensor, pictures: list[Picture], chunk: int = 256) -> Tensor:
    """The picture of every record, uint8 [P, 3, 128, 128], on the device of images."""
    entries = read_entries()
    drawn = []
    for start in range(0, len(pictures), chunk):
        part = pictures[start : start + chunk]
        batch = images[[picture.source for picture in part]]
        rows = [row for row, picture in enumerate(part) if picture.repainted]
        if rows:
            batch[rows] = _repaint_bytes(
                batch[rows],
                [str(entries[part[row].source]["colour"]) for row in rows],
                [str(part[row].colour) for row in rows],
            )
        drawn.append(batch)
    return torch.cat(drawn)


def _repaint_bytes(batch: Tensor, sources: list[str], targets: list[str]) -> Tensor:
    return (repaint(batch.float() / 255, sources, targets) * 255).round().to(torch.uint8)
