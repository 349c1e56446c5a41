"""The HTML report in a real browser, opened from disk: what its scripts compute, what keys move."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report.browser import Browser
from report.conftest import Open
from report.tables import report_of_table, shortened, table

from sagepatch.calibration.cells import cells
from sagepatch.calibration.planning import costs, options
from sagepatch.calibration.table import Calibration
from sagepatch.plan import Plan
from sagepatch.report.facts import stops


def _parts(plan: Plan) -> dict[str, list[list[Any]]]:
    """What each layer runs from where to where, as the page's solver tells it."""
    return {
        entry.site: [[part.start, part.end, part.variant] for part in entry.ranges]
        or [[0, 1, entry.variant]]
        for entry in plan.entries
    }


def _telling(calibration: Calibration) -> list[float]:
    """Thresholds at which something may change, and their neighbours: each error of each kernel."""
    found = {0.0, -1.0, 1.0}
    for layer in calibration.layers:
        for errors in (one for row in layer.rows for one in row.errors.values()):
            far = [*errors.rel_l1, *(abs(ratio - 1) for ratio in errors.norm_ratio)]
            # sqrt(2 (1 - threshold)) is what these may be.
            found |= {1 - error * error / 2 for error in far if math.isfinite(error)}
            found.add(min(errors.cosine))
    exact = random.Random(0).sample(sorted(found), min(100, len(found)))
    return [*exact, *(math.nextafter(one, away) for one in exact for away in (-9, 9))]


@pytest.mark.parametrize("by_step", [True, False], ids=["by-step", "throughout"])
@pytest.mark.parametrize(
    ("seed", "steps", "timed"),
    # Below 0: where some samples had no time for some kernels.
    [
        *[(3, 28, True), (2, 28, False), (12, 50, True), (4, 4, True), (5, None, True)],
        *[(6, 2, True), (-3, 28, True), (-2, 28, False)],
    ],
)
def test_the_page_solves_as_python_does(
    seed: int, steps: int | None, timed: bool, by_step: bool, opened: Open
) -> None:
    calibration = table(abs(seed), steps=steps, timed=timed, layers=6, heads=3)
    if seed < 0:
        calibration = shortened(calibration, seed)
    page = opened(report_of_table(calibration))
    thresholds = [*_telling(calibration), *stops(0.998)]
    solved = page.run(
        f"{json.dumps(thresholds)}.map((t) => Object.fromEntries(facts.layers.map((layer) => "
        f"[layer.site, solve(layer, t, {json.dumps(by_step)}, facts).parts"
        ".map((part) => [part.start, part.end, part.variant])])))"
    )
    plans = [_parts(calibration.plan(one, by_step=by_step)) for one in thresholds]
    assert len({json.dumps(plan) for plan in plans}) > 3
    for threshold, here, there in zip(thresholds, solved, plans, strict=True):
        assert here == there, threshold


def test_too_few_samples_have_one_reason(opened: Open) -> None:
    given = table(2, layers=3)
    whole = given.layers[2]
    calibration = replace(
        given,
        layers=(
            *(replace(whole, site=f"one {n}", rows=whole.rows[:1], spoilt=n) for n in (0, 3)),
            replace(whole, site="none", rows=(), spoilt=2),
        ),
    )
    plan = calibration.plan(0.9, by_step=False)
    page = opened(report_of_table(calibration))
    for entry, here in zip(
        plan.entries,
        page.run("facts.layers.map((layer) => solve(layer, 0.9, false, facts).why)"),
        strict=True,
    ):
        assert here == entry.reason
        assert "stays exact" in here
    assert len({entry.reason for entry in plan.entries}) == 3


def _text(page: Browser, name: str) -> str:
    return str(page.run(f"document.getElementById({name!r}).textContent"))


def _threshold(page: Browser) -> float:
    """The threshold that the page shows."""
    return float(page.run("document.getElementById('threshold').value"))


def _focus(page: Browser, name: str) -> None:
    page.run(f"document.getElementById({name!r}).focus()")


def _plan_b(page: Browser) -> dict[str, str]:
    """The layers and kernels in the table of two plans, column B."""
    page.run("(() => { const d = $('differing'); if (d.checked) d.click(); })()")
    cells = page.run(
        "[...$('two').tBodies[0].rows].map((r) => [...r.cells].map((c) => c.innerText))"
    )
    shared = page.run("SHARED")
    return {shared + row[0]: row[2] for row in cells}


