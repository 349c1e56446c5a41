"""The language model of the benchmark: a small Llama from random weights, and its training by the
clock on the corpus with tasks woven in.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.quality.corpus import VOCABULARY
from benchmarks.quality.tasks import training_row
from examples.train_demo.muon import Muon

LONGEST = 32768


@dataclass(frozen=True, slots=True)
class Size:
    """Width, layers, heads, and how it is trained: `stages` are (share of the time, tokens a row);
    every step has `step_tokens`.
    """

    hidden: int = 640
    inner: int = 1792
    layers: int = 8
    heads: int = 10
    kv_heads: int = 2
    head_dim: int = 64
    stages: tuple[tuple[float, int], ...] = ((0.62, 2048), (0.22, 8192), (0.16, LONGEST))
    step_tokens: int = 32768


FULL = Size()
# To prove that everything runs; learns nothing.
TINY = Size(64, 128, 2, 2, 1, 32, ((0.5, 512), (0.5, 1024)), 2048)

MUON_RATE, ADAM_RATE = 4e-3, 2e-3
WARM_STEPS, FLAT = 60, 0.45
# One item a so many tokens of a training row, and the share of rows that have any.
TOKENS_AN_ITEM, SHARE_WITH_ITEMS = 120, 0.6
MOST_ITEMS = 64


def new_model(size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama with random weights; positions as trained up to `LONGEST`, no scaling of RoPE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype)


def loss_of(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted mean loss of a step, and the sums of plain text and of answers with their
    counts [4]; hidden [T, C], head [vocabulary, C], targets and weights [T].
    """
    losses = F.cross_entropy((hidden @ head.T).float(), targets, reduction="none")
    answer = weights > 1
    text = weights == 1
    shown = torch.stack([(losses * text).sum(), text.sum(), (losses * answer).sum(), answer.sum()])
    return (losses * weights).sum() / weights.sum(), shown.detach()


