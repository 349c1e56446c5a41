"""Holds the training of the two tokenizers and the encoding of prompts; knows no pictures."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIP_VOCABULARY = 2_000
CLIP_LENGTH = 64
T5_LENGTH = 32
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


def make_clip_tokenizer(texts: Iterable[str]) -> Any:
    """A `CLIPTokenizer` with byte-pair pieces learnt from texts; its end token is its last id."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    template = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer = normalizers.Lowercase()
    learner.pre_tokenizer = template.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=CLIP_VOCABULARY,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learnt: dict[str, Any] = _model_of(learner)
    # CLIP ends each word with </w>, so a lone letter at the end of a word needs a piece of its own.
    pieces = alphabet + [letter + "</w>" for letter in alphabet]
    known = set(pieces)
    pieces += [piece for piece in learnt["vocab"] if piece not in known]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[tuple(pair) for pair in learnt["merges"]],
        model_max_length=CLIP_LENGTH,
    )


def _model_of(tokenizer: Any) -> dict[str, Any]:
    import json

    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def make_word_tokenizer(texts: Iterable[str]) -> Any:
    """A lower-casing word-level tokenizer for T5: ids 0, 1, 2 are padding, end and unknown."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=[PAD, END, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=512,
    )


def encode(tokenizer: Any, prompts: list[str], length: int, pad: int) -> NDArray[np.int32]:
    """Ids of every prompt cut and padded to length, as the pipeline would: int32 [N, length]."""
    out = np.full((len(prompts), length), pad, dtype=np.int32)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(length)
    for start in range(0, len(prompts), 8_192):
        for row, encoding in enumerate(backend.encode_batch(prompts[start : start + 8_192]), start):
            ids = encoding.ids
            out[row, : len(ids)] = ids
    backend.no_truncation()
    return out
