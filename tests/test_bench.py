"""The bench: checks before it times, exact attention beside every kernel, a budget that is kept and
a file that says all of it and nothing private.
"""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.bench import check, collect, document, gpu, measure
from sagepatch.bench.clock import Budget, runs_that_fit
from sagepatch.bench.shapes import CHECKED_LENGTH, SHAPES, STANDARD, Shape
from sagepatch.env import Machine
from sagepatch.variant import Variant

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SHAPE = Shape("tiny", 1, 4, 2, 77, 40, causal=True)
# Stands for a kernel: the emulator under another name.
KERNEL = replace(
    BY_NAME["emulated.sage1_b"], toolchain="triton", tolerance=BY_NAME["triton.sage1_b"].tolerance
)
ENOUGH = 1e6


class Ticks:
    """A clock that tells times of its own and runs what it times."""

    def __init__(self, ms: float = 1.0) -> None:
        self.ms, self.ran = ms, 0

    def __call__(self, run: Callable[[], object], runs: int) -> list[float]:
        run()
        self.ran += runs
        return [self.ms + number for number in range(runs)]


def rows(recipes: list[str], clock: Any = None, seconds: float = ENOUGH) -> dict[str, measure.Row]:
    kernels = measure.kernels(CPU, recipes)
    found = measure.measure(SHAPE, CPU, torch.float32, kernels, Budget(seconds), clock)
    return {row.variant: row for row in found.rows}


def test_rows_without_a_clock_hold_errors_and_no_times() -> None:
    found = rows(["sage1_b", "sage2_8"])
    assert list(found) == ["sdpa.exact", "emulated.sage2_8", "emulated.sage1_b"]
    exact, *ours = found.values()
    assert exact.cosine == pytest.approx(1.0)
    assert all(row.ms_median is None and row.fault is None for row in found.values())
    assert all(row.cosine is not None and 0.99 < row.cosine < 0.99999 for row in ours)


def test_times_are_medians_of_all_rounds_beside_exact_attention() -> None:
    found = rows(["emulated.sage1_b"], Ticks())
    exact, ours = found["sdpa.exact"], found["emulated.sage1_b"]
    assert ours.runs == measure.ROUNDS * measure.MOST_RUNS
    # 1 to 10 ms, three times over.
    assert (exact.ms_median, ours.ms_median) == (5.5, 5.5)
    assert ours.speedup == 1.0
    assert ours.ms_p20 is not None
    assert 2 < ours.ms_p20 < 4
    # 4 B H S^2 D, half of it where causal.
    assert ours.tflops == pytest.approx(4 * 4 * 77**2 * 40 / 2 / 5.5e-3 / 1e12)


def test_a_backend_that_torch_lacks_is_named_with_its_reason() -> None:
    cudnn = rows(["emulated.sage1_b"], Ticks())["sdpa.cudnn"]
    assert cudnn.ms_median is None
    assert "RuntimeError" in (cudnn.fault or "")


def test_what_does_not_fit_is_dropped_from_the_end() -> None:
    assert runs_that_fit([10.0, 10.0], 1.0, rounds=2, least=2, most=10) == (2, 10)
    assert runs_that_fit([10.0, 10.0], 0.2, rounds=2, least=2, most=10) == (2, 5)
    assert runs_that_fit([10.0, 10.0], 0.05, rounds=2, least=2, most=10) == (1, 2)
    assert runs_that_fit([10.0, 10.0], 0.01, rounds=2, least=2, most=10) == (0, 2)


def test_without_time_nothing_is_timed_and_everything_is_named() -> None:
    found = rows(["emulated.sage1_b"], Ticks(), seconds=0)
    assert {found[name].fault for name in ("sdpa.exact", "emulated.sage1_b")} == {check.NO_TIME}
    results = collect.collect([SHAPE], CPU, torch.float32, ["sage1_b"], seconds=0)
    assert results.measured[0].left_out == check.NO_TIME


def test_the_first_kernels_are_timed_however_long_compiling_took() -> None:
    kernels = measure.kernels(CPU)
    late = Budget(1.0, iter([0.0, *[50.0] * 999]).__next__)
    found = measure.measure(SHAPE, CPU, torch.float32, kernels, late, Ticks(1e-3)).rows
    ours = [row for row in found if not row.variant.startswith("sdpa.")]
    assert found[0].ms_median is not None
    timed = {row.variant for row in ours if row.ms_median is not None}
    assert timed == {variant.name for variant in kernels[: measure.LEAST_KERNELS]}
    assert {row.fault for row in ours if row.variant not in timed} == {check.NO_TIME}


