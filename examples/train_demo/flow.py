"""Holds the flow-matching training of denoiser and text encoders; knows nothing of files."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .autoencoder import half_precision
from .clock import Clock
from .fast_blocks import CompileSwitch, prepare
from .models import Networks
from .muon import Muon
from .pictures import Picture
from .prompts import wordings
from .tokenise import CLIP_LENGTH, T5_LENGTH, encode

MUON_RATE, ADAM_RATE, ADAM_BETAS = 4e-3, 2e-3, (0.9, 0.98)
WARM_UP_STEPS = 100
FLAT_PART = 0.6
EMA = 0.995
PAINTED_PART = 0.3
UNKNOWN_ID, UNKNOWN_PART = 2, 0.03
PLAIN_WORDINGS, PAINTED_WORDINGS = 64, 12
TIME_SHIFT = 2.0


@dataclass(frozen=True)
class Shape:
    """One shape of training step; a batch has one text length, as a pipeline call has."""

    side: int
    text_tokens: int
    batch: int
    weight: float

    @property
    def name(self) -> str:
        """A file-safe name."""
        return f"{self.side}-{self.text_tokens}-{self.batch}"

    @property
    def tokens(self) -> int:
        """Image and text tokens of one picture."""
        return (self.side // 4) ** 2 + self.text_tokens


@dataclass(frozen=True)
class Schedule:
    """The shapes of the two phases, and how much of the time the first takes."""

    low: tuple[Shape, ...] = (
        Shape(64, 32, 512, 0.7),
        Shape(64, 128, 512, 0.2),
        Shape(64, 512, 256, 0.1),
    )
    full: tuple[Shape, ...] = (
        Shape(128, 32, 256, 0.6),
        Shape(128, 128, 256, 0.2),
        Shape(128, 512, 192, 0.2),
    )
    low_part: float = 0.33
    # Without compiled blocks the activations of a batch take about three times the memory.
    plain_tokens: int = 100_000


@dataclass
class Corpus:
    """Latents by picture side and prompt ids by wording, all on one device."""

    latents: dict[int, Tensor]
    plain: int
    clip_ids: Tensor
    t5_ids: Tensor
    first: Tensor
    count: Tensor
    ids: dict[int, Tensor] = field(default_factory=dict)


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] to the pipeline's tokens of 2x2 latents [B, H/2 * W/2, 4 C]."""
    b, c, h, w = latents.shape
    tiles = latents.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(b, (h // 2) * (w // 2), c * 4)


def image_ids(side: int, full_side: int, device: torch.device) -> Tensor:
    """Rotary positions [tokens, 3]; a token of a shrunk picture sits amid those it stands for."""
    scale = full_side / side
    line = (torch.arange(side // 4, device=device) + 0.5) * scale - 0.5
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)


def make_corpus(
    pictures: list[Picture],
    latents: dict[int, Tensor],
    clip_tokenizer: Any,
    word_tokenizer: Any,
    seed: int,
) -> Corpus:
    """Word every picture, encode the wordings, and put all on the latents' device."""
    rng = random.Random(seed)
    texts: list[str] = []
    counts = []
    for picture in pictures:
        part = wordings(picture, PAINTED_WORDINGS if picture.repainted else PLAIN_WORDINGS, rng)
        texts += part
        counts.append(len(part))
    device = next(iter(latents.values())).device
    count = torch.tensor(counts, device=device)

    def ids(tokenizer: Any, length: int) -> Tensor:
        array = encode(tokenizer, texts, length, tokenizer.pad_token_id)
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Corpus(
        latents={side: pack(x).bfloat16() for side, x in latents.items()},
        plain=sum(not picture.repainted for picture in pictures),
        clip_ids=ids(clip_tokenizer, CLIP_LENGTH),
        t5_ids=ids(word_tokenizer, T5_LENGTH),
        first=count.cumsum(0) - count,
        count=count,
        ids={side: image_ids(side, max(latents), device) for side in latents},
    )


@dataclass(frozen=True)
class Batch:
    """What one training step sees; the first axis of each tensor is the batch."""

    mixed: Tensor  # [B, tokens, 16]
    target: Tensor  # [B, tokens, 16]
    time: Tensor  # [B]
    clip_ids: Tensor  # [B, 64]
    t5_ids: Tensor  # [B, text tokens]

    def rows(self, start: int, stop: int) -> "Batch":
        """The part of the batch from start to stop."""
        names = ("mixed", "target", "time", "clip_ids", "t5_ids")
        return Batch(*(getattr(self, name)[start:stop] for name in names))


def make_batch(corpus: Corpus, shape: Shape, batch: int) -> Batch:
    """Random pictures under random wordings at random times."""
    device = corpus.count.device
    total = len(corpus.count)
    draw = torch.rand(3, batch, device=device)
    plain = (draw[0] * corpus.plain).long()
    painted = corpus.plain + (draw[0] * (total - corpus.plain)).long()
    picture = torch.where(draw[1] < PAINTED_PART, painted, plain).clamp_max(total - 1)
    row = corpus.first[picture] + (draw[2] * corpus.count[picture]).long()
    t5 = corpus.t5_ids[row]
    unknown = (torch.rand(t5.shape, device=device) < UNKNOWN_PART) & (t5 > UNKNOWN_ID)
    t5 = torch.where(unknown, UNKNOWN_ID, t5)
    if shape.text_tokens > t5.shape[1]:
        t5 = nn.functional.pad(t5, (0, shape.text_tokens - t5.shape[1]))
    clean = corpus.latents[shape.side][picture].float()
    noise = torch.randn_like(clean)
    u = torch.rand(batch, device=device)
    time = TIME_SHIFT * u / (1 + (TIME_SHIFT - 1) * u)
    mixed = (1 - time)[:, None, None] * clean + time[:, None, None] * noise
    return Batch(mixed, noise - clean, time, corpus.clip_ids[row], t5)


def velocity_error(networks: Networks, batch: Batch, positions: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity of each picture: [B]."""
    device = batch.mixed.device
    with half_precision(device):
        velocity = networks.transformer(
            hidden_states=batch.mixed,
            timestep=batch.time,
            encoder_hidden_states=networks.t5(input_ids=batch.t5_ids).last_hidden_state,
            pooled_projections=networks.clip(input_ids=batch.clip_ids).pooler_output,
            txt_ids=torch.zeros(batch.t5_ids.shape[1], 3, device=device),
            img_ids=positions,
            return_dict=False,
        )[0]
    return (velocity.float() - batch.target).square().mean((1, 2))


def split_parameters(networks: Networks) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks and encoder layers, all other parameters)."""
    matrices, others = [], []
    for module in networks.modules():
        for name, parameter in module.named_parameters():
            hidden = any(part in name for part in ("blocks.", "layers.", "block."))
            inner = "relative_attention_bias" not in name
            (matrices if hidden and inner and parameter.ndim == 2 else others).append(parameter)
    return matrices, others


def rate_factor(step: int, progress: float) -> float:
    """Warm-up by steps, flat, then linear to 0 at progress 1."""
    fall = min(1.0, max(0.0, (1 - progress) / (1 - FLAT_PART)))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * fall


@dataclass
class Average:
    """The exponential moving average of the parameters, which is what gets exported."""

    live: list[Tensor]
    mean: list[Tensor]

    def update(self) -> None:
        """Move the average toward the live parameters."""
        torch._foreach_lerp_(self.mean, self.live, 1 - EMA)

    def install(self) -> None:
        """Copy the average into the live parameters."""
        torch._foreach_copy_(self.live, self.mean)


def train_flow(
    networks: Networks,
    corpus: Corpus,
    schedule: Schedule,
    seconds: float,
    is_ready: Callable[[Shape], bool],
    clock: Clock,
    seed: int,
) -> dict[str, Any]:
    """Train for the time given and leave the averaged weights in the networks; what was done.

    is_ready says whether a shape's compiled blocks are known to work; till then it runs plain.
    """
    prepare(networks.transformer)
    switch = CompileSwitch(networks.transformer)
    matrices, others = split_parameters(networks)
    muon = Muon(matrices, MUON_RATE)
    adam = torch.optim.AdamW(others, ADAM_RATE, ADAM_BETAS, weight_decay=0.0, fused=True)
    parameters = matrices + others
    live = [parameter.detach() for parameter in parameters]
    average = Average(live, [tensor.clone() for tensor in live])
    rng = random.Random(seed)
    ready: set[Shape] = set()
    seen = {"low": 0, "full": 0}
    steps = {"low": 0, "full": 0}
    last_log, pictures_at_log = clock.seconds(), 0
    began, step = last_log, 0
    while (progress := (clock.seconds() - began) / seconds) < 1:
        phase = "low" if progress < schedule.low_part else "full"
        shapes = schedule.low if phase == "low" else schedule.full
        shape = rng.choices(shapes, [s.weight for s in shapes])[0]
        if shape not in ready and is_ready(shape):
            ready.add(shape)
            clock.log(f"step {step}: compiled blocks for {shape.name}")
        compiled = shape in ready
        switch.set(compiled)
        batch = shape.batch if compiled else min(shape.batch, schedule.plain_tokens // shape.tokens)
        factor = rate_factor(step, progress)
        muon.rate = MUON_RATE * factor
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        sample = make_batch(corpus, shape, batch)
        losses, times = velocity_error(networks, sample, corpus.ids[shape.side]), sample.time
        adam.zero_grad()
        for matrix in matrices:
            matrix.grad = None
        losses.mean().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        muon.step()
        adam.step()
        average.update()
        seen[phase] += batch
        steps[phase] += 1
        if step in (5, 20) or step % 100 == 0:
            noisy, clear = losses[times > 0.9].mean().item(), losses[times < 0.5].mean().item()
            if not bool(losses.isfinite().all()):
                raise RuntimeError(f"the loss of step {step} is not finite: training has failed")
            now = clock.seconds()
            pace = (sum(seen.values()) - pictures_at_log) / (now - last_log)
            last_log, pictures_at_log = now, sum(seen.values())
            clock.log(
                f"flow step {step} {phase} {shape.name} loss {losses.mean().item():.4f} "
                f"(t>.9 {noisy:.4f}, t<.5 {clear:.4f}) {pace:.0f} pictures/s"
            )
        step += 1
    switch.set(False)
    average.install()
    return {"steps": steps, "pictures": seen, "compiled": sorted(s.name for s in ready)}
