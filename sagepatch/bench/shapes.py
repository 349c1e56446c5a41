"""The calls that are measured, by name. Pure; times nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sagepatch.spec import Call

# Before a kernel is timed on a shape it is checked against its emulator on a smaller one, at most
# this large.
CHECKED_BATCH, CHECKED_HEADS = 2, 2
CHECKED_LENGTH = 1008
# Triton compiles other machine code for sizes that are 1 or a multiple of this. The smaller shape
# has so many heads that its sizes are multiples where the larger one's are: what is checked is the
# code that is timed.
SPECIAL = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Self-attention of one size by name: [batch, q_heads, length, head_dim] with kv_heads keys."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Operations of both matrix products, halved where causal."""
        whole = 4.0 * self.batch * self.q_heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole

    def reduced(self) -> Shape:
        """The same kind of call, small enough to emulate, for the same machine code."""
        shared = self.q_heads // self.kv_heads

        def alike(heads: int) -> bool:
            pairs = ((heads, self.kv_heads), (heads * shared, self.q_heads))
            return all((few % SPECIAL == 0) == (all_ % SPECIAL == 0) for few, all_ in pairs)

        least = min(CHECKED_HEADS, self.kv_heads)
        heads = next(heads for heads in range(least, self.kv_heads + 1) if alike(heads))
        return replace(
            self,
            batch=min(CHECKED_BATCH, self.batch),
            q_heads=heads * shared,
            kv_heads=heads,
            length=min(CHECKED_LENGTH, self.length),
        )

    def call(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Random normal q, k, v of this shape from a fixed seed."""
        generator = torch.Generator(device).manual_seed(0)

        def noise(heads: int) -> torch.Tensor:
            size = (self.batch, heads, self.length, self.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        q, k, v = noise(self.q_heads), noise(self.kv_heads), noise(self.kv_heads)
        return Call(q, k, v, self.head_dim**-0.5, causal_offset=0 if self.causal else None)


# What `sagepatch bench` measures unasked: images, a language model, what is too short to gain, and
# a video. The most telling first, as time may run out; they fit in 4 GB.
STANDARD = (
    Shape("flux_1024", 1, 24, 24, 4608, 128),
    Shape("sdxl_1024", 2, 10, 10, 4096, 64),
    Shape("llama_4k_causal", 1, 32, 8, 4096, 128, True),
    Shape("d128_1k", 8, 32, 32, 1024, 128),
    Shape("cogvideox_2b", 2, 30, 30, 17776, 64),
)
# By name only: large GPUs.
LARGE = (
    Shape("hunyuan_33k", 1, 24, 24, 32768, 128),
    Shape("llama_8k_causal", 4, 32, 32, 8192, 128, True),
    Shape("d64_16k", 1, 32, 32, 16384, 64),
    Shape("d128_16k", 1, 32, 32, 16384, 128),
    Shape("d128_4k", 4, 32, 32, 4096, 128),
    Shape("d64_8k_causal", 2, 32, 32, 8192, 64, True),
)
# What a CPU can emulate in a moment.
SMALL = (
    Shape("small_d64", 1, 2, 2, 500, 64),
    Shape("small_d128_causal_gqa", 1, 4, 2, 333, 128, True),
)
SHAPES = {shape.name: shape for shape in (*STANDARD, *LARGE, *SMALL)}
