"""What the tests ask alike of every family of GPU kernels. `run(call, recipe)` is the family's
entry, which gives the output and the log-sum-exp. Knows no kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

Run = Callable[[Call, Recipe], tuple[Tensor, Tensor | None]]


def zero_channels_come_out_zero(run: Run, call: Call, recipe: Recipe) -> None:
    """A channel of zeros in V, V all zero, K all zero."""
    plain, _ = run(call, recipe)
    v = call.v.clone()
    v[..., 3] = 0
    out, _ = run(replace(call, v=v), recipe)
    assert not out[..., 3].any()
    others = [c for c in range(v.shape[3]) if c != 3]
    assert torch.equal(out[..., others], plain[..., others])
    nothing, _ = run(replace(call, v=torch.zeros_like(v)), recipe)
    assert not nothing.any()
    even, _ = run(replace(call, k=torch.zeros_like(call.k)), recipe)
    mean = call.v.float().mean(2, keepdim=True).expand_as(even)
    assert compare(even.float(), mean).worst.cosine > 0.99


def equal_values_come_out_as_they_are(run: Run, call: Call, recipe: Recipe) -> None:
    """V of one number, seen by queries through equal keys."""
    flat = torch.full_like(call.v, 300.0)
    same = replace(call, k=call.k[:, :, :1].expand_as(call.k), v=flat)
    out, _ = run(same, recipe)
    wanted = flat[:, :, : call.q.shape[2]].float()
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0)


def what_a_mask_adds_is_as_in_sdpa(run: Run, call: Call, recipe: Recipe) -> None:
    """In an additive mask +inf and NaN spoil their rows and no others, unless position hides them;
    the largest finite number does not, it is all the row sees. `call` has square scores, no mask.
    """
    queries, keys = call.q.shape[2], call.k.shape[2]
    gen = torch.Generator().manual_seed(3)
    # Nowhere 0: no tile is taken for one that the mask leaves as it is.
    plain = torch.randn(queries, keys, generator=gen).to(call.q.device)
    mask = plain.clone()
    bad = {3: (0, torch.inf), 20: (keys - 1, torch.inf), queries - 1: (keys // 2, torch.inf)}
    bad[queries // 2] = (1, torch.nan)
    for row, (key, value) in bad.items():
        mask[row, key] = value
    mask[4, 2:4] = torch.inf
    mask[9, 6] = torch.finfo(mask.dtype).max
    spoiled = torch.tensor([*bad, 4], device=mask.device)
    others = torch.tensor([i for i in range(queries) if i not in (*bad, 4, 9)], device=mask.device)
    out, lse = run(replace(call, attn_mask=mask, return_lse=True), recipe)
    whole, whole_lse = run(replace(call, attn_mask=plain, return_lse=True), recipe)
    assert lse is not None
    assert whole_lse is not None
    assert bool(out[:, :, spoiled].isnan().all())
    assert bool(lse[:, :, spoiled].isnan().all())
    assert torch.equal(out[:, :, others], whole[:, :, others])
    assert torch.equal(lse[:, :, others], whole_lse[:, :, others])
    # 8-bit codes of V, beside the largest of their channel.
    apart = (out[:, :, 9].float() - call.v[:, :, 6].float()).abs()
    assert bool((apart <= 0.1 * call.v.float().abs().amax(2)).all())
    hidden = replace(call, causal_offset=0, attn_mask=plain, return_lse=False)
    future = plain.masked_fill(torch.ones_like(plain).triu(1) > 0, torch.inf)
    out, _ = run(replace(hidden, attn_mask=future), recipe)
    wanted, _ = run(hidden, recipe)
    assert bool(out.isfinite().all())
    assert torch.equal(out, wanted)


def error_does_not_grow_with_length(
    run: Run,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    lengths: Sequence[int] = (8192, 131_072, 163_840, 200_000),
) -> None:
    """256 queries, of which three each look for one key: in the first, the middle and the last
    block. A block that is left out or read elsewhere costs one of them its key.
    """
    shortest: float | None = None
    for length in lengths:
        gen = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, 2, length, 128, generator=gen).to(device, dtype) for _ in range(3)
        )
        rows = torch.randperm(length, generator=gen)[:256].to(device)
        needles = torch.tensor([0, length // 2, length - 1], device=device)
        k[:, :, needles] = 3 * q[:, :, rows[:3]]
        out, _ = run(Call(q, k, v, 128**-0.5), recipe)
        wanted, _ = exact(Call(q[:, :, rows], k, v, 128**-0.5))
        ours = out[:, :, rows].float()
        finders = compare(ours[:, :, :3], wanted[:, :, :3]).worst.rel_l1
        others = compare(ours[:, :, 3:], wanted[:, :, 3:]).worst.rel_l1
        assert finders < 0.1, (length, finders)
        shortest = others if shortest is None else shortest
        assert others < 2 * shortest, (length, others, shortest)


def threads_share_kernels(run: Run, call: Call, names: Sequence[str]) -> None:
    """Four threads on streams of their own take turns at kernels, results equal to the bit."""
    expected = {name: run(call, RECIPES[name])[0] for name in names}
    wrong: list[str] = []

    def work(turn: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(30):
                name = names[(turn + step) % len(names)]
                out, _ = run(call, RECIPES[name])
                stream.synchronize()
                if not torch.equal(out, expected[name]):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
