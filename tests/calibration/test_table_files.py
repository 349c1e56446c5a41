"""Tables as files: whole, strict, and what an interrupted calibration goes on from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from models.diffusers_pipelines import tiny_flux_pipeline
from models.layers import calibration, errors, sample
from models.stacks import stack, tokens

import sagepatch
from sagepatch import api
from sagepatch.calibration.sample import Remedy
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.errors import InvalidArgument, PlanError

FAST = "triton.sage2_8"
PICTURE = {"height": 16, "width": 16, "output_type": "latent", "max_sequence_length": 8}


def made() -> Calibration:
    bad = replace(errors(-1.0), finite=False, rel_l1=(math.inf,), norm_ratio=(math.inf,))
    rows = (
        sample(1, {FAST: (0.999, 0.9995)}, (0, 4), us={FAST: 4.0}, us_exact=9.0, run="a"),
        replace(sample(2, {}, (3, 4)), errors={FAST: bad}, statistics=None),
    )
    tried = (
        Remedy("", "sage2_8", "call 1", 0.9, 0.4, 1.1, FAST),
        Remedy("rotation", "sage2_8", "call 1", 0.99, 0.1, 1.0, None),
    )
    layers = LayerTable("a", "self", rows, tried), LayerTable("b", "joint", spoilt=3)
    return calibration(*layers, runs=("a",), run_seconds=2.0, measuring_seconds=1.0)


def test_a_table_is_a_file(tmp_path) -> None:
    made().save(tmp_path / "table.json")
    assert Calibration.load(tmp_path / "table.json") == made()
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert "Infinity" not in (tmp_path / "table.json").read_text()


def test_files_that_do_not_count_spoilt_calls_have_none(tmp_path) -> None:
    made().save(tmp_path / "table.json")
    values = json.loads((tmp_path / "table.json").read_text())
    for one in values["layers"]:
        del one["spoilt"]
    (tmp_path / "older.json").write_text(json.dumps(values))
    assert [one.spoilt for one in Calibration.load(tmp_path / "older.json").layers] == [0, 0]


def changed(**changes) -> str:
    return json.dumps({"schema": 1, **json.loads(json.dumps(data())), **changes})


def data() -> dict:
    from sagepatch.calibration.table_json import rendered

    return json.loads(rendered(made()))


def layer(**changes) -> list:
    first, *others = data()["layers"]
    return [{**first, **changes}, *others]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "schema 'list', needs 2"),
        (changed(schema=3), "schema 3, needs 2): calibrate anew"),
        ("{}", "schema None"),
        (changed(layers=None), "no whole table"),
        (changed(layers=[{}]), "KeyError"),
        (changed(versions=[]), "no whole table"),
        (changed(layers=layer(rows=[{}])), "no whole table"),
        (changed(layers=layer(remedies=[{"name": "x"}])), "no whole table"),
        (changed(run_seconds="long"), "no whole table"),
    ],
    ids=lambda x: x[:30],
)
def test_anything_else_is_refused_in_a_sentence(tmp_path, text: str, said: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(PlanError, match=re.escape(said)):
        Calibration.load(tmp_path / "t.json")


def odd(**changes) -> str:
    """A table whose first sample of the first layer differs, or that sample's first candidate."""
    whole = data()
    row = whole["layers"][0]["rows"][0]
    name = next(iter(row["errors"]))
    for field, value in changes.items():
        (row if field in row else row["errors"][name])[field] = value
    return json.dumps(whole)


