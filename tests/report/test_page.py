"""The HTML report in a real browser, opened from disk: what its scripts compute, keys, colours."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report.browser import EXECUTABLE, Browser
from report.tables import report_of_plan, report_of_table, table
from report_rows import REPORT, ROW

from sagepatch.calibration.cells import cells
from sagepatch.calibration.planning import costs, options
from sagepatch.calibration.table import Calibration
from sagepatch.patchers.site import Left
from sagepatch.plan import Plan
from sagepatch.report.facts import stops
from sagepatch.report.model import Report

pytestmark = pytest.mark.skipif(
    EXECUTABLE is None, reason="no Chromium here: apt-get install chromium"
)
Open = Callable[[Report], Browser]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Open:
    """Write a report as a page and open it."""

    def open_it(report: Report) -> Browser:
        report.to_html(tmp_path / "report.html")
        browser.show()
        browser.open(tmp_path / "report.html")
        return browser

    return open_it


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
    [(3, 28, True), (2, 28, False), (12, 50, True), (4, 4, True), (5, None, True), (6, 2, True)],
)
def test_the_page_solves_as_python_does(
    seed: int, steps: int | None, timed: bool, by_step: bool, opened: Open
) -> None:
    calibration = table(seed, steps=steps, timed=timed, layers=6, heads=3)
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


def _text(page: Browser, name: str) -> str:
    return str(page.run(f"document.getElementById({name!r}).textContent"))


def _value(page: Browser, name: str) -> str:
    return str(page.run(f"document.getElementById({name!r}).value"))


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
    seen = [float(_value(page, "threshold"))]
    for key, times in (("ArrowRight", 1), ("ArrowRight", 7), ("ArrowLeft", 12), ("Home", 1)):
        page.press(key, times)
        seen.append(float(_value(page, "threshold")))
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
    assert float(_value(page, "threshold")) == 1.01
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


EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"


def test_nothing_in_the_data_runs_or_is_fetched(opened: Open) -> None:
    calibration = table(1)
    first = replace(calibration.layers[0], site=EVIL)
    calibration = replace(calibration, layers=(first, *calibration.layers[1:]))
    evil = replace(ROW, name=EVIL, reason=EVIL, notes=(EVIL,), kind=EVIL)
    report = report_of_plan(calibration.plan(0.998))
    rows = (evil, *report.layers[1:])
    report = (
        replace(
            report, layers=rows, model=EVIL, left=(Left(EVIL, "self", EVIL),), machine={EVIL: EVIL}
        )
        .with_calibration(calibration)
        .with_plan(EVIL, calibration.plan(0.9999))
    )
    page = opened(report)
    assert page.run("window.evil") is None
    assert page.run("facts.layers[0].site") == EVIL
    assert EVIL in page.run("document.body.innerText")
    assert page.complaints() == []
    assert len(page.requests()) == 1
    # What a hole in the escaping would let in, the policy stops.
    page.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.evil = 3';"
        " document.body.append(s); document.body.insertAdjacentHTML('beforeend',"
        ' \'<img src="https://example.org/x.png" onerror="window.evil = 4">\'); })()'
    )
    for _ in range(200):
        if any("Content Security Policy" in text for text in page.complaints()):
            break
        time.sleep(0.02)
    else:
        pytest.fail("the policy stopped nothing")
    assert page.run("window.evil") is None


def test_the_policy_names_the_script_that_is_there() -> None:
    page = report_of_table(table(1)).to_html()
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", page)


def _renamed(calibration: Calibration, before: str) -> Calibration:
    layers = (replace(layer, site=before + layer.site) for layer in calibration.layers)
    return replace(calibration, layers=tuple(layers))


@pytest.mark.parametrize("before", ["", "model.diffusion_model_with_a_long_name.transformer_"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_its_window(width: int, before: str, opened: Open) -> None:
    page = opened(report_of_table(_renamed(table(3), before)).with_run_time(1.0))
    page.show(width=width)
    assert page.run("document.documentElement.scrollWidth") <= width
    # The names leave room for the cells.
    names, cell = page.run(
        "[$('heat').tBodies[0].rows[0].cells[0], document.querySelector('#heat [role=gridcell]')]"
        ".map((one) => one.getBoundingClientRect()).map((one) => [one.left, one.right])"
    )
    assert names[1] <= cell[0] + 1
    assert cell[1] <= width


def test_many_steps_are_colours(opened: Open) -> None:
    calibration = table(1)
    layer = calibration.layers[0]
    rows = [replace(layer.rows[n % 8], call=n + 1, step=n, steps=30) for n in range(30)]
    page = opened(report_of_table(replace(calibration, layers=(replace(layer, rows=tuple(rows)),))))
    heads = page.run("[...$('heat').tHead.rows[0].cells].map((cell) => cell.textContent)")
    assert heads[2:] == [f"step {n}" for n in range(1, 31)]
    widest = page.run(
        "Math.max(...[...document.querySelectorAll('#heat [role=gridcell]')]"
        ".map((cell) => cell.getBoundingClientRect().width))"
    )
    assert widest < 50
    said = page.run("$('heat').tBodies[0].rows[0].cells[2].textContent")
    name = page.run("facts.layers[0].runs[0].variant")
    assert float(said) == pytest.approx(1 - min(rows[0].errors[name].cosine), rel=0.5)


# The lowest contrast of any shown text with what is behind it (WCAG 2.2, relative luminance).
CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = (top, under) => {
    const a = top[3] ?? 1;
    return [0, 1, 2].map((i) => a * top[i] + (1 - a) * under[i]);
  };
  const light = (c) => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    if (!node) return parse(getComputedStyle(document.body).backgroundColor);
    const own = parse(getComputedStyle(node).backgroundColor);
    return own[3] === 0 ? behind(node.parentElement) : over(own, behind(node.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const node = walker.currentNode.parentElement;
    if (!text || !node.checkVisibility() || node.closest('script, .unseen, .skip')) continue;
    const paper = behind(node);
    const ink = over(parse(getComputedStyle(node).color), paper);
    const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), text.slice(0, 40), node.className]);
  }
  return found.sort((x, y) => x[0] - y[0]).slice(0, 3);
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_is_readable(dark: bool, opened: Open) -> None:
    worst = replace(ROW, cosine=0.99, rel_l1=0.2, norm_ratio=0.5, notes=("demoted: x",))
    report = report_of_table(table(3), 0.9)
    lost = replace(ROW, name="b", replaced_by="Other")
    report = replace(report, threshold=0.998, layers=(*report.layers, worst, lost))
    page = opened(report.with_run_time(1.0))
    page.show(dark=dark)
    assert page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(21, 25, 22)" if dark else "rgb(252, 253, 251)"
    )
    lowest = page.run(CONTRAST)
    assert lowest[0][0] >= 4.5, lowest


def test_the_keyboard_reaches_everything_in_order(opened: Open) -> None:
    page = opened(report_of_table(table(1)))
    seen: list[str] = []
    for _ in range(60):
        page.press("Tab")
        here = page.run(
            "(() => { const a = document.activeElement; return a === document.body ? '' :"
            " a.id || a.getAttribute('role') || a.tagName.toLowerCase(); })()"
        )
        if here == "":
            break
        # The parts of one control count once.
        if not seen or seen[-1] != here:
            seen.append(here)
    order = ["a", "heat-metric", "heat-kernel", "png", "gridcell", "stop", "threshold", "by-step"]
    order += ["plan-a", "plan-b", "open", "differing", "region"]
    assert seen[: len(order)] == order
    assert seen.count("summary") + seen.count("region") >= 2
    assert (
        page.run(
            'document.querySelectorAll(\'[tabindex]:not([tabindex="0"], [tabindex="-1"])\').length'
        )
        == 0
    )


def test_everything_has_a_name_and_tables_have_headers(opened: Open) -> None:
    page = opened(report_of_table(table(1)))
    page.send("Accessibility.enable")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "slider",
        "textbox",
        "combobox",
        "button",
        "checkbox",
        "grid",
        "region",
        "link",
        "table",
    }
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored") and node.get("role", {}).get("value") in roles
    ]
    assert {role for role, _ in named} >= {"slider", "textbox", "combobox", "checkbox", "grid"}
    assert [role for role, name in named if not name.strip()] == []
    loose = page.run(
        "[...document.querySelectorAll('table')].filter((t) => [...t.querySelectorAll('th')]"
        ".some((h) => !h.scope) || (t.rows.length && !t.querySelector('th[scope=col]'))).length"
    )
    assert loose == 0
    assert page.run("document.documentElement.lang") == "en"
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert set(levels[1:]) == {2}


def test_a_report_without_a_table_has_no_script(opened: Open) -> None:
    page = opened(REPORT)
    assert page.run("document.scripts.length") == 0
    assert page.complaints() == []
