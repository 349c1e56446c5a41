"""The sources with delays that benchmarks/h200_schedule.py runs on a GPU: they are those that
serve, with delays, and leave those that serve alone. Needs no GPU.
"""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import h200_schedule
import host_stub
import schedule_calls
import schedule_noise
from schedule_calls import DIMS, FORMS, WAYS, runs

from sagepatch.backends.cuda import attention, build, launch, prepass
from sagepatch.backends.cuda.attention_tiles import SERVED, Options, instance
from sagepatch.numerics.recipe import RECIPES

needs_compiler = pytest.mark.skipif(
    build.missing("sm_90a") is not None, reason="no NVRTC that compiles for sm_90a"
)
# What threads wait by, as the sources call it.
SYNCHRONISING = (
    *("wait", "arrive", "expect_bytes", "load_box", "meet", "take_turn", "give_turn"),
    *("wait_for_front", "let_next_begin", "share_writes", "write_release"),
    *("__syncthreads", "__threadfence"),
)


@pytest.mark.parametrize("name", schedule_noise.FAULTS)
def test_a_fault_takes_out_what_the_source_says(name):
    fault = schedule_noise.FAULTS[name]
    whole, faulty = schedule_noise.texts(), schedule_noise.texts(fault)
    differing = [file for file in whole if whole[file] != faulty[file]]
    assert differing == [schedule_noise.name_of(fault.file)]
    recipe, dim, form = WAYS[fault.way]
    assert runs(form, recipe, dim)


def test_a_source_that_says_something_else_is_refused():
    fault = schedule_noise.Fault("attention.cu", "wait(nothing);", "", "serial")
    with pytest.raises(ValueError, match="0 times"):
        schedule_noise.texts(fault)


@pytest.mark.parametrize("file", schedule_noise.EDITED)
def test_without_its_edits_the_text_is_the_one_that_serves(file):
    text = schedule_noise.texts()[schedule_noise.name_of(file)].removesuffix(schedule_noise.ROOM)
    text = text.replace(f'#include "{schedule_noise.NOISE.name}"\n', "").replace("_noise.cu", ".cu")
    for name, said, instead in schedule_noise.EDITS:
        text = text.replace(instead, said) if name == file else text
    assert text == (build.FOLDER / file).read_text(encoding="utf-8")


def test_every_synchronisation_has_a_delay():
    header = schedule_noise.NOISE.read_text(encoding="utf-8")
    for name in SYNCHRONISING:
        assert re.search(rf"^#define {name}\(.*\bnoise\(", header, re.MULTILINE), name


def test_no_program_that_serves_has_delays():
    for recipe in SERVED:
        made = instance(RECIPES[recipe], 64, 64, Options(split=True, raw_q=torch.bfloat16)).program
        assert not any("noise" in text for text in made.text().values())
    for program in prepass.instances("sm_90a"):
        assert not any("noise" in text for text in program.text().values())


def test_every_form_of_call_is_served_by_some_recipe():
    for form in FORMS:
        assert any(runs(form, recipe, dim) for recipe in SERVED for dim in DIMS), form


