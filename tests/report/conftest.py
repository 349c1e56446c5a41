"""A browser for the pages of reports, one for the whole run; skips where none is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from report.browser import EXECUTABLE, Browser

from sagepatch.report.model import Report

Open = Callable[[Report], Browser]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if EXECUTABLE is None:
        pytest.skip("no Chromium here: apt-get install chromium")
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
