"""A page served from recorded jobs, and a browser that looks at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from page_kit import Served

EXPECTED = ("Failed to load resource: the server responded with a status of 403",)
"""What the browser says of a wrong token."""


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser, whose driver runs an event loop in this thread: it ends with the module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: make page")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Any]:
    """A tab for `served` that fails the test for any error of a script, and for any request to another host."""
    context = browser.new_context()
    tab = context.new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("request", lambda request: problems.append(request.url) if not _is_ours(request.url, served) else None)
    tab.problems = problems
    yield tab
    context.close()
    assert not [one for one in problems if not one.startswith(EXPECTED)]


def _is_ours(url: str, served: Served) -> bool:
    return url.startswith((served.url, "data:", "about:"))
