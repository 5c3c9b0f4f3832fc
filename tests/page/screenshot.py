"""Draw docs/images/page.png: the page with a job whose rank 2 sleeps."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from page_kit import TOKEN, Served, all_reduce, document
from playwright.sync_api import sync_playwright

from asyncdist.inspect.job import Job


def sleeping() -> Job:
    """Four ranks, of which one does not call what the others wait for."""
    site = "train.py:42"
    ended = [all_reduce(number, -11 + number / 8, ended=-10.9 + number / 8) for number in range(17)]
    waiting = [document(rank, 4, [*ended, all_reduce(17, -8, waiting_for=[2], site=site)]) for rank in (0, 1, 3)]
    place = {"MainThread (1)": {"site": "data.py:17", "function": "load", "call": "time.sleep"}}
    return Job([*waiting, document(2, 4, ended, places=place, loop_late=8.1)])


def main() -> None:
    with Served() as served, sync_playwright() as driver:
        served.jobs.jobs["train, default"] = sleeping()
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1000, "height": 760})
        tab.goto(served.url)
        tab.get_by_label("Token").fill(TOKEN)
        tab.keyboard.press("Enter")
        tab.locator("#ranks tbody tr").nth(3).wait_for()
        time.sleep(3.5)
        tab.screenshot(path=str(Path(__file__).parents[2] / "docs" / "images" / "page.png"))
        browser.close()


if __name__ == "__main__":
    main()
