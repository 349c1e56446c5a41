"""The language model of the quality benchmark: its training computes what transformers' Llama does,
and its tasks can be answered from the text alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality import language_measure, language_model, language_rounds, tasks

SIZE = dataclasses.replace(
    language_model.TINY, heads=4, kv_heads=2, head_dim=16, stages=((1.0, 160),), step_tokens=320
)


@pytest.fixture(scope="module")
def trainer() -> language_model.Trainer:
    made = language_model.Trainer(SIZE, torch.device("cpu"), compiled=False)
    with torch.no_grad():
        # Llama begins with norms of one, which would hide a norm that is left out.
        for weight in made.weights:
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
    return made


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 4096, (4, 160), generator=torch.Generator().manual_seed(0))


def test_the_trainer_computes_llama(trainer: language_model.Trainer, ids: Tensor) -> None:
    weights = torch.ones(ids.shape)
    weights[1, 20:30] = 0.0
    weights[2, 50:70] = 4.0
    shown = trainer.forward_backward(ids, weights)
    ours = [weight.grad.clone() for weight in trainer.weights]
    trainer.model.zero_grad()
    logits = trainer.model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    worth = weights[:, 1:].flatten()
    ((losses * worth).sum() / worth.sum()).backward()
    for name, grad, weight in zip(
        dict(trainer.model.named_parameters()), ours, trainer.weights, strict=True
    ):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert shown[1] + shown[3] == (worth > 0).sum()
    torch.testing.assert_close(shown[2], (losses * (worth > 1)).sum())


def test_losses_of_documents_are_those_of_transformers(
    trainer: language_model.Trainer, ids: Tensor
) -> None:
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits[:, :-1]
        wanted = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    found = language_measure.token_losses(trainer.model, ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_records_add_up_to_all_losses(trainer: language_model.Trainer) -> None:
    document = torch.randint(0, 4096, (2, 1280), generator=torch.Generator().manual_seed(1))
    records = language_measure.perplexity("exact", trainer.model, document, 6, (640, 1280))
    losses = language_measure.token_losses(trainer.model, document).double()
    whole = {r.document: r for r in records if r.measure == "perplexity" and r.length == 1280}
    assert [whole[6].count, whole[7].count] == [1279, 1279]
    torch.testing.assert_close(whole[7].total, float(losses[1].sum()), rtol=1e-6, atol=0)
    spans = [r for r in records if r.measure == "position" and r.document == 7]
    assert [(r.band, r.count) for r in spans] == [(1024, 1023), (1280, 256)]
    torch.testing.assert_close(spans[1].total, float(losses[1, 1023:].sum()), rtol=1e-6, atol=0)
    assert {r.count for r in records if r.length == 640} == {2 * 639}


def test_every_length_is_judged_by_the_same_last_tokens(trainer: language_model.Trainer) -> None:
    document = torch.randint(0, 4096, (2, 320), generator=torch.Generator().manual_seed(1))
    lengths = (40, 80, 160, 320)
    records = language_measure.perplexity("exact", trainer.model, document, 0, lengths, 80)
    losses = language_measure.token_losses(trainer.model, document[:, -160:]).double()
    found = {(r.length, r.document): r for r in records if r.measure == "perplexity"}
    assert {length: found[length, 1].count for length in lengths} == {
        40: 78,
        80: 79,
        160: 80,
        320: 80,
    }
    torch.testing.assert_close(found[160, 1].total, float(losses[1, -80:].sum()), rtol=1e-6, atol=0)
    alone = language_measure.token_losses(trainer.model, document[1:, -40:]).double()
    first = language_measure.token_losses(trainer.model, document[1:, -80:-40]).double()
    wanted = float(alone.sum() + first.sum())
    torch.testing.assert_close(found[40, 1].total, wanted, rtol=1e-6, atol=0)
    (span,) = (r for r in records if r.measure == "position" and r.document == 0)
    assert (span.band, span.count) == (320, 319)


class Oracle:
    """Answers by looking for what stood before the question: the task as a rule."""

    def __init__(self, ids: Tensor, answers: list[tasks.Answer]) -> None:
        wanted = {}
        for answer in answers:
            row = ids[answer.row].tolist()
            size = answer.last - answer.first
            lead = 1 if answer.task == "copy" else 2 + tasks.KEY_TOKENS
            start = answer.source + lead
            key = row[answer.source + 1 : start - 1]
            assert row[answer.first - len(key) - 1 : answer.first - 1] == key
            for place in range(size):
                wanted[answer.row, answer.first + place - 1] = row[start + place]
        self.wanted, self.shape = wanted, ids.shape
        self.model: Any = self

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        hidden = torch.zeros(*self.shape, 1)
        for (row, place), token in self.wanted.items():
            hidden[row, place] = token
        return type("Output", (), {"last_hidden_state": hidden})

    def lm_head(self, states: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(states[:, 0].long(), 4096).float()


def test_questions_can_be_answered_from_what_stood_before() -> None:
    text = torch.randint(900, 4096, (3, 1200), generator=torch.Generator().manual_seed(2))
    ids, answers = tasks.questions(text, 8, seed=3)
    assert len(answers) == 3 * 9
    assert [a.task for a in answers].count("copy") == 3
    assert language_measure.answered(Oracle(ids, answers), ids, answers) == [
        (a.last - a.first, True) for a in answers
    ]
    # A wrong token is one token wrong, and the whole answer.
    wrong = ids.clone()
    wrong[answers[-1].row, answers[-1].first] = 0
    assert language_measure.answered(Oracle(ids, answers), wrong, answers[-1:]) == [(3, False)]


def test_marks_go_to_the_documents_that_were_asked(trainer: language_model.Trainer) -> None:
    documents = torch.randint(900, 4096, (3, 1920), generator=torch.Generator().manual_seed(4))
    given = language_measure.exams(documents, 5, (960, 1920), judged=1920)
    assert [exam.of_row for exam in given] == [(5, 5, 6, 6, 7, 7), (5, 6, 7)]
    # Two documents at once ask what each alone asks.
    (alone,) = language_measure.exams(documents[1:2], 6, (960,), judged=1920)
    assert torch.equal(alone.ids, given[0].ids[2:4])
    for exam in given:
        answers = list(exam.answers)
        oracle = Oracle(exam.ids, answers)
        spoilt = next(a for a in answers if a.task == "retrieval" and exam.of_row[a.row] == 6)
        oracle.wanted[spoilt.row, spoilt.first] = 0
        records = language_measure.recall("exact", oracle, [exam])
        whole = {(r.measure, r.document): r for r in records if not r.band}
        asked = len(answers) // 3 // (len(exam.of_row) // 3) - 1
        rows = len(exam.of_row) // 3
        assert [whole["retrieval", d].count for d in (5, 6, 7)] == [asked * rows] * 3
        assert [whole["retrieval", d].total for d in (5, 6, 7)] == [
            asked * rows - (d == 6) for d in (5, 6, 7)
        ]
        assert whole["copy", 7].total == whole["copy", 7].count == tasks.COPY_TOKENS * rows


def test_what_matters_most_is_measured_on_the_most_documents() -> None:
    order = language_rounds.turns([], torch.device("cpu"), 9)
    seen: dict[str, list[int]] = {}
    for turn in order:
        seen.setdefault(turn.condition.name, []).extend(range(turn.first, turn.last))
    assert seen["exact"] == seen["sage2_8"] == list(range(9))
    assert seen["sage1_b_f32"] == seen["sage2_8 without K smoothing"] == list(range(6))
    assert seen["naive INT8"] == list(range(4))
    # A turn that the time cuts off takes nothing from the rounds before it.
    firsts = [turn.first for turn in order]
    assert firsts == sorted(firsts)


def test_questions_are_asked_at_the_end_and_reach_all_depths() -> None:
    text = torch.zeros(20, 4096, dtype=torch.long)
    ids, answers = tasks.questions(text, 8, seed=0)
    assert all(a.first > 4096 - 10 * tasks.SLOT for a in answers)
    assert all(a.source + tasks.SLOT <= 4096 - 9 * tasks.SLOT for a in answers)
    depths = torch.tensor([a.source / 4096 for a in answers])
    assert depths.min() < 0.05
    assert depths.max() > 0.8
    assert torch.equal(ids, tasks.questions(text, 8, seed=0)[0])
    assert not torch.equal(ids, tasks.questions(text, 8, seed=1)[0])


def test_training_rows_weigh_answers_and_nothing_that_is_random() -> None:
    text = torch.full((64, 480), 5000)
    ids, weights = tasks.training_rows(text, 4, 0.5, torch.Generator().manual_seed(0))
    has = (ids != 5000).any(1)
    assert 16 < has.sum() < 48
    assert (weights[~has] == 1).all()
    # Three retrievals and one copy a row, each with its question.
    answers = 3 * tasks.VALUE_TOKENS + tasks.COPY_TOKENS
    assert ((weights[has] > 1).sum(1) == answers).all()
    woven = 3 * 2 * (3 + tasks.KEY_TOKENS + tasks.VALUE_TOKENS) + 2 * (2 + tasks.COPY_TOKENS)
    assert ((ids[has] != 5000).sum(1) == woven).all()
    assert torch.equal(weights[has] == 1, ids[has] == 5000)
    with pytest.raises(ValueError, match="too short"):
        tasks.training_rows(text[:, :160], 4, 0.5, torch.Generator())


def test_the_summary_pairs_documents() -> None:
    def record(condition: str, document: int, total: float) -> language_measure.Record:
        return language_measure.Record(condition, "perplexity", 1024, 0, document, total, 10)

    rows = language_measure.summarised(
        [record("exact", d, 10.0 * d) for d in range(1, 4)]
        + [record("other", d, 10.0 * d + 1) for d in range(1, 3)],
        "exact",
    )
    exact, other = rows
    assert (exact["mean"], exact["documents"], exact["minus_exact"]) == ("2.00000", 3, "0.000000")
    assert (other["documents"], other["mean"], other["minus_exact"]) == (2, "1.60000", "0.100000")
    # Documents differ a lot, the difference does not.
    assert other["minus_exact_low"] == other["minus_exact_high"] == "0.100000"
    assert float(str(exact["mean_low"])) < float(str(exact["mean_high"]))
    assert exact["perplexity"] == "7.3891"
