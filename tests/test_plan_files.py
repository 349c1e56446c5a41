"""Plans as files: huge ones, paths that no system can have, pipes, users without a home."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import fields
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
from sagepatch.plan import Plan, PlanRange, write_text
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
        # Once as long as what the file held.
        ("ranges", "x" * 100_000, "ranges is 'xxx"),
        ("alternatives", {"x" * 100_000: -1}, "alternatives has -1 for xxx"),
        # Once taken, and no page of a report could be written of it.
        ("shapes", ["\ud800"], r"shapes is .*, needs a list of strings that UTF-8 can hold"),
        ("reason", "a\udfffb", "needs str that UTF-8 can hold"),
        ("site", "\ud800", "needs str that UTF-8 can hold"),
        ("alternatives", {"\ud800": 1}, "that UTF-8 can hold"),
    ],
)
def test_what_a_file_holds_makes_no_page_of_an_error(field: str, value: str, says: str) -> None:
    data = json.loads(plan_text())
    for row in data["entries"]:
        row[field] = value
    with pytest.raises(PlanError, match=says) as refused:
        Plan.from_json(json.dumps(data))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("schema", ["9" * 100_000, int("9" * 4000), -int("9" * 4000)], ids=type)
def test_a_schema_makes_no_page_of_an_error(schema: object) -> None:
    with pytest.raises(PlanError, match="has schema") as refused:
        Plan.from_json(plan_text(schema=schema))
    assert len(str(refused.value)) < 300


def test_a_plan_for_another_model_makes_no_page_of_an_error() -> None:
    made = Plan.from_json(plan_text(fingerprint="f" * 100_000, model="m" * 100_000))
    for sites in ((), [entry.site for entry in made.entries]):
        with pytest.raises(PlanError, match=r"another model|has not") as refused:
            made.check("f00d", sites)
        assert len(str(refused.value)) < 800


def test_many_ranges_make_no_page_of_an_error() -> None:
    data = json.loads(plan_text())
    row = data["entries"][0]
    part = {field.name: None for field in fields(PlanRange)}
    part |= {"start": 0.5, "end": 0.25, "variant": row["variant"], "numerics_version": 1}
    row["ranges"] = [{**part, "reason": "", "alternatives": {}}] * 10_000
    with pytest.raises(PlanError, match="must follow one another") as refused:
        Plan.from_json(json.dumps(data))
    assert len(str(refused.value)) < 300


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="no permissions of this kind")
@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_files_have_the_permissions_that_the_process_gives(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "new.json", "plan")
        (tmp_path / "private.json").touch(0o600)
        write_text(tmp_path / "private.json", "plan")
        (tmp_path / "shared.json").touch()
        (tmp_path / "shared.json").chmod(0o664)
        write_text(tmp_path / "shared.json", "plan")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new.json") == 0o666 & ~mask
    assert mode_of(tmp_path / "private.json") == 0o600
    assert mode_of(tmp_path / "shared.json") == 0o664


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link, dangling = tmp_path / "far/plan.json", tmp_path / "link", tmp_path / "dangling"
    real.write_text("old")
    link.symlink_to("far/plan.json")
    dangling.symlink_to("far/new.json")
    write_text(link, "plan")
    write_text(dangling, "plan")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert real.read_text() == (tmp_path / "far/new.json").read_text() == "plan"
    assert sorted(one.name for one in (tmp_path / "far").iterdir()) == ["new.json", "plan.json"]
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(MachineError, match=r"cannot write .*loop"):
        write_text(loop, "plan")


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no such folder")
def test_a_file_that_is_open_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As `/dev/stdout` is where the shell sends it to a file."""
    with open(tmp_path / "out.txt", "w+b") as out:
        write_text(f"/dev/fd/{out.fileno()}", "plan")
        assert out.read() == b"plan"
    assert [one.name for one in tmp_path.iterdir()] == ["out.txt"]


def test_names_as_long_as_a_system_has_them(tmp_path: Path) -> None:
    path = tmp_path / ("\u00e4" * 125 + ".json")
    write_text(path, "plan")
    assert path.read_text() == "plan"


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