class Feeder:
    """Training batches, made by threads ahead of the model; ends with the process."""

    def __init__(self, tokens: NDArray[np.uint16], size: Size, device: torch.device) -> None:
        self.tokens, self.step_tokens, self.device = tokens, size.step_tokens, device
        self._length = size.stages[0][1]
        self._ready: queue.Queue[tuple[int, Tensor, Tensor]] = queue.Queue(6)
        for number in range(3):
            threading.Thread(target=self._fill, args=(number,), daemon=True).start()

    def batch(self, length: int) -> tuple[Tensor, Tensor]:
        """Ids and loss weights [rows, length] on the device."""
        self._length = length
        while True:
            made, ids, weights = self._ready.get()
            if made == length:
                return (
                    ids.to(self.device, non_blocking=True),
                    weights.to(self.device, non_blocking=True),
                )

    def _fill(self, number: int) -> None:
        chance = np.random.default_rng(number)
        pin = self.device.type == "cuda"
        while True:
            length = self._length
            rows = [self._row(length, chance) for _ in range(max(1, self.step_tokens // length))]
            ids = torch.from_numpy(np.stack([row[0] for row in rows]))
            weights = torch.from_numpy(np.stack([row[1] for row in rows]))
            if pin:
                ids, weights = ids.pin_memory(), weights.pin_memory()
            self._ready.put((length, ids, weights))

    def _row(
        self, length: int, chance: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        start = int(chance.integers(0, len(self.tokens) - length))
        items = 0
        if chance.random() < SHARE_WITH_ITEMS:
            items = min(MOST_ITEMS, length // TOKENS_AN_ITEM)
        return training_row(self.tokens[start : start + length], items, chance)


def rate_at(share: float, step: int) -> float:
    """The learning rate as a share of the largest: a warm-up, flat, then linear to 0."""
    warm = min(1.0, (step + 1) / WARM_STEPS)
    return warm * min(1.0, (1 - share) / (1 - FLAT))


class Trainer:
    """A model in training: `dtype` weights for the products, FP32 masters for the steps."""

    def __init__(self, size: Size, device: torch.device, compiled: bool) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.size, self.device = size, device
        self.model = new_model(size, device, dtype)
        self.model.config.use_cache = False
        self.body = self.model.model
        self.weights = list(self.model.parameters())
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        hidden = {id(p) for p in self.body.layers.parameters() if p.dim() == 2}
        pairs = list(zip(self.weights, self.masters, strict=True))
        self.muon = Muon([master for weight, master in pairs if id(weight) in hidden], MUON_RATE)
        rest = [master for weight, master in pairs if id(weight) not in hidden]
        self.adam = torch.optim.AdamW(
            rest, ADAM_RATE, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.loss_of = loss_of
        if compiled:
            # One graph for all layers of a stage: compiling the whole model takes minutes.
            for layer in self.body.layers:
                layer.compile(dynamic=False)
            self.loss_of = torch.compile(loss_of, dynamic=False)

    def forward_backward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Gradients of one batch [rows, S]; returns the sums of `loss_of`."""
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        loss, shown = self.loss_of(
            hidden[:, :-1].flatten(0, 1),
            self.model.lm_head.weight,
            ids[:, 1:].flatten(),
            weights[:, 1:].flatten(),
        )
        loss.backward()
        return shown

    def step(self, ids: Tensor, weights: Tensor, rate: float) -> Tensor:
        """One update; returns the sums of `loss_of`."""
        shown = self.forward_backward(ids, weights)
        with torch.no_grad():
            grads = [weight.grad for weight in self.weights]
            for weight, master, grad in zip(self.weights, self.masters, grads, strict=True):
                master.grad, weight.grad = grad.float(), None
            nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.muon.rate = MUON_RATE * rate
            self.adam.param_groups[0]["lr"] = ADAM_RATE * rate
            self.muon.step()
            self.adam.step()
            torch._foreach_copy_(self.weights, self.masters)
        return shown

    def warm(self) -> None:
        """Compile for every stage before the clock starts; gradients are thrown away."""
        for _, length in self.size.stages:
            rows = max(1, self.size.step_tokens // length)
            ids = torch.randint(0, VOCABULARY, (rows, length), device=self.device)
            self.forward_backward(ids, torch.ones(rows, length, device=self.device))
            for weight in self.weights:
                weight.grad = None


def train(
    trainer: Trainer, tokens: NDArray[np.uint16], seconds: float
) -> Iterator[dict[str, object]]:
    """Train for so long; a row of the log at times, and one at the end of each stage."""
    feeder = Feeder(tokens, trainer.size, trainer.device)
    started = time.perf_counter()
    step = seen = 0
    end = 0.0
    for share, length in trainer.size.stages:
        end += share
        sums: list[Tensor] = []
        while (now := time.perf_counter() - started) < end * seconds or not sums:
            ids, weights = feeder.batch(length)
            sums.append(trainer.step(ids, weights, rate_at(min(1.0, now / seconds), step)))
            step += 1
            seen += ids.numel()
            if step in (1, 10, 30) or step % 100 == 0:
                # Waits for the device, and so keeps the clock honest.
                yield _logged(step, seen, length, time.perf_counter() - started, sums)
                sums = sums[-1:]
            elif trainer.device.type == "cuda" and step % 8 == 0:
                torch.cuda.synchronize()
        yield _logged(step, seen, length, time.perf_counter() - started, sums)


def _logged(
    step: int, seen: int, length: int, seconds: float, sums: list[Tensor]
) -> dict[str, object]:
    text, texts, answer, answers = torch.stack(sums).sum(0).tolist()
    if not np.isfinite(text + answer):
        raise RuntimeError(f"the loss is not finite at step {step}")
    return {
        "step": step,
        "tokens": seen,
        "length": length,
        "seconds": f"{seconds:.1f}",
        "loss_text": f"{text / max(1, texts):.4f}",
        "loss_answers": f"{answer / max(1, answers):.4f}",
    }
