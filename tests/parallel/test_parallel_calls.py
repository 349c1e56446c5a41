"""Single calls under context parallelism against one process: the merge of a ring, masks, uneven
shares, and what is left to diffusers, with the reason.
"""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import transformers
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from parallel.ranks import NCCL, on_ranks
from parallel.work import CallCase, CallTold, each, one_call
from torch import Tensor

from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.errors import InvalidArgument
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.patchers import parallel
from sagepatch.patchers.diffusers_dispatch import make_dispatch
from sagepatch.patchers.diffusers_processors import Route, class_way
from sagepatch.patchers.parallel import (
    CAUSAL,
    GROUPED,
    HEAD_MASK,
    OTHER_KIND,
    QUERY_MASK,
    RING_MASK,
    exchanged_once,
    goes_together,
    name_handle,
    refusal,
)
from sagepatch.patchers.sdpa_redirect import DROPOUT, TRAINING

ULYSSES, RING = {"ulysses_degree": 2}, {"ring_degree": 2}
ANY_ULYSSES = {**ULYSSES, "ulysses_anything": True}
ANY_RING = {**RING, "ring_anything": True}
EXACT, INT8, INT4 = "sdpa.exact", "emulated.sage2_8", "emulated.sage2_4"
NO_LSE = "ValueError: Native attention does not support return_lse=True"