@pytest.fixture
def stand_in(monkeypatch):
    """Takes launches in place of a driver, on tensors of the CPU; `loaded` are their sources."""
    driver, loaded = host_stub.install(monkeypatch), []
    stub = attention.load

    def load(program, name, signature, **options):
        loaded.append(program.source)
        monkeypatch.setitem(launch._LIBRARIES, program, (None, {}))
        return stub(program, name, signature, **options)

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(schedule_calls, "DEVICE", "cpu")
    stream = types.SimpleNamespace(cuda_stream=host_stub.STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bindings = pytest.importorskip("cuda.bindings.driver")
    done = bindings.CUresult.CUDA_SUCCESS
    driver.seeds = []

    def set_word(address, value, words, stream):
        driver.seeds.append(value)
        return (done,)

    monkeypatch.setattr(bindings, "cuLibraryGetGlobal", lambda library, name: (done, 4096, 4))
    monkeypatch.setattr(bindings, "cuMemsetD32Async", set_word)
    monkeypatch.setattr(bindings, "cuMemcpyDtoH", lambda to, address, size: (done,))
    # What nobody computes may be anything.
    monkeypatch.setattr(h200_schedule, "differ", lambda *pair: torch.zeros((), dtype=torch.bool))
    driver.loaded = loaded
    return driver


def test_a_form_runs_as_it_serves_and_with_every_seed(stand_in, tmp_path):
    schedule_noise.write(tmp_path)
    row = h200_schedule.of_form("packed", "sage2_8", 64, 3, tmp_path)
    assert row["seeds"] == 3
    assert stand_in.loaded[:3].count("attention.cu") == 1
    assert set(stand_in.loaded[3:]) == {"attention_noise.cu", "prepass_noise.cu"}
    assert {1, 2, 3} <= set(stand_in.seeds)
    assert len(stand_in.launches) == 3 * (1 + 1 + 3)


def test_a_fault_leaves_a_row_after_every_run(stand_in, tmp_path):
    fault = schedule_noise.FAULTS["parts: the flag"]
    schedule_noise.write(tmp_path, fault)
    job = dict(zip(("recipe", "dim", "form"), WAYS[fault.way], strict=True))
    rows = [dict(row) for row in h200_schedule.of_fault(job, 2, 1, tmp_path)]
    assert [row["quiet_runs"] + row["seeds"] for row in rows] == [0, 1, 2, 3, 3]
    assert "attention_noise.cu" in stand_in.loaded


@pytest.mark.parametrize(
    ("outcome", "code"), [("ended", 0), ("cut off", 0), ("died", 1), ("hung", 1)]
)
def test_a_form_whose_process_died_is_a_row_and_makes_the_script_fail(tmp_path, outcome, code):
    forms = ["dense", "causal"]
    job = {"kind": "whole", "what": "", "recipe": "sage2_8", "dim": 128, "forms": forms}
    none = dict.fromkeys(("differs", "unlike_quiet", "gave_up", "quiet_differs"), 0)
    row = {name: job[name] for name in ("kind", "what", "recipe", "dim")} | none | {"seeds": 4}
    ran = forms if outcome == "ended" else forms[:1]
    file = tmp_path / "0.jsonl"
    file.write_text("".join(json.dumps({**row, "form": form}) + "\n" for form in ran))
    rows = h200_schedule.rows_of(job, file, outcome)
    assert [(r["form"], r["outcome"]) for r in rows][len(ran) :] == [("causal", outcome)] * code
    assert h200_schedule.summarise(rows) == code


def test_a_form_that_differs_makes_the_script_fail(capsys):
    row = dict.fromkeys(("seeds", "differs", "unlike_quiet", "gave_up", "quiet_differs"), 0)
    row |= {"kind": "whole", "what": "", "recipe": "sage2_8", "dim": 64, "form": "dense"}
    assert h200_schedule.summarise([row | {"outcome": "ended", "differs": 1}]) == 1
    assert "1 forms that differ, gave up or did not end" in capsys.readouterr().out


@needs_compiler
def test_delays_compile_and_leave_products_beside_each_other(tmp_path, monkeypatch):
    schedule_noise.write(tmp_path)
    monkeypatch.setattr(build, "BESIDE", (*build.BESIDE, tmp_path))
    # The form with the most registers: products would wait for each other first here.
    program = instance(RECIPES["sage1_b_f32"], 256, 256, Options()).program
    made = build.compile_program(replace(program, source="attention_noise.cu"))
    assert b"noise_seed" in made.cubin
    assert "serialized" not in made.log
    program = prepass.instances("sm_90a", (RECIPES["sage2_8"],), raw_q=True)[0]
    made = build.compile_program(replace(program, source="prepass_noise.cu"))
    assert b"noise_seed" in made.cubin
