"""The HTML report in a real browser: fetches nothing, runs nothing foreign, fits, can be read and
reached by everyone.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from dataclasses import replace

import pytest
from report.conftest import Open
from report.report_rows import REPORT, ROW
from report.tables import report_of_plan, report_of_table, table

from sagepatch.calibration.table import Calibration
from sagepatch.patchers.site import Left

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


def test_a_long_name_of_a_fact_fits_too(opened: Open) -> None:
    report = report_of_table(table(1))
    page = opened(replace(report, machine={**report.machine, "package" * 20: "1.0"}))
    page.show(width=360)
    assert page.run("document.documentElement.scrollWidth") <= 360


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