def test_known_answers_come_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def answered(variants: Any, *rest: Any) -> Any:
        order.append(("answers", {variant.recipe.name for variant in variants}))
        return (tuple(check.Check(v.name, v.tier, "passed") for v in variants), None)

    def measured(shape: Shape, device: Any, dtype: Any, variants: Any, *rest: Any) -> Any:
        order.append((shape.name, {variant.recipe.name for variant in variants}))
        return measure.Measured(shape, (measure.Row(shape.name, "sdpa.exact", "fp32"),))

    monkeypatch.setattr(collect, "_checks", answered)
    monkeypatch.setattr(collect, "measure", measured)
    steps: list[tuple[int, int]] = []
    results = collect.collect(
        [SHAPE], CPU, torch.float32, step=lambda done, of: steps.append((done, of))
    )
    assert [what for what, _ in order] == ["answers", "tiny", "answers", "tiny"]
    assert order[0][1] == order[1][1]
    assert [check.kernel for check in results.checks] == [v.name for v in measure.kernels(CPU)]
    assert steps == [(0, 4), (1, 4), (2, 4), (3, 4)]
    alone = collect.collect([SHAPE], CPU, torch.float32, ["triton.sage1_b"])
    assert [row.variant for row in alone.rows] == ["sdpa.exact"]


def test_the_most_telling_kernels_are_measured_on_every_shape_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def measured(shape: Shape, device: Any, dtype: Any, variants: Any, *rest: Any) -> Any:
        asked.append((shape.name, {variant.recipe.name for variant in variants}))
        if len(asked) == 4:
            raise torch.OutOfMemoryError
        names = ["sdpa.exact", *(variant.name for variant in variants)]
        return measure.Measured(shape, tuple(measure.Row(shape.name, n, "fp32") for n in names))

    monkeypatch.setattr(collect, "measure", measured)
    shapes = [replace(SHAPE, name=name) for name in "ab"]
    results = collect.collect(shapes, CPU, torch.float32)
    assert [name for name, _ in asked] == ["a", "b", "a", "b"]
    first = {name for name in measure.FIRST if f"emulated.{name}" in BY_NAME}
    assert asked[0][1] == asked[1][1] == first
    assert not asked[2][1] & first
    everything = ["sdpa.exact", *(variant.name for variant in measure.kernels(CPU))]
    for one in results.measured:
        assert [row.variant for row in one.rows] == everything
    assert {row.fault for row in results.measured[0].rows} == {None}
    later = results.measured[1].rows[1 + len(first) :]
    assert {row.fault for row in later} == {"left out: out of GPU memory"}


def test_budgets() -> None:
    time = iter([0.0] + [10.0] * 9)
    budget = Budget(30, lambda: next(time))
    assert budget.left == 20
    assert budget.share(0.5).seconds == 10
    assert budget.rest(0.5).seconds == 20
    assert budget.rest(0.9).seconds == 27


class TestChecks:
    """Known answers and emulators, on kernels that are wrong in one way each."""

    @pytest.fixture
    def serve(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Variant]:
        real = check.load

        def served(kernel: Any) -> Variant:
            monkeypatch.setattr(
                check, "load", lambda entry: kernel if entry == "wrong:one" else real(entry)
            )
            return replace(KERNEL, entry="wrong:one")

        return served

    def answer(self, variant: Variant) -> check.Check:
        (found,) = check.known_answers([variant], CPU, Budget(ENOUGH))
        return found

    def test_a_right_kernel(self) -> None:
        found = self.answer(KERNEL)
        assert (found.state, found.why) == ("passed", None)
        # The known call is in FP16 on a CPU.
        assert found.cosine == pytest.approx(1.0, abs=1e-5)
        assert found.first_call_s is not None

    def test_a_wrong_one(self, serve: Callable[[Any], Variant]) -> None:
        found = self.answer(serve(lambda c, r: (c.empty_out().zero_(), c.empty_lse().zero_())))
        assert found.state == "failed"
        assert "cosine" in (found.why or "")

    def test_one_that_raises(self, serve: Callable[[Any], Variant]) -> None:
        def broken(call: object, recipe: object) -> object:
            raise OSError("no compiler\nat all")

        found = self.answer(serve(broken))
        assert (found.state, found.why) == ("failed", "OSError: no compiler")

    def test_one_without_time(self) -> None:
        (found,) = check.known_answers([KERNEL], CPU, Budget(0))
        assert (found.state, found.why) == ("left out", check.NO_TIME)

    def test_off_its_emulator(self) -> None:
        call = SHAPE.call(CPU, torch.float32)
        expected = check.emulated_by_recipe(call)(KERNEL.recipe)
        assert check.off_emulator(KERNEL, expected, expected) is None
        assert "cosine" in (check.off_emulator(KERNEL, expected.flip(2), expected) or "")
        assert check.off_emulator(KERNEL, expected * torch.nan, expected) is not None