# Once wrong: read and weighed against others; heads that differ in number raised a bare ValueError.
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (odd(us_exact=-3.0), "sample 1: us_exact is -3, needs a finite number of 0 or more"),
        (odd(us=math.nan), "us is nan, needs a finite number"),
        (odd(host_us=math.inf), "host_us is inf, needs a finite number"),
        (odd(cosine=[math.nan, 1.0]), "cosine is nan, needs -1 to 1"),
        (odd(cosine=[None, 1.0]), "cosine is inf, needs -1 to 1"),
        (odd(rel_l1=[-0.5, 0.1]), "rel_l1 is -0.5, needs 0 or more"),
        (odd(rmse=[0.1] * 9), "rmse has 9 heads, cosine has 2"),
        (odd(step=28, steps=28), "step is 28 of 28, needs 0 to 27"),
        (odd(step=-1, steps=28), "step is -1 of 28"),
        (changed(run_seconds=-1.0), "run_seconds is -1"),
        (changed(measuring_seconds=math.nan), "measuring_seconds is nan"),
    ],
    ids=lambda x: x[:30],
)
def test_odd_numbers_are_refused_with_their_place(tmp_path, text: str, said: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(PlanError, match=re.escape(said)):
        Calibration.load(tmp_path / "t.json")


# Once wrong: a plan solved from the file gave the kernel's present version to its old errors, and a
# kernel that is gone ended in a KeyError.
@pytest.mark.parametrize(
    ("name", "version", "said"),
    [(FAST, 7, f"{FAST} had numerics version 7"), ("triton.sage9", 1, "triton.sage9 is gone")],
)
def test_measurements_of_kernels_that_changed_are_left_out_and_named(
    tmp_path, caplog, name: str, version: int, said: str
) -> None:
    other = "triton.sage1_b"
    rows = tuple(
        sample(n, {FAST: 0.9999, other: 0.9995}, us={FAST: 2.0, other: 3.0}, us_exact=9.0, run="a")
        for n in (1, 2)
    )
    table = calibration(LayerTable("x", "self", rows))
    assert table.plan().entries[0].variant == FAST
    table.save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text().replace(FAST, name))
    assert set(data["kernels"]) == {name, other}
    data["kernels"][name] = version
    (tmp_path / "t.json").write_text(json.dumps(data))
    read = Calibration.load(tmp_path / "t.json")
    assert read.plan().entries[0].variant == other
    assert len(read.stale) == 1
    assert read.stale[0].startswith(said)
    assert said in caplog.text
    # Kept again it holds what is left, and says so no more.
    read.save(tmp_path / "again.json")
    assert Calibration.load(tmp_path / "again.json").stale == ()


def test_a_table_with_outdated_measurements_is_not_gone_on_from(tmp_path) -> None:
    model, x, path = stack(), tokens(), tmp_path / "table.json"
    with torch.no_grad():
        sagepatch.calibrate(model, run=lambda: model(x), table=path, emulate=True)
    data = json.loads(path.read_text())
    data["kernels"] = dict.fromkeys(data["kernels"], 99)
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidArgument, match=r"cannot be gone on from: emulated.* version 99"):
        sagepatch.calibrate(model, run=lambda: model(x), table=path, emulate=True)


