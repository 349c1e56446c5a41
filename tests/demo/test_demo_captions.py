"""What a user is told of a prompt that the demo pipeline was not taught."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sagepatch.demo import nearest_captions, unknown_words


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("a red apple", []),
        ("A RED Apple!", []),
        ("a Zebrafish beside a zebrafish", ["zebrafish", "beside"]),
        ("", []),
    ],
    ids=["a_caption", "capitals", "in_order_each_once", "empty"],
)
def test_words_that_training_never_showed(prompt: str, unknown: list[str]) -> None:
    assert unknown_words(prompt) == unknown


@pytest.mark.parametrize(
    ("prompt", "best"),
    [
        ("a red apple", "a red apple"),
        ("a red aple", "a red apple"),
        ("please draw the rocket now", "a rocket"),
        ("an elefant", "an elephant"),
    ],
    ids=["itself", "misspelt", "amid_other_words", "two_spellings"],
)
def test_the_nearest_caption_comes_first(prompt: str, best: str) -> None:
    assert nearest_captions(prompt, 1) == [best]


@pytest.mark.parametrize("n", [0, 1, 3, 7])
def test_as_many_captions_as_asked_for_and_none_twice(n: int) -> None:
    found = nearest_captions("a cat and a dog", n)
    assert len(found) == len(set(found)) == n


def test_every_caption_is_made_of_known_words() -> None:
    captions = nearest_captions("", 10_000)
    assert len(captions) > 2_500
    assert [caption for caption in captions if unknown_words(caption)] == []


def test_hints_need_no_heavy_library() -> None:
    code = (
        "import sys, sagepatch.demo as d; d.nearest_captions('a cat');"
        "print([m for m in ('diffusers', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