def test_a_fault_on_the_way_spoils_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.load

    def broken(call: object, recipe: object) -> object:
        raise ValueError("boom")

    monkeypatch.setattr(
        measure,
        "load",
        lambda entry: broken if entry.startswith("sagepatch.backends.emu") else real(entry),
    )
    found = rows(["emulated.sage1_b"], Ticks())
    assert found["emulated.sage1_b"].fault == "ValueError: boom"
    assert found["emulated.sage1_b"].ms_median is None
    assert found["sdpa.exact"].ms_median is not None


def test_a_lost_device_ends_the_measuring_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = measure.measure

    def lost(shape: Shape, *rest: Any) -> measure.Measured:
        if shape.name == "b":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(shape, *rest)

    monkeypatch.setattr(collect, "measure", lost)
    shapes = [replace(SHAPE, name=name) for name in "abc"]
    results = collect.collect(shapes, CPU, torch.float32, ["emulated.sage1_b"])
    assert [bool(one.rows) for one in results.measured] == [True, False, False]
    assert all("illegal" in (one.left_out or "") for one in results.measured[1:])


def test_a_device_lost_in_the_checks_is_said_of_every_kernel_and_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(variants: Any, *rest: Any) -> Any:
        yield check.Check(variants[0].name, "fast", "passed")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(collect, "known_answers", lost)
    monkeypatch.setattr(collect, "known_call", lambda device: SHAPE.call(CPU, torch.float16))
    variants = [BY_NAME["emulated.sage1_b"], BY_NAME["emulated.sage2_8"], BY_NAME["triton.sage1_b"]]
    checks, why = collect._checks(variants, torch.device("meta"), (), Budget(ENOUGH))
    assert [one.state for one in checks] == ["passed", "left out", "refused"]
    assert "illegal" in (why or "")
    assert "device is cpu" in (checks[2].why or "")
    more, still = collect._checks(variants[:1], torch.device("meta"), (), Budget(ENOUGH), why)
    assert (more[0].state, more[0].why, still) == ("left out", why, why)


def test_withheld_kernels_are_tried_by_their_full_name_only() -> None:
    kernel = replace(BY_NAME["emulated.sage1_b"], withheld="not yet")
    spec = SHAPE.call(CPU, torch.float16).spec()
    assert "withheld" in measure.refusals(kernel, spec)[0]
    assert measure.refusals(kernel, spec, ["emulated.sage1_b"]) == ()


def test_kernels_come_first_by_what_is_most_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [v.name for v in measure.kernels(torch.device("cuda"))]
    assert not [name for name in found if name.startswith(("emulated", "sdpa"))]
    main = [name for name in found if name.split(".")[1] in measure.FIRST]
    assert found[: len(main)] == main
    monkeypatch.setattr(measure, "arch_of", lambda device: 80)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "cuda_mma.sage1_b_f32" not in main
    ampere = [v.name for v in measure.kernels(torch.device("cuda"))]
    assert "cuda_mma.sage1_b_f32" in ampere[: len(main) + 1]
    assert measure.kernels(CPU, ["triton.sage1_b"]) == []


