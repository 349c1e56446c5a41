"""What an unfriendly reader found: inputs and habits that once gave a wrong result without a word,
or an error that said nothing.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.layers import call, layer, machine
from models.stacks import stack, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagepatch
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.backends.guard import DeviceGuard
from sagepatch.cli import run_command
from sagepatch.cli.generation import Made
from sagepatch.cli.saving import save
from sagepatch.dispatch import Request
from sagepatch.env import cache_dir
from sagepatch.errors import (
    InvalidArgument,
    MachineError,
    ModelError,
    NothingPatched,
    PlanError,
    VariantRefused,
)
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.numerics.attention import emulate
from sagepatch.ops import chosen_for, run_layer
from sagepatch.plan import Plan, write_text
from sagepatch.plan_cache import cached_plan
from sagepatch.report.render_json import load as load_report

FAST = "emulated.sage2_8"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def qkv(S: int = 20) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 4, S, 16, generator=generator).unbind(0)


@pytest.mark.parametrize("shape", [(2, 1, 20, 20), (1, 1, 1, 20), (20, 20), (20,)], ids=str)
@pytest.mark.parametrize("mask_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_additive_masks_of_any_dtype_mean_what_they_say(dtype, mask_dtype, shape) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(mask_dtype)
    mask[..., 3], mask[..., 5] = torch.finfo(mask_dtype).min, -torch.inf
    whole = mask.double() if mask.dim() > 1 else mask[None].double()
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=whole)
    out = sagepatch.attention(q, k, v, attn_mask=mask, variant="exact")
    assert (out.double() - expected).abs().max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_the_lowest_fp32_numbers_is_the_mean_of_v(dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    mask = torch.zeros(2, 1, 20, 20)
    mask[:, :, 3], mask[:, :, 5] = torch.finfo(torch.float32).min, -torch.inf
    for variant, slack in (("exact", 4e-3), (FAST, 2e-2)):
        out = sagepatch.attention(q, k, v, attn_mask=mask, variant=variant).float()
        assert (out[:, :, 3] - v.float().mean(2)).abs().max() < slack
        assert not out[:, :, 5].any()


@pytest.mark.parametrize("shape", [(), (20,)], ids=["0-D", "1-D"])
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_masks_of_fewer_axes_broadcast(variant: str, shape) -> None:
    q, k, v = qkv()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.3
    whole = mask.expand(2, 4, 20, 20)
    out = sagepatch.attention(q, k, v, attn_mask=mask, variant=variant)
    same = sagepatch.attention(q, k, v, attn_mask=whole, variant=variant)
    assert (out - same).abs().max() < 1e-5


@pytest.mark.parametrize(
    "options",
    [{"return_lse": True}, {"softcap": 1e12}, {"sinks": torch.full((4,), -torch.inf)}],
    ids=["lse", "softcap", "sinks"],
)
def test_exact_attention_in_fp64_is_fp64_with_every_option(options) -> None:
    q, k, v = (t.double() for t in qkv())
    given = sagepatch.attention(q, k, v, variant="exact", **options)
    out = given[0] if isinstance(given, tuple) else given
    assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"softcap": math.inf}, "softcap=inf"),
        ({"window": 2.5}, "window=2.5"),
        ({"window": 1 << 63}, "64 bits"),
        ({"causal_offset": 0.5, "is_causal": True}, "causal_offset=0.5"),
    ],
    ids=["softcap", "window", "window too large", "offset"],
)
def test_options_that_no_kernel_can_honour_are_refused(options, says: str) -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match=says):
        sagepatch.attention(q, k, v, **options)


def test_tensors_that_hold_no_attention_call_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match="heads of size 0"):
        sagepatch.attention(q[..., :0], k[..., :0], v)
    with pytest.raises(InvalidArgument, match="0 heads"):
        sagepatch.attention(q[:, :0], k, v, variant=FAST)
    with pytest.raises(InvalidArgument, match="sparse_coo"):
        sagepatch.attention(q.to_sparse(), k, v)


def test_packed_calls_of_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        q = mode.from_tensor(qkv()[0][:1])
        ends = mode.from_tensor(torch.tensor([0, 5, 20]))
        out = sagepatch.attention(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, variant=FAST)
    assert out.shape == q.shape


def test_a_tangent_is_refused_not_lost() -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match="no tangent"), torch.no_grad():
        torch.func.jvp(lambda x: sagepatch.attention(x, k, v, variant=FAST), (q,), (q,))


def test_forward_mode_derivatives_of_a_patched_model_are_the_originals() -> None:
    model, x = stack().requires_grad_(False), tokens()
    tangent = torch.ones_like(x)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.jvp(model, (x,), (tangent,))[1]
        with sagepatch.apply(model, variant=FAST) as patch:
            found = torch.func.jvp(model, (x,), (tangent,))[1]
            reasons = patch.report().layers[0].fallbacks
    assert torch.equal(found, expected)
    assert any("training" in reason for reason in reasons)


def test_wrong_cumulative_lengths_are_refused_in_compiled_code_too() -> None:
    q = qkv()[0][:1]

    def packed(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return sagepatch.attention(x, x, x, cu_seqlens_q=ends, cu_seqlens_kv=ends, variant=FAST)

    wrong = torch.tensor([0, 25, 20])
    for run in (packed, torch.compile(packed, backend="eager", fullgraph=True)):
        assert run(q, torch.tensor([0, 5, 20])).shape == q.shape
        with pytest.raises(InvalidArgument, match="must rise from 0"):
            run(q, wrong)
    with pytest.raises(InvalidArgument, match="must rise from 0"):
        sagepatch.attention(
            q.clone().requires_grad_(), q, q, cu_seqlens_q=wrong, cu_seqlens_kv=wrong
        )


def test_a_handle_of_another_process_finds_no_layer() -> None:
    # Numbers that start at 1 everywhere let an exported graph run another model's layers.
    code = "from sagepatch.layer import _numbers; print(next(_numbers))"
    command = [sys.executable, "-c", code]
    numbers = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(numbers) == 2


@pytest.mark.parametrize("term", ["attn_mask", "sinks"])
def test_a_nan_in_a_mask_or_sink_is_no_fault_of_the_kernel(term: str) -> None:
    extra = torch.zeros(2) if term == "sinks" else torch.zeros(1, 1, 1, 47)
    extra[..., 0] = math.nan
    one, given = layer(), call(**{term: extra})
    one.run_with(Request(FAST), "asked")
    run_layer(one, given)
    assert one.demoted is None
    assert one.record.notes == ["inputs of this layer were not finite"]


def test_a_call_that_is_recomputed_counts_once_and_as_exact(monkeypatch) -> None:
    import sagepatch.backends.emulated as emulated

    one, given = layer(), call()
    one.run_with(Request(FAST), "asked")
    wrong = torch.full_like(given.q, math.nan)
    monkeypatch.setattr(emulated, "emulate", lambda seen, recipe: (wrong, None))
    run_layer(one, given)
    assert one.record.calls == 1
    assert one.record.by_variant == {SDPA.name: 1}
    assert list(one.record.fallbacks.values()) == [1]


def test_a_choice_made_while_a_graph_is_captured_is_not_kept(monkeypatch) -> None:
    # Nothing can be checked during a capture: an unchecked kernel must not serve for good.
    spec = replace(call().spec(), device="cuda", arch=90, dtype="bf16", v_dtype="bf16")
    wanted = BY_NAME["triton.sage2_8"]
    monkeypatch.setattr("sagepatch.ops.unusable", lambda variant: None)
    one = PatchedLayer("x", "self", Policy(), Request("exact"), lambda variant: None)
    one.run_with(Request(wanted.name), "asked")
    for module in ("layer", "ops"):
        monkeypatch.setattr(f"sagepatch.{module}.failure", lambda variant: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert one.choose(spec)[0] is wanted
    assert chosen_for(spec, wanted.name) is wanted
    for module in ("layer", "ops"):
        monkeypatch.setattr(f"sagepatch.{module}.failure", lambda variant: "it lies")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert one.choose(spec)[0] is SDPA
    with pytest.raises(VariantRefused, match="it lies"):
        chosen_for(spec, wanted.name)


def test_no_guard_is_made_inside_a_graph(monkeypatch) -> None:
    one = layer()
    monkeypatch.setattr("sagepatch.layer.available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert one.guard(torch.device("cuda", 0)) is None
    assert "no guard" in one.record.notes[0]


def test_threads_may_ask_one_guard(monkeypatch) -> None:
    guard = DeviceGuard(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Event:
        def query(self) -> bool:
            guard._event = None  # another thread was faster
            return True

    guard._event, guard._copy = Event(), torch.zeros(2, dtype=torch.int32)
    assert guard.verdict() is None


def forward(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens())


def test_a_patch_put_in_force_again_takes_the_newer_one_back() -> None:
    model = stack()
    plain = forward(model)
    older = sagepatch.apply(model, variant=FAST)
    fast = forward(model)
    newer = sagepatch.apply(model, variant="exact")
    older.install()
    assert newer.restored
    assert torch.equal(forward(model), fast)
    newer.restore()
    sagepatch.restore(model)
    assert older.restored
    assert torch.equal(forward(model), plain)


def test_a_patch_may_be_entered_again() -> None:
    model = stack()
    plain = forward(model)
    with sagepatch.apply(model, variant=FAST) as patch:
        fast = forward(model)
    with patch:
        assert torch.equal(forward(model), fast)
    assert torch.equal(forward(model), plain)
    assert patch.report().layers[0].by_variant == {FAST: 2}


def test_calibrate_leaves_no_patch_that_its_run_made() -> None:
    model = stack()
    plain = forward(model)
    sagepatch.calibrate(model, run=lambda: sagepatch.apply(model, variant=FAST), emulate=True)
    assert torch.equal(forward(model), plain)
    assert "forward" not in vars(model[0])


def test_a_model_without_attention_was_looked_at_as_a_whole() -> None:
    with pytest.raises(NothingPatched, match=r"no attention layer found in Linear \(.* all of it"):
        sagepatch.apply(torch.nn.Linear(2, 2))


def test_a_threshold_beside_a_plan_of_another_is_refused() -> None:
    model = stack()
    plan = sagepatch.apply(model, emulate=True).lock().plan()
    sagepatch.restore(model)
    for threshold in (0.998, plan.threshold):
        sagepatch.apply(model, plan=plan, threshold=threshold, emulate=True).restore()
    with pytest.raises(InvalidArgument, match=r"solved for a threshold of 0\.998, not 0\.9"):
        sagepatch.apply(model, plan=plan, threshold=0.9, emulate=True)
    assert not forward(model).requires_grad


def plan_text(**changes: object) -> str:
    model = stack()
    with sagepatch.apply(model, variant=FAST) as patch:
        data = json.loads(patch.plan().to_json())
    return json.dumps({**data, **changes})


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("field", ["schema", "threshold"])
def test_huge_numbers_in_a_plan_or_report_are_a_sentence(field, digits: int, tmp_path) -> None:
    # json.dumps will not write 5,000 digits either.
    text = plan_text(**{field: "HUGE"}).replace('"HUGE"', "9" * digits)
    with pytest.raises(PlanError):
        Plan.from_json(text)
    saved = tmp_path / "report.json"
    saved.write_text(text)
    with pytest.raises(ModelError, match="digits"):
        load_report(saved)


def test_a_huge_plan_is_read_in_a_moment() -> None:
    data = json.loads(plan_text())
    row = data["entries"][0]
    data["entries"] = [{**row, "site": f"blocks.{n}"} for n in range(30_000)]
    text = json.dumps(data)
    began = time.perf_counter()
    assert len(Plan.from_json(text).entries) == 30_000
    assert time.perf_counter() - began < 20


def test_paths_that_no_system_can_have(tmp_path) -> None:
    with pytest.raises(PlanError, match="null byte"):
        Plan.load("a\0b")
    with pytest.raises(MachineError, match="null byte"):
        Plan.from_json(plan_text()).save("a\0b")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "plan")
        assert os.read(reader, 100) == b"plan"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_a_plan_for_no_threshold_is_refused(threshold: float) -> None:
    model = stack()
    calibration = sagepatch.calibrate(model, run=lambda: forward(model), emulate=True)
    with pytest.raises(InvalidArgument, match="threshold is"):
        calibration.plan(threshold)


def test_a_user_without_a_home_keeps_no_plans(monkeypatch) -> None:
    monkeypatch.delenv("SAGEPATCH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(MachineError, match="no home directory"):
        cache_dir()
    assert cached_plan("mark", machine("Some GPU"), 0.998) is None


def test_the_cache_directory_may_start_at_home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", "~/kept")
    assert cache_dir() == tmp_path / "kept"


def test_a_kernel_that_fails_its_check_is_not_measured(monkeypatch) -> None:
    # Before, calibration ran it on live tensors, unchecked.
    lies = {"emulated.sage2pp_8": "known-answer check: cosine 0.5"}
    monkeypatch.setattr("sagepatch.calibration.capture.failure", lambda one: lies.get(one.name))
    model = stack()
    patch = sagepatch.apply(model, emulate=True, threshold=0.9)
    forward(model)
    tried = set(patch.calibration().layers[0].candidates)
    assert "emulated.sage2pp_8" not in tried
    assert FAST in tried
    assert any("cosine 0.5" in note for note in patch.report().layers[0].notes)
    assert torch.equal(forward(model), forward(stack()))
    patch.restore()


@pytest.mark.parametrize("level", ["", "debug"], ids=["quiet", "debug"])
def test_a_fault_inside_a_command_shows_no_traceback_unasked(level: str) -> None:
    # typer puts a hook of its own where ours was.
    code = (
        "import sagepatch.cli as cli, sys\n"
        "def broken(*_): raise KeyError('left')\n"
        "cli.info.state = broken\n"
        "sys.argv = ['sagepatch', 'info']\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SAGEPATCH_LOG": level},
        check=False,
    )
    assert done.returncode == 1
    assert "unexpected KeyError: 'left' (a fault of ours" in done.stderr.replace("\n", " ")
    assert ("Traceback" in done.stderr) is bool(level)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "demo", "--prompt", "x", "--seed", "99999999999999999999"),
        ("run", "demo", "--prompt", "x", "--threshold", "nan"),
        ("calibrate", "demo", "--prompt", "x", "--threshold", "inf"),
        ("calibrate", "demo", "--prompt", "x", "--budget", "nan"),
        ("calibrate", "demo", "--prompt", "x", "--budget", "-1"),
    ],
    ids=lambda arguments: " ".join(arguments[4:]),
)
def test_numbers_that_say_nothing_are_refused_before_the_run(arguments, monkeypatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("it went on to load the model")

    monkeypatch.setattr("sagepatch.cli.run.load", loaded)
    monkeypatch.setattr("sagepatch.cli.calibrate.load", loaded)
    assert run_command(arguments) == 2


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (("inspect", ""), "no model was named", 3),
        (("run", "demo", "--prompt", "x", "--device", "meta"), "--device is 'meta'", 2),
        (("explain", "1x8x128x128x64", "--causal-offset", "5"), "needs --causal", 2),
        (("explain", "1x8x128x128x64", "--arch", "-5"), "--arch", 2),
    ],
    ids=["no name", "device", "offset", "arch"],
)
def test_what_commands_once_took_without_a_word(arguments, says: str, code: int, capsys) -> None:
    assert run_command(arguments) == code
    assert says in capsys.readouterr().err


def test_a_picture_is_not_drawn_for_a_text_file(monkeypatch, tmp_path, capsys) -> None:
    # Before, the picture was drawn and lost to a KeyError.
    monkeypatch.setattr("sagepatch.cli.run.compared", lambda *_: pytest.fail("it was drawn"))
    command = ("run", "demo", "--prompt", "x", "--out", str(tmp_path / "x.txt"))
    assert run_command(command) == 2
    assert "must end in" in capsys.readouterr().err


def test_a_video_that_the_format_cannot_hold_is_kept(tmp_path) -> None:
    frames = tuple(np.full((8, 8, 3), shade, np.uint8) for shade in (0, 200))
    kept = save([Made(frames=frames, is_video=True)], tmp_path / "clip.jpg")
    assert kept == tmp_path / "clip.webp"
    assert kept.stat().st_size > 0


def test_kernels_get_sinks_and_lengths_without_gaps(monkeypatch) -> None:
    seen = []

    def kernel(one, recipe):
        seen.append(one)
        return emulate(one, recipe)

    monkeypatch.setattr("sagepatch.backends.emulated.emulate", kernel)
    q = qkv()[0][:1]
    ends = torch.tensor([0, 9, 5, 9, 20, 9])[::2]
    gaps = {"sinks": torch.randn(8)[::2], "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    sagepatch.attention(q, q, q, variant=FAST, **gaps)
    assert seen[0].sinks.is_contiguous()
    assert seen[0].cu_seqlens_q.is_contiguous()
    assert seen[0].cu_seqlens_kv.is_contiguous()