def tensors(
    S: int = 64, H: int = 4, D: int = 32, dtype: torch.dtype = torch.float32, Hkv: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys far from zero, and further in the second half: smoothing takes their mean, of each
    process another, so only the log-sum-exp of the unsmoothed scores merges rightly.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, S, H, D, generator=g).to(dtype).unbind(0)
    k = k + torch.linspace(-1, 1, D).to(dtype)
    k[:, S // 2 :] += torch.linspace(0, 1.5, D).to(dtype)
    return q, k[:, :, : Hkv or H], v[:, :, : Hkv or H]


def padding(S: int) -> Tensor:
    """[2, S]: the second sample ends early, in the second process's share."""
    return torch.arange(S)[None] < torch.tensor([[S], [S - S // 4]])


def by_head(S: int) -> Tensor:
    """[2, 4, 1, S]: each head of each sample keeps another number of keys."""
    kept = S - torch.arange(8).view(2, 4, 1, 1) * 5
    return torch.arange(S).view(1, 1, 1, S) < kept


def one_process(case: CallCase) -> Tensor:
    """Exact, in FP64."""
    q, k, v = (tensor.double() for tensor in (case.q, case.k, case.v))
    out: Tensor = dispatch_attention_fn(q, k, v, **case.options)
    return out


def one_process_patched(case: CallCase) -> Tensor:
    """The case's kernel on all tokens and heads at once."""
    policy, request = Policy(emulate=True), Request(case.variant, True)
    layer = PatchedLayer("site", "self", policy, request, unusable)
    dispatch = make_dispatch(dispatch_attention_fn, None)
    out: Tensor = dispatch(case.q, case.k, case.v, **case.options, backend=layer.handle)
    return out


def error_of(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


SERVED: dict[str, CallCase] = {
    "exact": CallCase(ULYSSES, EXACT, *tensors()),
    "INT8": CallCase(ULYSSES, INT8, *tensors()),
    "bf16": CallCase(ULYSSES, INT8, *tensors(dtype=torch.bfloat16)),
    "ring, exact": CallCase(RING, EXACT, *tensors()),
    "ring, INT8": CallCase(RING, INT8, *tensors()),
    "ring, INT4": CallCase(RING, INT4, *tensors()),
    "ring, bf16": CallCase(RING, INT8, *tensors(dtype=torch.bfloat16)),
    "ring, merged in bf16": CallCase(
        {**RING, "convert_to_fp32": False}, INT8, *tensors(dtype=torch.bfloat16)
    ),
    "ring, scale": CallCase(RING, INT8, *tensors(), {"scale": 0.3}),
    "padding of two axes": CallCase(ULYSSES, INT8, *tensors(), {"attn_mask": padding(64)}),
    "padding, exact": CallCase(
        ULYSSES, EXACT, *tensors(), {"attn_mask": padding(64)[:, None, None]}
    ),
    "additive padding": CallCase(
        ULYSSES,
        INT8,
        *tensors(),
        {"attn_mask": torch.where(padding(64), 0.0, -1e4)[:, None, None]},
    ),
    # Another share of the keys for each head.
    "padding by head": CallCase(ULYSSES, INT8, *tensors(), {"attn_mask": by_head(64)}),
    "additive, by head": CallCase(
        ULYSSES, EXACT, *tensors(), {"attn_mask": torch.where(by_head(64), 0.0, -1e4)}
    ),
    "padding of one sample for two": CallCase(
        ULYSSES, INT8, *tensors(), {"attn_mask": padding(64)[1:, None, None].expand(2, 1, 1, 64)}
    ),
    "uneven shares, 3 heads": CallCase(ANY_ULYSSES, INT8, *tensors(S=65, H=3)),
    "uneven shares in a ring": CallCase(ANY_RING, INT8, *tensors(S=65, H=3)),
    "by function mode": CallCase(ULYSSES, INT8, *tensors(), redirected=True),
    "uneven padding": CallCase(
        ANY_ULYSSES, INT8, *tensors(S=65), {"attn_mask": padding(65)[:, None, None]}
    ),
}
# Keys are smoothed around the mean of those that some head sees: some heads see fewer than all do.
OTHER_MEANS = ("padding by head",)
# A ring quantises the keys of each process apart, around a mean of their own: about as well.
RING_SLACK = 1.1
# Of an exact ring: sums in FP32, in another order.
FP32_ERROR = 2e-6

LEFT: dict[str, tuple[CallCase, str, str | None]] = {
    # case, reason, the error of diffusers' own way (None where it serves the call)
    "padding in a ring": (
        CallCase(RING, INT8, *tensors(), {"attn_mask": padding(64)}),
        RING_MASK,
        NO_LSE,
    ),
    "causal": (
        CallCase(ULYSSES, INT8, *tensors(), {"is_causal": True}),
        CAUSAL,
        "ValueError: Causal attention is not yet supported for templated attention.",
    ),
    "grouped": (
        CallCase(ULYSSES, INT8, *tensors(Hkv=2), {"enable_gqa": True}),
        GROUPED,
        "ValueError: GQA is not yet supported for templated attention.",
    ),
    "gradients": (CallCase(ULYSSES, INT8, *tensors(), grad=True), TRAINING, None),
    "gradients in a ring": (CallCase(RING, INT8, *tensors(), grad=True), TRAINING, NO_LSE),
    "by function mode in a ring": (CallCase(RING, INT8, *tensors(), redirected=True), "", NO_LSE),
    "dropout": (CallCase(ULYSSES, INT8, *tensors(), {"dropout_p": 1e-9}), DROPOUT, None),
    "strict": (
        CallCase(RING, INT8, *tensors(), {"attn_mask": padding(64)}, strict=True),
        "",
        f"StrictFallback: variant '{INT8}' cannot serve this call: layer 'site': {RING_MASK}",
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[CallTold]]:
    """Every case by name, on both ranks of one pair of processes."""
    cases = {**SERVED, **{name: case for name, (case, _, _) in LEFT.items()}}
    folder = tmp_path_factory.mktemp("ranks")
    ranks = on_ranks(2, each, folder, one_call, list(cases.values()))
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_call_equals_that_of_one_process(name: str, told: dict[str, list[CallTold]]) -> None:
    case = SERVED[name]
    parts = [one.out for one in told[name]]
    assert all(isinstance(part, Tensor) for part in parts), parts
    out = torch.cat([part for part in parts if isinstance(part, Tensor)], 1)
    assert out.dtype == case.v.dtype
    alone = one_process_patched(case)
    if "ring_degree" in case.degrees or name in OTHER_MEANS:
        expected = one_process(case)
        error, allowed = error_of(out, expected), RING_SLACK * error_of(alone, expected)
        assert error < max(allowed, FP32_ERROR)
    else:
        torch.testing.assert_close(out, alone)  # all tokens of some heads: the same numbers
    ring = "ring_degree" in case.degrees
    for one in told[name]:
        assert one.ran == {case.variant: 2 if ring else 1}
        assert not one.fallbacks


ON_GPUS = (
    *("bf16", "ring, bf16", "ring, merged in bf16", "ring, scale", "padding of two axes"),
    *("uneven shares, 3 heads", "uneven shares in a ring", "by function mode"),
)
# A kernel sums in another order than the emulator does.
KERNEL_SLACK = 1.15


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_on_two_gpus(tmp_path: Path) -> None:
    emulated = [SERVED[name] for name in ON_GPUS]
    kernels = [replace(case, variant=f"triton.{case.variant[9:]}") for case in emulated]
    ranks = on_ranks(2, each, tmp_path, one_call, kernels, "cuda", **NCCL)
    for case, kernel, told in zip(emulated, kernels, zip(*ranks, strict=True), strict=True):
        parts = [one.out for one in told]
        assert all(isinstance(part, Tensor) for part in parts), parts
        out = torch.cat([part.cpu() for part in parts if isinstance(part, Tensor)], 1)
        expected = one_process(case)
        alone = error_of(one_process_patched(case), expected)
        assert error_of(out, expected) < RING_SLACK * KERNEL_SLACK * alone
        ring = "ring_degree" in case.degrees
        for one in told:
            assert one.ran == {kernel.variant: 2 if ring else 1}
            assert not one.fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_call_left_to_diffusers(name: str, told: dict[str, list[CallTold]]) -> None:
    case, reason, error = LEFT[name]
    for one in told[name]:
        assert one.fallbacks == ({reason: 1} if reason else {})
    outs = [one.out for one in told[name]]
    if error is not None:
        assert outs == [error, error]
        return
    assert all(isinstance(out, Tensor) for out in outs), outs
    out = torch.cat([out for out in outs if isinstance(out, Tensor)], 1)
    torch.testing.assert_close(out.double(), one_process(case), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_one_process(told: dict[str, list[CallTold]]) -> None:
    case, _, _ = LEFT["gradients"]
    q = case.q.clone().requires_grad_()
    dispatch_attention_fn(q, case.k, case.v).sum().backward()
    parts = [one.grad for one in told["gradients"]]
    torch.testing.assert_close(torch.cat([g for g in parts if g is not None], 1), q.grad)


def test_every_model_with_a_plan_for_it_is_reached_by_its_dispatcher() -> None:
    folder = Path(transformers.__file__).parent
    files = [file for file in folder.glob("*.py") if "_cp_plan = {" in file.read_text()]
    assert len(files) > 8
    for file in files:
        module = importlib.import_module(f"{transformers.__name__}.{file.stem}")
        processors = [
            kind
            for name, kind in vars(module).items()
            # Names that end in 2_0 here are old ones, which only warn; but for Qwen-Image's.
            if name.endswith(("Processor", "QwenDoubleStreamAttnProcessor2_0"))
            and kind.__module__ == module.__name__
        ]
        assert {class_way(kind).route for kind in processors} == {Route.DISPATCH}, file


def config(ulysses: int = 1, ring: int = 1, anything: bool = False) -> Any:
    degrees = SimpleNamespace(ulysses_degree=ulysses, ring_degree=ring, ulysses_anything=anything)
    return SimpleNamespace(context_parallel_config=degrees)


def test_reasons_need_no_processes() -> None:
    q, k, _ = tensors()
    keys, rows, heads = (torch.ones(*s) for s in ((2, 1, 1, 64), (2, 1, 64, 64), (2, 4, 1, 64)))
    two, ring, both, uneven = config(2), config(1, 2), config(2, 2), config(2, anything=True)
    assert refusal(q, k, None, False, object()) == OTHER_KIND
    assert refusal(q, k, None, False, SimpleNamespace(context_parallel_config=None)) == OTHER_KIND
    for shared in (two, ring, both):
        assert refusal(q, k, None, False, shared) is None
        assert refusal(q, k, None, True, shared) == CAUSAL
        assert refusal(q, k[:, :, :1], None, False, shared) == GROUPED
    for mask in (keys, keys[0, 0, 0], keys[:1]):
        assert refusal(q, k, mask, False, two) is None
        assert refusal(q, k, mask, False, ring) == refusal(q, k, mask, False, both) == RING_MASK
    for mask in (rows, rows[0, 0], rows.expand(2, 4, 64, 64)):
        assert refusal(q, k, mask, False, two) == QUERY_MASK
    for mask in (heads, heads[0]):
        assert refusal(q, k, mask, False, two) is None
        assert refusal(q, k, mask, False, uneven) == HEAD_MASK
        assert refusal(q, k, mask, False, ring) == RING_MASK


def test_three_tensors_alike_go_in_one_exchange_of_ulysses() -> None:
    q, k, v = tensors()
    assert goes_together(q, k, v, config(2))
    assert not goes_together(q, k, v, config(1, 2))
    assert not goes_together(q, k, v, config(2, 2))
    assert not goes_together(q, k, v, config(2, anything=True))
    assert not goes_together(q, k, v, config(3))  # heads: diffusers says why that is none
    assert not goes_together(q[:, :32], k, v, config(2))
    assert not goes_together(q, k, v[..., :8], config(2))
    assert not goes_together(q, k.double(), v, config(2))


def test_heads_go_out_and_tokens_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two processes one after the other, on what each would send: the attention of all of it.
    case = SERVED["bf16"]
    whole = [case.q, case.k, case.v]
    B, S, H, D = case.q.shape
    shared = config(2)
    shared.context_parallel_config._ulysses_mesh = SimpleNamespace(get_group=lambda: None)
    sent: dict[tuple[int, int], Tensor] = {}
    layer = PatchedLayer("site", "self", Policy(), Request("exact"), unusable)

    def first_pass(mine: int) -> Any:
        def to_each(tensor: Tensor, group: None) -> Tensor:
            step = sum(key[0] == mine for key in sent)
            sent[mine, step] = tensor
            return tensor

        return to_each

    def exchange(mine: int, step: list[int]) -> Any:
        def to_each(tensor: Tensor, group: None) -> Tensor:
            sent[mine, step[0]] = tensor
            parts = [sent[rank, step[0]][mine] for rank in (0, 1)]
            step[0] += 1
            return torch.stack(parts)

        return to_each

    def attend(mine: int, to_each: Any) -> Tensor:
        monkeypatch.setattr(parallel, "_to_each", to_each)
        q, k, v = (tensor.tensor_split(2, 1)[mine] for tensor in whole)
        return exchanged_once(q, k, v, D**-0.5, layer.handle, shared)

    for mine in (0, 1):
        attend(mine, first_pass(mine))
    # What goes back rests on what came: once more, now that both have sent.
    for _ in range(2):
        outs = [attend(mine, exchange(mine, [0])) for mine in (0, 1)]
    expected = one_process(case)
    assert error_of(torch.cat(outs, 1), expected) < 0.01
    assert outs[0].shape == (B, S // 2, H, D)


def test_a_backward_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidArgument, match="has no backward: call the model"):
        parallel._refuse_backward(None, torch.ones(1))


def test_a_handle_reads_as_the_backend_beneath_it_until_taken_back() -> None:
    class Holder:
        pass

    handle, holder = torch.tensor(7), Holder()
    table = AttentionBackendName._value2member_map_
    known = dict(table)
    unname = name_handle(handle, "flash", holder)
    assert AttentionBackendName(handle) is AttentionBackendName.FLASH
    unname()
    unname()
    assert table == known
    with pytest.raises(ValueError, match="is not a valid AttentionBackendName"):
        AttentionBackendName(handle)
    name_handle(handle, None, holder)
    assert AttentionBackendName(handle) is AttentionBackendName.NATIVE
    del holder
    gc.collect()
    assert table == known
