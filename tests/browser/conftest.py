"""The page in a real browser: `make test-browser`, which installs Debian's chromium and playwright where missing.

Collected only when asked for by path (`pytest tests/browser`), so that the suite needs neither. Every page is watched:
a request for anything but the file itself, a message on the console or an uncaught error fails the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmlab.report.page import render
from tests.report.made_long import two_arms
from tests.report.synthetic import five_axes, report

CHROMIUM = "/usr/bin/chromium"
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = any("browser" in Path(str(word).partition("::")[0]).parts for word in config.args)
    return None if asked else True


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield started
        started.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int | str, Path]:
    """The report's file by its number of arms, or by its name."""
    folder = tmp_path_factory.mktemp("pages")
    reports = {4: report(4), 200: report(200, n_points=200), "five axes": five_axes()}
    reports["long contexts"] = two_arms(folder / "runs")
    made: dict[int | str, Path] = {}
    for name, content in reports.items():
        made[name] = folder / f"report-{name}.html"
        made[name].write_text(render(content), encoding="utf-8")
    return made


@pytest.fixture
def open_page(browser: Any, files: dict[int | str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens the report of 4 or 200 arms, of "five axes" or "long contexts"; keywords are a playwright context's."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def opened(which: int | str = 4, **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-GB", **settings})
        contexts.append(context)
        page, address = context.new_page(), files[which].as_uri()
        page.set_default_timeout(5000)
        page.on("request", lambda request: request.url == address or complaints.append(f"request: {request.url}"))
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
