"""Plans: strict JSON, atomic files, and sentences for everything that does not fit."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from sagepatch.errors import MachineError, PlanError
from sagepatch.plan import SCHEMA, Plan, PlanEntry, PlanRange, alike
from sagepatch.plan_values import _BOUNDS
from sagepatch.spec import AttnSpec, MaskKind

ROOT = Path(__file__).parent.parent

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
        (broken(schema=SCHEMA + 1), f"reads up to {SCHEMA}: upgrade sagepatch"),
        (broken(schema=0), "schema 0, needs a number from 1"),
        (broken(schema=True), "schema True"),
        (broken(schema="2"), "schema '2'"),
        ("[" * 100_000, "not JSON"),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"variant": "sage2_8"}, "variant 'sage2_8', which does not exist"),
        ({"alternatives": {"triton.sage9": 1}}, "variant 'triton.sage9'"),
        ({"alternatives": {"triton.sage1_b": "1"}}, "alternatives is"),
        ({"shapes": "1x2x9x9x64 bf16"}, "shapes is '1x2x9x9x64 bf16', needs a list of strings"),
        ({"shapes": [1]}, "needs a list of strings"),
        ({"cosine": float("nan")}, "cosine is nan"),
        ({"samples": 2.5}, "samples is 2.5, needs int"),
        ({"site": None}, "site is None, needs str"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_every_value_is_checked(changes, said: str) -> None:
    entry = json.loads(PLAN.to_json())["entries"][0]
    with pytest.raises(PlanError, match=re.escape(said)):
        Plan.from_json(broken(entries=[{**entry, **changes}]))


# Once wrong: all but NaN and infinity were read, and shown or weighed as they were.
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: -1.0}, f"{name} is -1.0, needs 0 or more") for name in ("us_exact", "us_chosen")),
        *(({name: math.inf}, f"{name} is inf, needs a finite number") for name in ("us_exact",)),
        *(({name: -0.1}, f"{name} is -0.1, needs 0 or more") for name in ("rel_l1", "rmse")),
        *(({name: -9}, f"{name} is -9, needs 0 or more") for name in ("norm_ratio", "samples")),
        *(({name: -1}, f"{name} is -1, needs 0 or more") for name in ("worst_head", "worst_call")),
        *(({name: -1}, f"{name} is -1, ") for name in ("max_abs_v", "k_offset", "q_outlier")),
        ({"numerics_version": -1}, "numerics_version is -1, needs 0 or more"),
        ({"cosine": 1.5}, "cosine is 1.5, needs -1 to 1"),
        ({"cosine_mean": -2}, "cosine_mean is -2, needs -1 to 1"),
        ({"p_entropy": 3.0}, "p_entropy is 3.0, needs 0 to 1"),
        ({"alternatives": {"triton.sage1_b": -1}}, "alternatives has -1 for triton.sage1_b"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_odd_numbers_are_refused_with_their_field_and_entry(changes, said: str) -> None:
    entry = json.loads(PLAN.to_json())["entries"][0]
    second = {**entry, "site": "blocks.7.attn", **changes}
    with pytest.raises(PlanError) as caught:
        Plan.from_json(broken(entries=[entry, second]), "p.json")
    assert str(caught.value).startswith(f"p.json, entry 2 (blocks.7.attn): {said}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"end": 1.5}, "end is 1.5, needs 0 to 1"),
        ({"start": -0.25}, "start is -0.25, needs 0 to 1"),
        ({"start": math.nan}, "start is nan, needs a finite number"),
        ({"us_chosen": -3.0}, "us_chosen is -3.0, needs 0 or more"),
        ({"cosine": -7}, "cosine is -7, needs -1 to 1"),
        ({"alternatives": {"triton.sage1_b": -1}}, "alternatives has -1 for triton.sage1_b"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_odd_numbers_of_a_range_are_refused_with_its_number(changes, said: str) -> None:
    entry = json.loads(replace(PLAN, entries=(RANGED,)).to_json())["entries"][0]
    entry["ranges"][1] |= changes
    with pytest.raises(PlanError) as caught:
        Plan.from_json(broken(entries=[entry]), "p.json")
    assert str(caught.value).startswith(f"p.json, entry 1 ({RANGED.site}), range 2: {said}")


def test_numbers_at_their_bounds_are_read() -> None:
    entry = json.loads(PLAN.to_json())["entries"][0]
    for changes in (
        {"cosine": -1, "cosine_mean": 1.0000001, "p_entropy": 1.0000002, "norm_ratio": 0},
        {"cosine": 1, "p_entropy": -1e-8, "us_exact": 0.0, "samples": 0, "worst_head": 0},
        {"rel_l1": 1e30, "k_offset": 1e300, "q_outlier": 0.0, "numerics_version": 0},
    ):
        made = Plan.from_json(broken(entries=[{**entry, **changes}])).entries[0]
        assert {name: getattr(made, name) for name in changes} == changes


def test_a_plan_of_schema_1_upgrades() -> None:
    old = {
        "fingerprint": "f00d",
        "model": "FluxPipeline",
        "threshold": 0.998,
        "emulated": False,
        "gpu": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "entries": [
            {
                **{"site": "a", "kind": "self", "variant": "triton.sage2_8"},
                **{"numerics_version": 1, "reason": "1.3x exact", "samples": 4},
                **{"shape": "1x2x9x9x64 bf16", "dtype": "bf16", "cosine": 0.999, "rel_l1": 0.02},
                **{"rmse": 0.1, "norm_ratio": 1.0, "worst_head": 1, "us_exact": 9.0},
                "us_chosen": 7.0,
            }
        ],
        "schema": 1,
    }
    plan = Plan.from_json(json.dumps(old))
    assert plan.schema == SCHEMA
    assert plan.entries[0].shapes == ("1x2x9x9x64 bf16",)
    assert (plan.entries[0].cosine, plan.entries[0].alternatives) == (0.999, {})
    assert Plan.from_json(plan.to_json()) == plan
    old["entries"][0]["shape"] = None
    assert Plan.from_json(json.dumps(old)).entries[0].shapes == ()
    old["entries"][0]["surprise"] = 1
    with pytest.raises(PlanError, match="unknown fields: surprise"):
        Plan.from_json(json.dumps(old))
    with pytest.raises(PlanError, match="no list of entries"):
        Plan.from_json(json.dumps({**old, "entries": "none"}))


RANGES = (
    PlanRange(0.0, 0.25, "sdpa.exact", 1, "first steps"),
    PlanRange(0.25, 1.0, "triton.sage2_8", 1, "fast", 0.999, alternatives={"triton.sage1_b": 1}),
)
RANGED = replace(ENTRY, variant="sdpa.exact", ranges=RANGES)


def test_ranges_survive_a_file_and_hold_every_place_once() -> None:
    plan = replace(PLAN, entries=(RANGED,))
    assert Plan.from_json(plan.to_json()) == plan
    for at, variant in ((0, "sdpa.exact"), (0.2499, "sdpa.exact"), (0.25, "triton.sage2_8")):
        assert RANGED.range_at(at).variant == variant
    assert RANGED.range_at(1.0) is RANGES[1]
    assert [part.holds(0.25) for part in RANGES] == [False, True]
    assert RANGED.variants == ("sdpa.exact", "triton.sage2_8")
    assert RANGED.named == ("sdpa.exact", "triton.sage2_8", "triton.sage1_b")
    assert ENTRY.range_at(0.5) is None


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([{"end": 0.5}, {}], "are 0 to 0.5, 0.25 to 1; they must follow one another from 0 to 1"),
        ([{}], "are 0 to 0.25; they must follow"),
        ([{"start": 0.1}, {}], "are 0.1 to 0.25, 0.25 to 1"),
        ([{"end": 0.0}, {"start": 0.0}], "are 0 to 0, 0 to 1"),
        ([{"end": "late"}, {}], "end is 'late', needs float"),
        ([{"end": None}, {}], "end is None"),
        ([{"variant": "triton.sage9"}, {}], "variant 'triton.sage9', which does not exist"),
        ([{}, {"alternatives": {"nothing": 1}}], "variant 'nothing'"),
        ([{"odd": 1}, {}], "unknown fields: odd"),
        ({}, "ranges is {}, needs a list"),
        (None, "ranges is None, needs a list"),
        (["first"], "holds str where an object is needed"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_ranges_are_checked(ranges, said: str) -> None:
    entry = json.loads(replace(PLAN, entries=(RANGED,)).to_json())["entries"][0]
    if isinstance(ranges, list) and ranges and isinstance(ranges[0], dict):
        ranges = [{**old, **new} for old, new in zip(entry["ranges"], ranges, strict=False)]
    with pytest.raises(PlanError, match=re.escape(said)):
        Plan.from_json(broken(entries=[{**entry, "ranges": ranges}]))


def test_a_plan_of_schema_2_upgrades() -> None:
    old = json.loads(PLAN.to_json())
    for name in ("ranges", "k_offset", "q_outlier", "p_entropy", "remedy"):
        del old["entries"][0][name]
    assert Plan.from_json(json.dumps({**old, "schema": 2})) == PLAN
    with pytest.raises(PlanError, match="lacks the fields k_offset, p_entropy, q_outlier, ranges"):
        Plan.from_json(json.dumps(old))


SPEC = AttnSpec(2, 8, 8, 100, 200, 64, 64, "bf16", "bf16", "cuda", 90)


@pytest.mark.parametrize(
    ("changes", "factor", "like"),
    [
        ({}, 1.0, True),
        ({"batch": 5, "arch": 120, "device": "cpu"}, 1.0, True),
        ({"q_len": 101}, 1.0, False),
        ({"q_len": 200, "kv_len": 100}, 2.0, True),
        ({"q_len": 201}, 2.0, False),
        ({"kv_len": 99}, 2.0, False),
        ({"kv_heads": 2}, 2.0, False),
        ({"v_head_dim": 32}, 2.0, False),
        ({"dtype": "fp16"}, 2.0, False),
        ({"mask": MaskKind.BOOL}, 2.0, False),
        ({"causal_offset": 0}, 2.0, False),
        ({"window": 9}, 2.0, False),
    ],
    ids=lambda x: str(x)[:36],
)
def test_what_counts_as_a_like_call(changes, factor: float, like: bool) -> None:
    assert alike(str(SPEC), replace(SPEC, **changes), factor) is like


def test_a_causal_offset_moves_with_the_lengths() -> None:
    measured = replace(SPEC, causal_offset=100)
    assert alike(str(measured), replace(measured, kv_len=250, causal_offset=150), 2.0)
    assert not alike(str(replace(measured, window=9)), measured, 2.0)
    assert not alike("as nobody writes it", SPEC, 2.0)


def test_the_published_schema_is_what_is_read() -> None:
    published = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    entry = published["properties"]["entries"]["items"]
    part = entry["properties"]["ranges"]["items"]
    for described, made in ((published, PLAN), (entry, ENTRY), (part, RANGES[0])):
        names = {field.name for field in fields(made)}
        assert set(described["properties"]) == names
        assert set(described["required"]) == names
        assert described["additionalProperties"] is False
    assert published["properties"]["schema"]["const"] == SCHEMA
    kinds = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    every = [(entry, field) for field in fields(PlanEntry)]
    for owner, field in (*every, *((part, field) for field in fields(PlanRange))):
        least, most = _BOUNDS.get(field.name, (None, None))
        bounds = owner["properties"][field.name]
        assert bounds.get("minimum") == least, field.name
        assert bounds.get("maximum") == (None if most == math.inf else most), field.name
        described = owner["properties"][field.name]["type"]
        base, _, optional = str(field.type).partition(" | ")
        json_type = kinds.get(base, "array" if base.startswith("tuple") else "object")
        assert described == ([json_type, "null"] if optional else json_type), field.name


def test_another_model_and_unknown_layers() -> None:
    PLAN.check("f00d", ["blocks.0.attn", "blocks.1.attn"])
    with pytest.raises(PlanError, match="another model"):
        PLAN.check("beef", ["blocks.0.attn"])
    with pytest.raises(PlanError, match=r"has not: blocks\.0\.attn"):
        PLAN.check("f00d", ["other"])


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "picture.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(PlanError, match="is no text, so no plan"):
        Plan.load(tmp_path / "picture.json")
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(MachineError, match="cannot write"):
        PLAN.save(tmp_path / "no" / "folder" / "plan.json")
