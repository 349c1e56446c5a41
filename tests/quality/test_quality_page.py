"""docs/quality.md says what the measurements say."""

from __future__ import annotations

from benchmarks.quality import page, page_told, predicted, tables

TEXT = page.PAGE.read_text(encoding="utf-8")


def test_every_number_comes_from_the_measurements() -> None:
    assert page.filled(TEXT) == TEXT, "run python -m benchmarks.quality.page"


def test_every_table_says_where_it_is_from() -> None:
    found = sorted(tables.HERE.glob("*.csv"))
    assert found
    for path in found:
        for row in tables.read(path):
            assert row["command"].startswith("python -m benchmarks.quality."), path
            assert row["device"], path
            assert "torch" in row["versions"], path
            assert row["commit"] not in ("", "unknown"), path
            # Paths of one machine tell nobody anything.
            assert "/" not in row["command"], path


def test_a_command_forgets_where_it_wrote() -> None:
    words = ["--captions", "4", "--out", "/tmp/x", "--only", "naive INT8", "--commit", "abc"]
    wanted = "python -m benchmarks.quality.demo --captions 4 --only 'naive INT8'"
    assert tables.command_of("demo", words) == wanted


def test_the_error_model_s_table_follows_from_the_others() -> None:
    *rows, last = tables.read(tables.HERE / "language_error_model.csv")
    made = predicted.rows()
    kept = [{name: row[name] for name in made[0]} for row in rows]
    assert kept == [{name: str(value) for name, value in row.items()} for row in made]
    assert float(last["predicted"]) == round(predicted.correlation(made), 3)


def test_names_in_a_sentence() -> None:
    assert page_told.listed(["a", "b", "c"]) == "a, b and c"
    assert page_told.listed(["a"]) == "a"
    assert page_told.listed([]) == "none"
    assert page_told.quoted(["exact, another seed", "x"]) == '"exact, another seed" and x'
