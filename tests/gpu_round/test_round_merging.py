"""Rows of an archive in the tables: what is replaced, what is beside it, what is refused."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end_rows import Row, measured, read
from benchmarks.gpu_round import merging
from benchmarks.gpu_round.merging import BENCHMARKS, TABLES, Archive, merge

OUT = "/somewhere/round"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tables."""
    copied = tmp_path / "tree" / "benchmarks"
    for name in TABLES:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(BENCHMARKS / name, copied / name)
    return copied


def csv_text(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def archive(where: Path, *jobs: dict[str, Any], changed: tuple[str, ...] = ()) -> Archive:
    """An archive of jobs: name, outcome and the files with their tables and texts."""
    files, records = {}, []
    for one in jobs:
        for file, text in one["files"].items():
            files[f"{one['job']}/{file}"] = text
        outcome, command = one.get("outcome", "ok"), one.get("command", "python x.py")
        told = {"job": one["job"], "outcome": outcome, "command": command}
        records.append({**told, "writes": one["writes"]})
    about = {"commit": "abc1234", "changed": list(changed), "out": OUT, "jobs": records}
    about |= {"gpu": "a GPU", "driver": "1", "cuda": "13", "versions": {"torch": "2"}}
    files["summary.json"] = json.dumps(about)
    path = where / "round.tar"
    with tarfile.open(path, "w") as tar:
        for name, text in files.items():
            told_file = tarfile.TarInfo(name)
            told_file.size = len(text.encode())
            tar.addfile(told_file, io.BytesIO(text.encode()))
    return Archive(path)


def job(name: str, table: str, text: str, **options: Any) -> dict[str, Any]:
    file = Path(table).name
    return {"job": name, "files": {file: text}, "writes": {file: table}} | options


def fresh(rows: list[Row], **changes: str) -> list[Row]:
    return [row | {"commit": "abc1234"} | changes for row in rows]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_written_as_it_is(name: str, folder: Path) -> None:
    before = (folder / name).read_bytes()
    merging.write(folder / name, read(folder / name))
    assert (folder / name).read_bytes() == before


def test_rows_of_a_shape_are_replaced_where_they_stand(folder: Path, tmp_path: Path) -> None:
    name = "h200_attention.csv"
    before = read(folder / name)
    mine = [row for row in before if row["shape"] == "d128_16k"]
    new = fresh(mine[1:], tflops="1", command=f"python x --out {OUT}/attention_d128_16k/{name}")
    extra = fresh(mine[:1], variant="cuda.new")
    text = csv_text([*new, *extra])
    said = merge(archive(tmp_path, job("attention_d128_16k", name, text)), [], folder)
    after = read(folder / name)
    assert len(after) == len(before) + 1
    at = next(i for i, row in enumerate(before) if row["shape"] == "d128_16k")
    assert after[at] == mine[0]
    assert [row["tflops"] for row in after[at + 1 : at + len(mine)]] == ["1"] * (len(mine) - 1)
    assert after[at + 1]["command"] == f"python x --out {name}"
    assert after[at + len(mine)]["variant"] == "cuda.new"
    assert [r for r in after if r["shape"] != "d128_16k"] == [
        r for r in before if r["shape"] != "d128_16k"
    ]
    old = mine[0]["commit"]
    assert said[0] == f"{name}: {len(new)} rows replaced of {old}, 1 new ones of abc1234"
    assert f"  d128_16k {mine[1]['variant']}" in said
    assert said[-2:] == [
        f"  beside them, of another run of {old}:",
        f"    d128_16k {mine[0]['variant']}",
    ]


def test_forwards_go_by_model_and_mode_whatever_a_plan_was_made_on(
    folder: Path, tmp_path: Path
) -> None:
    name, parts = "h200_end_to_end.csv", "h200_end_to_end_parts.csv"
    model = "llama_3_1_8b_32k"
    mine = [row for row in read(folder / name) if row["model"] == model]
    (mode,) = (row["mode"] for row in mine if row["mode"].startswith("calibrated"))
    assert mode == "calibrated (8k)"
    renamed = [row | {"mode": row["mode"].partition(" ")[0]} for row in fresh(mine)]
    more = [row for row in read(folder / parts) if row["model"] == model]
    one = job("end_to_end", name, csv_text(renamed))
    one["files"][parts] = csv_text(fresh(more))
    one["writes"][parts] = parts
    count = len(read(folder / name))
    merge(archive(tmp_path, one), [], folder)
    assert len(read(folder / name)) == count
    (found,) = (m for m in measured(folder) if m.model == model)
    assert {row["commit"] for row in found.rows.values()} == {"abc1234"}
    assert set(found.parts) == set(found.rows)


def test_a_compiled_model_is_another_one(folder: Path, tmp_path: Path) -> None:
    name = "h200_end_to_end.csv"
    before = read(folder / name)
    mine = [row for row in before if row["model"] == "llama_3_1_8b_32k"]
    new = fresh(mine, compile="True")
    merge(archive(tmp_path, job("compiled", name, csv_text(new))), [], folder)
    assert len(read(folder / name)) == len(before) + len(new)
    assert all(row in read(folder / name) for row in before)


def test_tables_of_the_language_model_are_replaced_whole(folder: Path, tmp_path: Path) -> None:
    name = "quality/language_recall.csv"
    new = fresh(read(folder / name)[:3])
    said = merge(archive(tmp_path, job("language", name, csv_text(new))), [], folder)
    assert read(folder / name) == new
    assert "  all of it" in said


def test_a_calibration_replaces_its_rounds_and_no_cpus(folder: Path, tmp_path: Path) -> None:
    name = "calibration_cost.csv"
    before = read(folder / name)
    on_gpu = [row for row in before if row["about"].startswith("NVIDIA")]
    one = on_gpu[-1]
    same = [r for r in on_gpu if (r["model"], r["steps"]) == (one["model"], one["steps"])]
    assert len(same) > 1
    merge(archive(tmp_path, job("cost", name, csv_text([one]))), [], folder)
    after = read(folder / name)
    assert len(after) == len(before) - len(same) + 1
    assert [r for r in after if r["about"].startswith("CPU")] == [
        r for r in before if r["about"].startswith("CPU")
    ]


def test_what_a_script_leaves_out_is_what_the_round_knew(folder: Path, tmp_path: Path) -> None:
    name = "h200_cuda_tiles.csv"
    row = {k: v for k, v in read(folder / name)[0].items() if k not in ("commit", "command")}
    told = job("cuda_tiles", name, csv_text([row]), command=f"python t.py {OUT}/cuda_tiles/{name}")
    merge(archive(tmp_path, told), [], folder)
    after = read(folder / name)[0]
    assert (after["commit"], after["command"]) == ("abc1234", f"python t.py {name}")


def test_an_unknown_commit_is_the_rounds(folder: Path, tmp_path: Path) -> None:
    name = "h200_masked.csv"
    new = fresh(read(folder / name)[:1], commit="unknown")
    merge(archive(tmp_path, job("masked", name, csv_text(new))), [], folder)
    assert read(folder / name)[0]["commit"] == "abc1234"


def test_a_bench_becomes_rows(folder: Path, tmp_path: Path) -> None:
    name = "h200_mma_speed.csv"
    old = read(folder / name)[4]
    numbers = ("ms_median", "ms_p20", "ms_p80", "tflops", "speedup", "cosine", "rel_l1")
    found = {
        "shapes": [
            {"name": old["shape"], "load": None, "causal": False}
            | {"batch": 1, "q_heads": 32, "kv_heads": 32, "length": 16384, "head_dim": 128}
        ],
        "rows": [
            {"shape": old["shape"], "variant": old["variant"], "dtype": "bf16", "runs": 3}
            | dict.fromkeys(numbers, 1.5)
        ],
        "machine": {"versions": {"torch": "2", "triton": "3"}},
        "gpu": {"name": "a GPU", "driver": "1"},
        "code": {"sources": "f00", "commit": None},
        "made": "today",
    }
    one = {"job": "mma_speed", "files": {"b.json": json.dumps(found) + "\n"}}
    merge(archive(tmp_path, one | {"writes": {"b.json": name}}), [], folder)
    after = read(folder / name)[4]
    assert (after["tflops"], after["commit"], after["gpu"]) == ("1.5", "abc1234", "a GPU")


def test_only_jobs_that_ended_well_are_taken_unless_named(folder: Path, tmp_path: Path) -> None:
    name = "h200_masked.csv"
    text = csv_text(fresh(read(folder / name)[:2]))
    half = text.rstrip()[:-4]
    held = archive(tmp_path, job("masked", name, half, outcome="ended"))
    before = (folder / name).read_bytes()
    assert merge(held, [], folder) == ["masked: ended, not taken unless it is named"]
    assert (folder / name).read_bytes() == before
    merge(held, ["mask*"], folder)
    # The second line was cut off.
    assert [row["commit"] for row in read(folder / name)].count("abc1234") == 1


def test_a_dry_run_says_it_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    name = "h200_masked.csv"
    before = (folder / name).read_bytes()
    held = archive(tmp_path, job("masked", name, csv_text(fresh(read(folder / name)[:1]))))
    assert merge(held, [], folder, dry=True)[0].startswith(f"{name}: 1 rows replaced")
    assert (folder / name).read_bytes() == before


def test_pages_that_name_a_replaced_commit_are_said(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "docs").mkdir()
    (folder.parent / "docs" / "page.md").write_text("measured at 69e929a")
    rows = fresh(read(folder / "h200_masked.csv"))
    held = archive(tmp_path, job("m", "h200_masked.csv", csv_text(rows)), changed=("a.cu",))
    said = merge(held, [], folder)
    assert said[0] == "the round's files: not what abc1234 says: a.cu"
    assert said[-1] == "docs/page.md names 69e929a: read it again"


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("h200_masked.csv", {"odd": "1"}, "the table has no column odd"),
        ("../README.md", {}, "writes ../README.md, which is no table"),
    ],
)
def test_what_no_table_takes_is_refused(
    table: str, changes: dict[str, str], message: str, folder: Path, tmp_path: Path
) -> None:
    rows = fresh(read(folder / "h200_masked.csv")[:1], **changes)
    before = (folder / "h200_masked.csv").read_bytes()
    with pytest.raises(ValueError, match=message):
        merge(archive(tmp_path, job("m", table, csv_text(rows))), [], folder)
    assert (folder / "h200_masked.csv").read_bytes() == before


def test_a_file_that_is_no_archive_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.tar"
    path.write_text("no tar")
    assert merging.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err
