"""Holds the wordings a caption is trained under, as pure functions of a random generator."""

import random

from .pictures import Picture, without_article

TEMPLATES = (
    "an emoji of {}", "a picture of {}", "a photo of {}", "a drawing of {}", "a painting of {}",
    "{} emoji", "an icon of {}", "a sticker of {}", "an image of {}", "a sketch of {}",
    "an illustration of {}", "a cartoon of {}", "a cute drawing of {}", "a small picture of {}",
    "the emoji for {}", "a close up of {}", "a rendering of {}", "clip art of {}",
)  # fmt: skip
LEAD_INS = (
    "draw", "paint", "show me", "please show me", "please draw", "please paint me", "give me",
    "i want", "i want to see", "i would like", "can you draw", "could you please draw",
    "can you show me", "make", "make me", "create", "generate", "imagine", "let me see",
    "a picture with", "here is", "this is", "it is", "one", "just", "only",
)  # fmt: skip
ENDINGS = (
    "on a white background", "on white", "please", "in flat style", "for a chat", "emoji style",
    "as an emoji", "as an icon", "in high quality", "with a plain background", "thanks",
    "isolated", "in the centre", "digital art", "vector art", "highly detailed", "for me",
)  # fmt: skip
COLOUR_PHRASES = (
    "{noun} in {colour}", "{noun} that is {colour}", "{colour} coloured {noun}",
    "{noun} painted {colour}", "bright {colour} {noun}", "{noun} of {colour} colour",
)  # fmt: skip
SYLLABLES = (
    "ba", "bre", "chi", "con", "da", "dre", "el", "en", "er", "fi", "flo", "ga", "gri", "ha",
    "ing", "ism", "ja", "ka", "lan", "lo", "ma", "mi", "mor", "na", "ness", "no", "ol", "or",
    "pa", "pre", "qui", "ra", "re", "sa", "sha", "ster", "ta", "ti", "tra", "ul", "un", "va",
    "ver", "wa", "wi", "xen", "yo", "za",
)  # fmt: skip


def known_wordings() -> list[str]:
    """Every fixed wording, for the tokenizers' vocabularies."""
    fillings = {"noun": "", "colour": ""}
    return [
        *(template.format("") for template in TEMPLATES),
        *LEAD_INS,
        *ENDINGS,
        *(phrase.format(**fillings) for phrase in COLOUR_PHRASES),
        "the a an",
    ]


def strange_word(rng: random.Random) -> str:
    """A word of no meaning: stands for any word that the tokenizers have never seen."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4)))


def _strange_words(rng: random.Random, most: int) -> str:
    return " ".join(strange_word(rng) for _ in range(rng.randint(1, most)))


def _subject(picture: Picture, rng: random.Random) -> str:
    caption = rng.choice(picture.captions)
    bare = without_article(caption)
    coloured = f"{picture.colour} "
    if picture.colour and bare.startswith(coloured) and rng.random() < 0.25:
        words = rng.choice(COLOUR_PHRASES).format(
            noun=bare.removeprefix(coloured), colour=picture.colour
        )
        return words if rng.random() < 0.5 else f"a {words}"
    draw = rng.random()
    if draw < 0.60:
        return caption
    return bare if draw < 0.85 else f"the {bare}"


def wording(picture: Picture, rng: random.Random) -> str:
    """One random prompt for the picture, lower case, at most about 20 words."""
    subject = _subject(picture, rng)
    draw = rng.random()
    if draw < 0.42:
        return subject
    if draw < 0.66:
        return rng.choice(TEMPLATES).format(subject)
    if draw < 0.74:
        return f"{rng.choice(LEAD_INS)} {subject}"
    if draw < 0.82:
        return f"{subject} {rng.choice(ENDINGS)}"
    if draw < 0.88:
        return f"{rng.choice(LEAD_INS)} {subject} {rng.choice(ENDINGS)}"
    if draw < 0.94:
        return f"{_strange_words(rng, 4)} {subject}"
    if draw < 0.97:
        return f"{subject} {_strange_words(rng, 4)}"
    return f"{rng.choice(LEAD_INS)} {_strange_words(rng, 2)} {subject} {_strange_words(rng, 2)}"


def wordings(picture: Picture, count: int, rng: random.Random) -> list[str]:
    """count prompts: every caption as it stands first, then random wordings."""
    first = list(picture.captions)[:count]
    return first + [wording(picture, rng) for _ in range(count - len(first))]