class TestGoingOn:
    """A calibration in several sittings."""

    @pytest.fixture
    def pipe(self):
        return tiny_flux_pipeline()

    def runs(self, pipe, drawn: list[str], texts: list[str], stop_at: int | None = None):
        """Named generations of `pipe`; the one at `stop_at` is interrupted after two steps."""

        def draw(number: int, text: str) -> None:
            def step(_, index, t, values):
                if number == stop_at and index == 1:
                    raise KeyboardInterrupt
                return values

            drawn.append(text)
            with torch.no_grad():
                pipe(text, num_inference_steps=4, callback_on_step_end=step, **PICTURE)

        return [
            (api.run_name(text), lambda n=n, text=text: draw(n, text))
            for n, text in enumerate(texts)
        ]

    # case 58
    def test_interrupted_it_keeps_what_was_measured_and_goes_on_from_there(
        self, pipe, tmp_path
    ) -> None:
        drawn: list[str] = []
        path, texts = tmp_path / "table.json", ["a cat", "a dog", "a cow"]
        first = api.calibrate_runs(
            pipe, self.runs(pipe, drawn, texts, stop_at=1), table=path, emulate=True
        )
        assert drawn == ["a cat", "a dog"]
        assert first.runs == (api.run_name("a cat"),)
        assert Calibration.load(path) == first
        dog = api.run_name("a dog")
        assert next(row.step for row in first.layers[0].rows if row.run == dog) == 0
        second = api.calibrate_runs(pipe, self.runs(pipe, drawn, texts), table=path, emulate=True)
        assert drawn[2:] == ["a dog", "a cow"]
        assert second.runs == tuple(api.run_name(text) for text in texts)
        assert Calibration.load(path) == second
        rows = second.layers[0].rows
        # The first steps of the interrupted run were measured anew, not twice.
        assert len({(row.run, row.call) for row in rows}) == len(rows)
        assert len({(row.run, row.step) for row in rows}) == len(rows)
        assert {row.run for row in rows} == set(second.runs)
        third = api.calibrate_runs(pipe, self.runs(pipe, drawn, texts), table=path, emulate=True)
        assert len(drawn) == 4
        assert third == second

    # Once wrong: the interrupted run's calls had other numbers than its second start's.
    def test_a_run_begun_twice_gives_no_second_sample(self, tmp_path) -> None:
        model, x, path = stack(), tokens(), tmp_path / "table.json"

        def once() -> None:
            with torch.no_grad():
                model(x)

        def interrupted() -> None:
            once()
            raise KeyboardInterrupt

        first = [("a", once), ("b", interrupted)]
        begun = api.calibrate_runs(model, first, table=path, emulate=True)
        assert [(row.run, row.call) for row in begun.layers[0].rows] == [("a", 1), ("b", 1)]
        again = api.calibrate_runs(model, [("a", once), ("b", once)], table=path, emulate=True)
        assert [(row.run, row.call) for row in again.layers[0].rows] == [("a", 1), ("b", 1)]

    def test_a_run_named_twice_runs_once(self, tmp_path) -> None:
        model, x = stack(), tokens()
        drawn: list[str] = []

        def once() -> None:
            drawn.append("z")
            with torch.no_grad():
                model(x)

        made = api.calibrate_runs(model, [("z", once), ("z", once)], emulate=True)
        assert (drawn, made.runs) == (["z"], ("z",))
        # Nobody can tell whether runs without a name are the same.
        api.calibrate_runs(model, [("", once), ("", once)], emulate=True)
        assert drawn == ["z"] * 3

    def test_another_error_keeps_the_file_too(self, tmp_path) -> None:
        model, x, path = stack(), tokens(), tmp_path / "table.json"

        def run() -> None:
            with torch.no_grad():
                model(x)
            raise RuntimeError("boom")

        with pytest.raises(RuntimeError, match="boom"):
            sagepatch.calibrate(model, run=run, table=path, emulate=True)
        assert {one.samples for one in Calibration.load(path).layers} == {1}

    def test_a_table_of_another_model_is_refused_and_left(self, tmp_path) -> None:
        path = tmp_path / "table.json"
        made().save(path)
        before = path.read_text()
        model, x = stack(), tokens()
        ran: list[int] = []
        earlier = sagepatch.apply(model, variant="exact")
        with pytest.raises(PlanError, match="measured on another model"):
            sagepatch.calibrate(model, run=lambda: ran.append(1), table=path, emulate=True)
        assert (path.read_text(), ran) == (before, [])
        assert model(x).isfinite().all()
        assert not earlier.restored

    def test_times_of_another_gpu_are_refused_before_anything_runs(self, tmp_path) -> None:
        model, x, path = stack(), tokens(), tmp_path / "table.json"
        run = lambda: model(x)  # noqa: E731
        with torch.no_grad():
            first = sagepatch.calibrate(model, run=run, emulate=True)
        replace(first, gpu="NVIDIA H200").save(path)
        with pytest.raises(InvalidArgument, match="different GPUs"):
            sagepatch.calibrate(model, run=run, table=path, emulate=True)

    def test_without_names_runs_add_up(self, tmp_path) -> None:
        model, x, path = stack(), tokens(), tmp_path / "table.json"

        def run() -> None:
            with torch.no_grad():
                model(x)

        for count in (1, 2, 3):
            table = sagepatch.calibrate(model, run=run, table=path, emulate=True)
            assert {one.samples for one in table.layers} == {count}


def test_what_was_refused_and_the_runs_come_back(tmp_path) -> None:
    rows = tuple(
        replace(one, refused=("triton.sage1_vb",), skipped=("triton.sage1_b",))
        for one in (sample(1, {"triton.sage2_8": 0.9999}, run="a"),)
    )
    runs = {"sdpa.exact": ("a", "b", ""), "triton.sage2_8": ("a", "")}
    made = calibration(LayerTable("x", "self", rows, (), runs))
    made.save(tmp_path / "table.json")
    assert Calibration.load(tmp_path / "table.json") == made


# Files of schema 1 say neither what was refused nor which runs were not kept.
def test_an_older_table_counts_what_a_sample_lacks_as_refused(tmp_path) -> None:
    wide = sample(1, {"triton.sage2_8": 0.9999, "triton.sage1_b": 0.9999}, run="a")
    narrow = sample(2, {"triton.sage2_8": 0.9999}, run="b")
    short = replace(narrow, call=3, skipped=("triton.sage1_b",))
    made = calibration(LayerTable("x", "self", (wide, narrow, short)))
    made.save(tmp_path / "table.json")
    data = json.loads((tmp_path / "table.json").read_text())
    data["schema"] = 1
    del data["layers"][0]["runs"]
    for row in data["layers"][0]["rows"]:
        del row["refused"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    (layer,) = Calibration.load(tmp_path / "old.json").layers
    assert [row.refused for row in layer.rows] == [(), ("triton.sage1_b",), ()]
    assert layer.names == ("triton.sage2_8",)
    assert layer.prompts() == 2
