"""The language model of the benchmark: a small Llama from random weights, and its training by the
clock on the corpus with tasks woven in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.corpus import VOCABULARY
from benchmarks.quality.tasks import training_rows
from examples.train_demo.muon import Muon

LONGEST = 32768
ROPE_THETA = 500000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Size:
    """Width, layers, heads, and how it is trained: `stages` are (share of the time, tokens a row);
    every step has `step_tokens`, or one row where that is longer.
    """

    hidden: int = 640
    inner: int = 1792
    layers: int = 8
    heads: int = 10
    kv_heads: int = 2
    head_dim: int = 64
    stages: tuple[tuple[float, int], ...] = (
        (0.20, 512),
        (0.20, 2048),
        (0.18, 8192),
        (0.16, 16384),
        (0.26, LONGEST),
    )
    step_tokens: int = 16384


FULL = Size()
# To prove that everything runs; learns nothing.
TINY = Size(64, 128, 2, 2, 1, 32, ((0.5, 512), (0.5, 4096)), 2048)

MUON_RATE, ADAM_RATE = 4e-3, 2e-3
# The rate stays high for most of the time: each longer context is to be learnt anew.
WARM_STEPS, FLAT = 60, 0.7
# One item a so many tokens of a training row, and the share of rows that have any.
TOKENS_AN_ITEM, SHARE_WITH_ITEMS, MOST_ITEMS = 120, 0.8, 160


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
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama's: in FP32, rounded before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, True) + NORM_EPS)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [T, H, D] by cos and sin [T, 1, D], halves rotated."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def before(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer does before attention: x [T, C] to q, k, v [T, heads, D]."""
    h = rms_norm(x, norm)
    q, k, v = ((h @ w.T).unflatten(1, (-1, cos.shape[-1])) for w in (wq, wk, wv))
    return turned(q, cos, sin), turned(k, cos, sin), v


