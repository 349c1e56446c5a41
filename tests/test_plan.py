"""Plans: strict JSON, atomic files, and sentences for everything that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sagepatch.errors import MachineError, PlanError
from sagepatch.plan import SCHEMA, Plan, PlanEntry

ENTRY = PlanEntry(
    "blocks.0.attn", "self", "triton.sage2_8", 1, "1.3x exact", 4, ("1x2x9x9x64 bf16",)
)
PLAN = Plan("f00d", "FluxPipeline", 0.998, False, "NVIDIA H200", {"torch": "2.11"}, (ENTRY,))


def broken(**changes: object) -> str:
    data = json.loads(PLAN.to_json())
    data.update(changes)
    return json.dumps(data)


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "needs a JSON object"),
        (broken(schema=SCHEMA + 1), "this version reads"),
        (broken(surprise=1), "unknown fields: surprise"),
        (broken(threshold="high"), "threshold is 'high', needs float"),
        (broken(threshold=True), "threshold is True"),
        (broken(entries=None), "no list of entries"),
        (broken(entries=[{}]), "lacks the fields"),
        (broken(versions={"torch": 2}), "versions"),
    ],
    ids=lambda x: x[:24],
)
def test_anything_else_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.from_json(text)


def test_entries_are_checked() -> None:
    entry = json.loads(PLAN.to_json())["entries"][0]
    with pytest.raises(PlanError, match="does not exist"):
        Plan.from_json(broken(entries=[{**entry, "variant": "triton.sage9"}]))
    with pytest.raises(PlanError, match="names a layer twice: blocks"):
        Plan.from_json(broken(entries=[entry, entry]))


def test_another_model_and_unknown_layers() -> None:
    PLAN.check("f00d", ["blocks.0.attn", "blocks.1.attn"])
    with pytest.raises(PlanError, match="another model"):
        PLAN.check("beef", ["blocks.0.attn"])
    with pytest.raises(PlanError, match=r"has not: blocks\.0\.attn"):
        PLAN.check("f00d", ["other"])


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(MachineError, match="cannot write"):
        PLAN.save(tmp_path / "no" / "folder" / "plan.json")
