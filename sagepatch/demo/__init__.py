"""Holds the bundled demo pipeline: a tiny Flux that draws emoji, and hints about its captions."""

from sagepatch.demo.captions import nearest_captions, unknown_words
from sagepatch.demo.loader import DEFAULTS, Defaults, load_pipeline

__all__ = ["DEFAULTS", "Defaults", "load_pipeline", "nearest_captions", "unknown_words"]
