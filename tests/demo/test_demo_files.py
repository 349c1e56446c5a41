"""What the demo's folder ships: small 16-bit weights in safetensors, with their notices."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from sagepatch.demo.captions import FILE
from sagepatch.demo.loader import FOLDER

MOST_BYTES = 24_000_000
WEIGHTS = sorted(FOLDER.glob("*/*.safetensors"))


def test_all_files_stay_within_24_megabytes() -> None:
    files = [path for path in FOLDER.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_each_network_has_one_file() -> None:
    owners = [path.parent.name for path in WEIGHTS]
    assert owners == ["text_encoder", "text_encoder_2", "transformer", "vae"]


@pytest.mark.parametrize("path", WEIGHTS, ids=lambda path: path.parent.name)
def test_every_weight_is_16_bit(path: Path) -> None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    assert header
    assert {entry["dtype"] for entry in header.values()} == {"F16"}


def test_nothing_but_json_and_safetensors_is_in_the_pipeline() -> None:
    endings = {path.suffix for path in FOLDER.rglob("*") if path.is_file()}
    assert endings == {".json", ".safetensors"}


def test_the_configs_name_no_folder_of_the_machine_they_were_made_on() -> None:
    configs = list(FOLDER.rglob("*config.json"))
    assert configs
    for path in configs:
        assert not json.loads(path.read_text(encoding="utf-8")).get("_name_or_path"), path


def test_the_notices_name_the_font_and_its_licence() -> None:
    notice = (FOLDER.parent / "NOTICE.txt").read_text(encoding="utf-8")
    licence = (FOLDER.parent / "OFL.txt").read_text(encoding="utf-8")
    assert "Copyright 2013-2017 Google Inc." in notice
    assert "Unicode License" in notice
    assert "SIL OPEN FONT LICENSE Version 1.1" in licence


def test_the_known_words_are_those_of_the_word_tokenizer() -> None:
    stored = json.loads((FOLDER / "tokenizer_2" / "tokenizer.json").read_text(encoding="utf-8"))
    words = {word for word in stored["model"]["vocab"] if word[0].isalnum() or word[0] == "_"}
    assert set(json.loads(FILE.read_text(encoding="utf-8"))["words"]) == words