def test_arrow_keys_move_the_threshold_and_the_plan(opened: Open) -> None:
    calibration = table(1)
    page = opened(report_of_table(calibration))
    told = _text(page, "outcome")
    _focus(page, "stop")
    seen = [_threshold(page)]
    for key, times in (("ArrowRight", 1), ("ArrowRight", 7), ("ArrowLeft", 12), ("Home", 1)):
        page.press(key, times)
        seen.append(_threshold(page))
        said = page.run("$('stop').getAttribute('aria-valuetext')")
        assert float(said) == seen[-1]
        plan = calibration.plan(seen[-1])
        assert {
            entry.site: ", ".join(f"{p.variant} to {100 * p.end:g} %" for p in entry.ranges)
            or entry.variant
            for entry in plan.entries
        } == _plan_b(page)
    where = stops(0.998)
    start = where.index(0.998)
    assert seen == [where[i] for i in (start, start + 1, start + 8, start - 4, 0)]
    assert _text(page, "outcome") != told
    page.press("End")
    assert _threshold(page) == 1.01
    assert set(_plan_b(page).values()) == {"sdpa.exact"}
    assert page.complaints() == []


def test_a_threshold_can_be_typed(opened: Open) -> None:
    calibration = table(3)
    page = opened(report_of_table(calibration))
    page.run("$('threshold').value = '0.99731'; $('threshold').dispatchEvent(new Event('change'))")
    assert "At 0.99731:" in _text(page, "outcome")
    shown = {entry.site: len(entry.ranges) for entry in calibration.plan(0.99731).entries}
    assert {site: text.count(" to ") for site, text in _plan_b(page).items()} == shown
    page.run(
        "$('threshold').value = '0,9 or so'; $('threshold').dispatchEvent(new Event('change'))"
    )
    assert page.run("$('threshold').getAttribute('aria-invalid')") == "true"
    assert "A threshold is a number" in _text(page, "outcome")


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_predictions_are_those_of_the_report(seed: int, opened: Open) -> None:
    report = report_of_table(table(seed)).with_run_time(0.9, 1.2)
    counts = report.counts
    attention = report.attention()
    assert attention is not None
    assert attention.run_gain is not None
    page = opened(report)
    tiers = f"{counts.fast} fast, {counts.safe} safe, {counts.exact} exact"
    assert f"At 0.998: {tiers};" in _text(page, "outcome")
    assert f"attention {attention.gain:.2f}x" in _text(page, "outcome")
    assert f"whole run {attention.run_gain:.2f}x (predicted)" in _text(page, "outcome")
    page.run("$('plan-b').value = 'exact'; $('plan-b').dispatchEvent(new Event('change'))")
    assert "B: 0 fast, 0 safe, 7 exact; predicted error of the output 0.0 %; attention 1.00x" in (
        _text(page, "verdict")
    )


@pytest.mark.parametrize("threshold", [0.9, 0.9985, 0.9997])
def test_another_plan_is_predicted_by_its_own_times_and_errors(
    threshold: float, opened: Open
) -> None:
    calibration = table(3)
    page = opened(report_of_table(calibration).with_run_time(0.1))
    page.run(f"moveTo({threshold})")
    entries = calibration.plan(threshold).entries
    now = calibration.plan(0.998).entries
    exact, chosen, before = (
        28 * sum(one or 0.0 for one in times)
        for times in (
            [entry.us_exact for entry in entries],
            [entry.us_chosen for entry in entries],
            [entry.us_chosen for entry in now],
        )
    )
    squares = 0.0
    for layer, entry in zip(calibration.layers, entries, strict=True):
        cost = costs(layer, layer.candidates)
        for cell in cells(layer.rows, layer.samples > 1):
            part = entry.range_at(cell.start)
            name = entry.variant if part is None else part.variant
            found = [one.error for one in options(layer, cell, cost) if one.variant == name]
            squares += found[0] ** 2 if cell.own and found else 0.0
    assert exact != chosen
    assert chosen != before
    said = _text(page, "outcome")
    assert f"predicted error of the output {100 * math.sqrt(squares):.1f} %" in said
    assert f"attention {exact / chosen:.2f}x" in said
    rest = 0.1e6 - before
    assert f"whole run {(rest + exact) / (rest + chosen):.2f}x (predicted)" in said


def test_two_plans_of_the_table(opened: Open) -> None:
    calibration = table(1)
    strict = calibration.plan(0.9999)
    report = report_of_table(calibration).with_plan("strict.json", strict)
    page = opened(report)
    assert _text(page, "verdict") == "The two plans are the same in all 7 layers."
    page.run(
        "$('plan-b').value = 'plan:strict.json'; $('plan-b').dispatchEvent(new Event('change'))"
    )
    differing = [
        a.site
        for a, b in zip(calibration.plan(0.998).entries, strict.entries, strict=True)
        if (a.variant, _parts_of(a)) != (b.variant, _parts_of(b))
    ]
    assert differing
    assert _text(page, "verdict").startswith(f"{len(differing)} layers of 7 differ.")
    names = page.run("[...$('two').tBodies[0].rows].map((row) => SHARED + row.cells[0].innerText)")
    assert names == differing
    assert page.run("$('two').tHead.rows[0].cells[0].innerText") == "layer of blocks"


