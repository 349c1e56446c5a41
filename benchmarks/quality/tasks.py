"""Long-range tasks woven into text: retrieve the value of a key seen long ago, repeat a passage
seen long ago. Token ids and positions alone; pure given a generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.corpus import SPECIAL

FILE, END, COPY, PASTE, KEY, VALUE, ASK = range(len(SPECIAL))
KEY_TOKENS, VALUE_TOKENS = 2, 4
COPY_TOKENS = 32
# Keys, values and passages are made of these ids: frequent tokens, after the bytes.
ITEM_IDS = (300, 428)
# Every item lies in a slot of its own.
SLOT = 40
# How much more an answer counts than a token of text.
ANSWER_WEIGHT = 6.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens [first, last) of a row that a model can only know from `source`, where the item
    began; the token before each is what it is predicted from.
    """

    row: int
    task: str
    source: int
    first: int
    last: int

    @property
    def distance(self) -> int:
        return self.first - self.source


def _items(
    shape: tuple[int, int], generator: torch.Generator, task: str
) -> tuple[Tensor, Tensor, int]:
    """Items and the questions for them, [*shape, tokens] each, and where the answer begins; it ends
    before the last token.
    """
    device = generator.device

    def drawn(count: int) -> Tensor:
        return torch.randint(*ITEM_IDS, (*shape, count), generator=generator, device=device)

    def mark(token: int) -> Tensor:
        return torch.full((*shape, 1), token, device=device)

    if task == "copy":
        passage = drawn(COPY_TOKENS)
        ends = (passage, mark(END))
        return torch.cat([mark(COPY), *ends], 2), torch.cat([mark(PASTE), *ends], 2), 1
    key, value = drawn(KEY_TOKENS), drawn(VALUE_TOKENS)
    rest = (key, mark(VALUE), value, mark(END))
    item, question = torch.cat([mark(KEY), *rest], 2), torch.cat([mark(ASK), *rest], 2)
    return item, question, 2 + KEY_TOKENS


def _weave(
    ids: Tensor,
    weights: Tensor,
    sources: Tensor,
    targets: Tensor,
    task: str,
    generator: torch.Generator,
) -> tuple[int, int]:
    """Write an item at each of `sources` and its question with the answer at each of `targets`,
    [R, n] positions in ids [R, S]; what is random in them weighs nothing. Returns where an answer
    begins and ends after its target.
    """
    item, question, first = _items((len(ids), sources.shape[1]), generator, task)
    size = item.shape[2]
    reach = torch.arange(size, device=ids.device)
    weight = torch.zeros(size, device=ids.device)
    weight[first : size - 1] = ANSWER_WEIGHT
    for places, tokens, worth in (
        (sources, item, torch.zeros_like(weight)),
        (targets, question, weight),
    ):
        at = (places.unsqueeze(2) + reach).flatten(1)
        ids.scatter_(1, at, tokens.flatten(1))
        weights.scatter_(1, at, worth.repeat(places.shape[1]).expand(len(ids), -1))
    return first, size - 1


def training_rows(
    text: Tensor, items: int, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of text [R, S] and the weights of their loss; a `share` of them hold one copy and
    `items` - 1 retrievals at random places (fewer where rows are short).
    """
    ids, weights = text.clone(), torch.ones(text.shape, device=text.device)
    slots = text.shape[1] // SLOT
    items = min(items, slots // 3)
    if items < 2:
        raise ValueError(f"rows of {text.shape[1]} tokens are too short for two items")
    chance = torch.rand(len(text), slots, generator=generator, device=text.device)
    pairs = chance.argsort(1)[:, : 2 * items].view(len(text), items, 2).sort(2).values * SLOT
    sources, targets = pairs.unbind(2)
    _weave(ids, weights, sources[:, :1], targets[:, :1], "copy", generator)
    _weave(ids, weights, sources[:, 1:], targets[:, 1:], "retrieval", generator)
    has = torch.rand(len(text), 1, generator=generator, device=text.device) < share
    return torch.where(has, ids, text), torch.where(has, weights, torch.ones_like(weights))


def questions(text: Tensor, per_row: int, seed: int) -> tuple[Tensor, list[Answer]]:
    """Rows of text [R, S] with `per_row` retrievals and one copy, at depths spread evenly over the
    row; everything is asked at the end of the row, in random order. On the CPU.
    """
    ids = text.clone()
    size, asked = ids.shape[1], per_row + 1
    slots = size // SLOT - asked
    if slots < asked:
        raise ValueError(f"{size} tokens are too few for {asked} items of {SLOT}")
    generator = torch.Generator().manual_seed(seed)
    ends = (size - SLOT * (1 + torch.arange(asked))).expand(len(ids), -1)
    # One slot of each of as many equal parts.
    edges = torch.arange(asked + 1) * slots // asked
    share = torch.rand(len(ids), asked, generator=generator)
    spread = (edges[:-1] + (share * edges.diff()).long()) * SLOT
    order = torch.rand(len(ids), asked, generator=generator).argsort(1)
    depths = spread.gather(1, order)
    weights = torch.ones(ids.shape)
    answers: list[Answer] = []
    for task, part in (("copy", slice(0, 1)), ("retrieval", slice(1, None))):
        first, last = _weave(ids, weights, depths[:, part], ends[:, part], task, generator)
        for row in range(len(ids)):
            places = zip(depths[row, part].tolist(), ends[row, part].tolist(), strict=True)
            answers += [Answer(row, task, at, end + first, end + last) for at, end in places]
    return ids, answers