def test_the_checked_shape_keeps_what_matters() -> None:
    small = SHAPES["llama_4k_causal"].reduced()
    assert (small.length, small.head_dim, small.causal) == (CHECKED_LENGTH, 128, True)
    assert (small.q_heads, small.kv_heads) == (16, 4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_checked_shape_runs_the_same_machine_code(shape: Shape) -> None:
    small = shape.reduced()
    for field in ("batch", "q_heads", "kv_heads", "length"):
        few, every = getattr(small, field), getattr(shape, field)
        assert few <= every
        # What Triton compiles for: 1, multiples of 16, others.
        assert (few == 1, few % 16 == 0) == (every == 1, every % 16 == 0), field
    assert small.q_heads // small.kv_heads == shape.q_heads // shape.kv_heads
    assert small.batch * small.q_heads <= 64


class TestFile:
    """The document: what its schema says, and nothing private."""

    @pytest.fixture(scope="class")
    def made(self) -> dict[str, Any]:
        results = collect.collect([SHAPE], CPU, torch.float32, ["sage1_b"], clock=Ticks())
        checks = tuple(check.known_answers([KERNEL], CPU, Budget(ENOUGH)))
        load = gpu.Load(2520.0, 430.5, 61.0)
        measured = tuple(replace(one, load=load) for one in results.measured)
        full = replace(results, checks=checks, measured=measured)
        return document.document(full, Machine.here(), CPU)

    def test_it_is_what_the_schema_says(self, made: dict[str, Any]) -> None:
        schema = json.loads((ROOT / "docs" / "bench.schema.json").read_text(encoding="utf-8"))
        assert schema["properties"]["schema"]["const"] == document.SCHEMA
        conforms(json.loads(document.text(made)), schema)
        for wrong in ({"schema": 0}, {"rows": [{}]}, {"extra": 1}, {"seconds": "9"}):
            with pytest.raises(AssertionError):
                conforms(made | wrong, schema)

    def test_every_field_is_described_and_the_page_names_each_part(self) -> None:
        schema = json.loads((ROOT / "docs" / "bench.schema.json").read_text(encoding="utf-8"))
        page = (ROOT / "docs" / "send-us-numbers.md").read_text(encoding="utf-8")
        assert all(f"`{part}`" in page for part in schema["properties"])
        for one in STANDARD:
            heads = str(one.q_heads)
            if one.kv_heads != one.q_heads:
                heads += f"/{one.kv_heads}"
            assert f"| `{one.name}` | {one.batch} x {heads} x {one.length} x {one.head_dim}" in page

    def test_which_code_ran(self, made: dict[str, Any]) -> None:
        assert set(made["code"]) == {"version", "commit", "changed", "sources"}
        assert len(made["code"]["sources"]) == 16

    def test_nothing_private_is_in_it(self, made: dict[str, Any]) -> None:
        told = f"in {Path.home()}/x of {getpass.getuser()} on {platform.node()}, {ROOT}/y"
        results = collect.Results(
            (check.Check("a.b", "fast", "failed", told),),
            (measure.Measured(SHAPE, left_out=told),),
            *("float32", 1.0, 1.0),
        )
        written = document.text(document.document(results, Machine.here(), CPU))
        for private in (str(Path.home()) + "/", str(ROOT), f" {platform.node()}"):
            assert private not in written
        assert "on <host>, <sagepatch>/y" in written
        assert getpass.getuser() not in json.loads(written)["kernels"][0]["why"]

    def test_numbers_that_json_lacks_become_null(self) -> None:
        row = measure.Row("s", "v", "bf16", rel_l1=float("inf"))
        results = collect.Results((), (measure.Measured(SHAPE, (row,)),), "bf16", 1.0, 1.0)
        made = document.document(results, Machine.here(), CPU)
        assert made["rows"][0]["rel_l1"] is None


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def conforms(value: Any, schema: dict[str, Any], path: str = "file") -> None:
    """Assert that a value is what a JSON schema of our own few words says."""
    assert set(schema) <= {
        *("$schema", "title", "description", "type", "const", "enum", "items"),
        *("properties", "required", "additionalProperties"),
    }
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        kinds = tuple(kind for name in names for kind in TYPES[name])
        assert isinstance(value, kinds), path
        assert not isinstance(value, bool) or bool in kinds, path
        if value is None:
            return
    assert "const" not in schema or value == schema["const"], path
    assert "enum" not in schema or value in schema["enum"], path
    if isinstance(value, dict):
        known = schema.get("properties", {})
        assert set(schema.get("required", [])) <= set(value), path
        others = schema.get("additionalProperties", True)
        for key, one in value.items():
            if key in known:
                conforms(one, known[key], f"{path}.{key}")
            else:
                assert others is not False, f"{path}.{key}"
                if isinstance(others, dict):
                    conforms(one, others, f"{path}.{key}")
    for number, one in enumerate(value if isinstance(value, list) else []):
        conforms(one, schema.get("items", {}), f"{path}[{number}]")
