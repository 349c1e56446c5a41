"""Plans as files: huge ones, paths that no system can have, pipes, users without a home."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from models.layers import machine
from models.stacks import stack

import sagepatch
from sagepatch.env import cache_dir
from sagepatch.errors import (
    MachineError,
    ModelError,
    PlanError,
)
from sagepatch.plan import Plan, write_text
from sagepatch.plan_cache import cached_plan
from sagepatch.report.render_json import load as load_report

FAST = "emulated.sage2_8"


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


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("variant", "x" * 100_000, "names variant 'xxx"),
        ("samples", "9" * 100_000, "samples is '999"),
        ("site", "x" * 100_000, "names a layer twice: xxx"),
        ("kind", "weird", "kind is 'weird', needs self, cross, joint"),
    ],
)
def test_what_a_file_holds_makes_no_page_of_an_error(field: str, value: str, says: str) -> None:
    data = json.loads(plan_text())
    for row in data["entries"]:
        row[field] = value
    with pytest.raises(PlanError, match=says) as refused:
        Plan.from_json(json.dumps(data))
    assert len(str(refused.value)) < 300


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