def after(
    x: Tensor, attended: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """What a layer does after attention: x [T, C], attended [T, heads * D] to [T, C]."""
    x = x + attended @ wo.T
    h = rms_norm(x, norm)
    return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def losses_of(
    x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the losses of x [T, C], and of plain text and of answers the sums and
    counts, [4]; targets and weights [T].
    """
    losses = F.cross_entropy((rms_norm(x, norm) @ head.T).float(), targets, reduction="none")
    text, answer = weights == 1, weights > 1
    shown = [(losses * text).sum(), text.sum(), (losses * answer).sum(), answer.sum()]
    return (losses * weights).sum(), torch.stack(shown).detach()


def rotations(length: int, dim: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """cos and sin of RoPE, [length, 1, dim] each."""
    inverse = ROPE_THETA ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    wide = torch.cat([angles, angles], 1).unsqueeze(1)
    return [wide.cos().to(dtype), wide.sin().to(dtype)]


def rate_at(share: float, step: int) -> float:
    """The learning rate as a share of the largest: a warm-up, flat, then linear to 0."""
    warm = min(1.0, (step + 1) / WARM_STEPS)
    return warm * min(1.0, (1 - share) / (1 - FLAT))


class Trainer:
    """A model in training: `dtype` weights for the products, FP32 masters for the steps.

    What works token by token is compiled once, for `step_tokens` of them, and serves every layer
    and every length; attention runs between.
    """

    def __init__(self, size: Size, device: torch.device, compiled: bool) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.size, self.device = size, device
        self.model = new_model(size, device, dtype)
        self.weights = list(self.model.parameters())
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        hidden = {id(p) for p in self.model.model.layers.parameters() if p.dim() == 2}
        pairs = list(zip(self.weights, self.masters, strict=True))
        self.muon = Muon([master for weight, master in pairs if id(weight) in hidden], MUON_RATE)
        rest = [master for weight, master in pairs if id(weight) not in hidden]
        self.adam = torch.optim.AdamW(
            rest, ADAM_RATE, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.before, self.after, self.losses_of = before, after, losses_of
        if compiled:
            self.before, self.after, self.losses_of = (
                torch.compile(f, dynamic=False) for f in (before, after, losses_of)
            )
        longest = max(length for _, length in size.stages)
        self.rope = rotations(longest, size.head_dim, device, dtype)

    def hidden(self, ids: Tensor) -> list[Tensor]:
        """The residual stream after the last layer, in parts of `step_tokens`; ids [R, S]."""
        rows, length = ids.shape
        cos, sin = (t[:length].repeat(rows, 1, 1).split(self.size.step_tokens) for t in self.rope)
        stream = list(self.model.model.embed_tokens(ids.flatten()).split(self.size.step_tokens))
        for layer in self.model.model.layers:
            a, m = layer.self_attn, layer.mlp
            projections = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
            parts = [
                self.before(x, layer.input_layernorm.weight, *projections, c, s)
                for x, c, s in zip(stream, cos, sin, strict=True)
            ]
            q, k, v = (
                torch.cat(p).unflatten(0, (rows, length)).transpose(1, 2)
                for p in zip(*parts, strict=True)
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended = out.transpose(1, 2).reshape(rows * length, -1).split(self.size.step_tokens)
            rest = (m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)
            stream = [
                self.after(x, y, a.o_proj.weight, layer.post_attention_layernorm.weight, *rest)
                for x, y in zip(stream, attended, strict=True)
            ]
        return stream

    def forward_backward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Gradients of one batch [R, S]; returns the sums of `losses_of`."""
        # The last token of a row has no successor.
        targets = F.pad(ids[:, 1:], (0, 1)).flatten().split(self.size.step_tokens)
        worth = F.pad(weights[:, 1:], (0, 1)).flatten()
        head, norm = self.model.lm_head.weight, self.model.model.norm.weight
        parts = [
            self.losses_of(x, norm, head, t, w)
            for x, t, w in zip(
                self.hidden(ids), targets, worth.split(self.size.step_tokens), strict=True
            )
        ]
        loss = torch.stack([total for total, _ in parts]).sum() / worth.sum()
        loss.backward()
        return torch.stack([shown for _, shown in parts]).sum(0)

    def step(self, ids: Tensor, weights: Tensor, rate: float) -> Tensor:
        """One update; returns the sums of `losses_of`."""
        shown = self.forward_backward(ids, weights)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
            nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.muon.rate = MUON_RATE * rate
            self.adam.param_groups[0]["lr"] = ADAM_RATE * rate
            self.muon.step()
            self.adam.step()
            torch._foreach_copy_(self.weights, self.masters)
        return shown

    def warm(self) -> None:
        """Compile before the clock starts; gradients are thrown away."""
        length = self.size.stages[0][1]
        rows = self.size.step_tokens // length
        ids = torch.randint(0, VOCABULARY, (rows, length), device=self.device)
        self.forward_backward(ids, torch.ones(rows, length, device=self.device))
        for weight in self.weights:
            weight.grad = None


def train(trainer: Trainer, tokens: Tensor, seconds: float) -> Iterator[dict[str, object]]:
    """Train for so long on a stream of tokens on the device; rows of a log."""
    generator = torch.Generator(trainer.device).manual_seed(0)
    started = time.perf_counter()
    step = seen = 0
    end = 0.0
    for share, length in trainer.size.stages:
        end += share
        sums: list[Tensor] = []
        reach = torch.arange(length, device=trainer.device)
        rows = max(1, trainer.size.step_tokens // length)
        items = min(MOST_ITEMS, length // TOKENS_AN_ITEM)
        while (now := time.perf_counter() - started) < end * seconds or not sums:
            starts = torch.randint(
                0, len(tokens) - length, (rows, 1), generator=generator, device=trainer.device
            )
            ids, weights = training_rows(
                tokens[starts + reach].long(), items, SHARE_WITH_ITEMS, generator
            )
            sums.append(trainer.step(ids, weights, rate_at(min(1.0, now / seconds), step)))
            step += 1
            seen += ids.numel()
            if step in (1, 10, 30) or step % 100 == 0:
                yield _logged(step, seen, length, started, sums)
                sums = sums[-1:]
            elif trainer.device.type == "cuda" and step % 8 == 0:
                # The clock counts work done, not work queued.
                torch.cuda.synchronize()
        yield _logged(step, seen, length, started, sums)


def _logged(
    step: int, seen: int, length: int, started: float, sums: list[Tensor]
) -> dict[str, object]:
    text, texts, answer, answers = torch.stack(sums).sum(0).tolist()
    if not math.isfinite(text + answer):
        raise RuntimeError(f"the loss is not finite at step {step}")
    return {
        "step": step,
        "tokens": seen,
        "length": length,
        "seconds": f"{time.perf_counter() - started:.1f}",
        "loss_text": f"{text / max(1, texts):.4f}",
        "loss_answers": f"{answer / max(1, answers):.4f}",
    }
