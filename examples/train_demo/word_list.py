"""Holds the writing of the captions and known words that the installed demo gives hints from.

Run it as `python -m examples.train_demo.word_list PIPELINE_FOLDER OUT.json`.
"""

import json
import sys
from pathlib import Path

from .pictures import list_pictures


def write_word_list(pipeline: Path, out: Path) -> None:
    """Write the captions of the unpainted pictures, and the words that the T5 tokenizer knows."""
    vocabulary = json.loads((pipeline / "tokenizer_2" / "tokenizer.json").read_text())["model"]
    words = sorted(word for word in vocabulary["vocab"] if word[0].isalnum() or word[0] == "_")
    plain = [picture for picture in list_pictures() if not picture.repainted]
    captions = list(dict.fromkeys(c for picture in plain for c in picture.captions))
    text = json.dumps({"captions": captions, "words": words}, separators=(",", ":"))
    out.write_text(text + "\n")


if __name__ == "__main__":
    write_word_list(Path(sys.argv[1]), Path(sys.argv[2]))