def _parts_of(entry: Any) -> list[tuple[float, str]]:
    return [(part.end, part.variant) for part in entry.ranges]


def _choose_file(page: Browser, path: Path) -> None:
    node = page.send("Runtime.evaluate", expression="$('open')")["result"]["objectId"]
    page.send("DOM.setFileInputFiles", files=[str(path)], objectId=node)


def _until(page: Browser, expression: str) -> None:
    for _ in range(200):
        if page.run(expression):
            return
        time.sleep(0.02)
    pytest.fail(f"never true: {expression}")


def test_a_plan_file_is_opened_from_disk(opened: Open, tmp_path: Path) -> None:
    calibration = table(1)
    calibration.plan(1.01).save(tmp_path / "none <b>.json")
    page = opened(report_of_table(calibration))
    _choose_file(page, tmp_path / "none <b>.json")
    _until(page, "$('plan-b').value.startsWith('plan:')")
    assert set(_plan_b(page).values()) == {"sdpa.exact"}
    for text, said in (
        ("[", "is no plan for this model"),
        (
            '{"entries": [{"site": "x", "variant": "sdpa.exact"}]}',
            "1 layer that this model has not",
        ),
    ):
        path = tmp_path / f"{len(text)}.json"
        path.write_text(text)
        _choose_file(page, path)
        _until(page, f"$('verdict').textContent.includes({said!r})")
    assert page.complaints() == []


def test_the_heat_map_by_keys(opened: Open) -> None:
    calibration = table(1)
    report = report_of_table(calibration)
    page = opened(report)
    layer = calibration.layers[0]
    name = report.layers[0].variant
    errors = [row.errors[name] for row in layer.rows]
    shown = page.run("[...$('heat').tBodies[0].rows[0].cells].map((cell) => cell.innerText)")
    assert shown[:2] == ["0.attn", name]
    assert [cell.removesuffix(" !") for cell in shown[2:]] == [
        f"{1 - min(one.cosine):.0e}".replace("e-0", "e-") for one in errors
    ]
    steps = page.run("[...$('heat').tHead.rows[0].cells].map((cell) => cell.innerText)")
    assert steps[2:] == [f"step {row.step + 1}" for row in layer.rows if row.step is not None]
    stop = page.run("document.querySelectorAll('#heat [tabindex=\"0\"]').length")
    assert stop == 1
    page.run("document.querySelector('#heat [tabindex=\"0\"]').focus()")
    page.press("ArrowRight", 2)
    detail = _text(page, "heat-detail")
    worst = errors[2]
    assert detail.startswith(f"{layer.site}, step 6, {name}: cosine {min(worst.cosine):.5f}")
    assert f"in head {worst.worst_head}" in detail
    assert detail.endswith("; measured on 1 of 1 prompt.")
    heads = page.run("[...$('heads').children].map((one) => one.textContent)")
    assert [text.split(":")[0] for text in heads] == [str(head) for head in range(6)]
    assert float(heads[worst.worst_head].split(":")[1]) == pytest.approx(
        1 - min(worst.cosine), rel=0.5
    )
    page.press("ArrowDown")
    assert _text(page, "heat-detail").startswith("blocks.1.attn, step 6: runs exact attention")
    page.press("End")
    page.press("ArrowRight")
    assert "step 28" in _text(page, "heat-detail")
    page.run(
        "$('heat-metric').value = 'rel_l1'; $('heat-metric').dispatchEvent(new Event('change'))"
    )
    again = page.run("$('heat').tBodies[0].rows[0].cells[2].innerText").removesuffix(" !")
    assert float(again) == pytest.approx(max(errors[0].rel_l1), rel=0.2)


def test_the_heat_map_is_saved_as_a_picture(opened: Open, tmp_path: Path) -> None:
    page = opened(report_of_table(table(1)))
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("$('png').click()")
    target = tmp_path / "sagepatch-heat-map.png"
    for _ in range(200):
        if target.exists():
            break
        time.sleep(0.02)
    time.sleep(0.1)
    picture = np.asarray(Image.open(target).convert("RGB"))
    assert picture.shape[0] > 7 * 30
    assert picture.shape[1] > 600
    # Paper, ink and shades: no blank sheet.
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20
