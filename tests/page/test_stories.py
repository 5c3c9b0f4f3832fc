"""What people do on the page, in a real browser."""

from __future__ import annotations

import http.server
import re
import threading
import time
from typing import Any

import pytest
from page_kit import TOKEN, Served, all_reduce, document

from asyncdist.inspect.job import Job
from asyncdist.store.request_store import StoreClient, WaitingClient

pytestmark = [pytest.mark.thorough, pytest.mark.slow("a browser")]


def hanging(size: int = 4) -> Job:
    """The last rank has not called what all others wait for."""
    last = size - 1
    waiting = [
        document(
            rank, size, [all_reduce(16, -9, ended=-1.0), all_reduce(17, -8, waiting_for=[last], site="train.py:42")]
        )
        for rank in range(last)
    ]
    return Job([*waiting, document(last, size, [all_reduce(16, -8.5, ended=-1.0)])])


def log_in(tab: Any, served: Served, heading: str = "Verdict") -> None:
    tab.goto(served.url)
    tab.get_by_label("Token").fill(TOKEN)
    tab.get_by_role("button", name="Log in").click()
    tab.get_by_role("heading", name=heading).wait_for()


def test_without_a_token_only_numbers_are_seen(tab: Any, served: Served) -> None:
    served.jobs.jobs["secret-name"] = hanging()
    tab.goto(served.url)
    tab.get_by_text("connections").wait_for()
    assert tab.get_by_role("form").or_(tab.locator("#login")).is_visible()
    assert not tab.locator("main").is_visible()
    assert "secret-name" not in tab.content()


def test_a_wrong_token_is_refused(tab: Any, served: Served) -> None:
    tab.goto(served.url)
    tab.get_by_label("Token").fill("a guess")
    tab.keyboard.press("Enter")
    tab.get_by_role("alert").get_by_text("not the store's token").wait_for()
    assert not tab.locator("main").is_visible()


def test_who_is_waited_for_is_seen_at_once(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    tab.locator("#verdict").get_by_text("Rank 3 has not called all_reduce #17").wait_for()
    rows = tab.locator("#ranks tbody tr")
    assert rows.count() == 4
    first = rows.nth(0).inner_text()
    assert re.search(r"0\s*waits\s*waits in all_reduce #17 of group default at train.py:42\s*\S+ s\s*3\s", first), first
    assert "0 for 3, 1 for 3, 2 for 3" in tab.locator("#matrix-text").inner_text()


def test_the_page_follows_the_job(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    tab.locator("#ranks tbody tr").nth(3).wait_for()
    gone = {"rank": 3, "state": "gone", "why": "its connection to the store has ended", "host": "h", "pid": 7}
    served.jobs.jobs["train"] = Job([*[served.jobs.jobs["train"].documents[rank] for rank in range(3)], gone])
    tab.locator("#ranks tbody tr").nth(3).get_by_text("gone", exact=True).wait_for()


def test_another_job_is_chosen_with_the_keyboard(tab: Any, served: Served) -> None:
    served.jobs.jobs |= {"first": hanging(2), "second": hanging(5)}
    log_in(tab, served)
    tab.locator("#ranks tbody tr").nth(1).wait_for()
    tab.get_by_label("Job", exact=True).focus()
    tab.keyboard.press("ArrowDown")
    tab.locator("#ranks tbody tr").nth(4).wait_for()
    assert tab.get_by_label("Job", exact=True).input_value() == "second"


def test_only_those_that_wait_are_shown(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    tab.locator("#ranks tbody tr").nth(3).wait_for()
    tab.get_by_label("only those that wait").check()
    tab.get_by_text("3 of 4 ranks").wait_for()


def test_the_stores_clients_are_seen_before_there_is_a_job(tab: Any, served: Served) -> None:
    served.jobs.clients = [
        StoreClient("train", "h pid 1", 0, "10.0.0.1:1", 1, False),
        StoreClient("train", "h pid 2", 1, "10.0.0.1:2", 1, False),
        StoreClient("", "h pid 3", None, "10.0.0.1:3", 0, True),
    ]
    served.jobs.waits = [
        WaitingClient("watch", ("a/",), 900.0, "train", "h pid 1", 0, "10.0.0.1:1"),
        WaitingClient("get", ("<b>ready",), 3.0, "train", "h pid 2", 1, "10.0.0.1:2"),
    ]
    log_in(tab, served, "Clients of the store")
    rows = tab.locator("#clients tbody tr")
    rows.nth(2).wait_for()
    assert re.search(r"h pid 3\s+10.0.0.1:3\s+lost", rows.nth(0).inner_text())
    assert re.search(r"train\s+1\s+h pid 2\s+10.0.0.1:2\s+<b>ready\s+3.0 s", rows.nth(1).inner_text())
    assert "a/" not in rows.nth(2).inner_text()


def test_hostile_names_are_text(tab: Any, served: Served) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    entry = all_reduce(1, -5, waiting_for=[1], site=hostile, error=hostile)
    entry |= {"operation": hostile, "group": hostile}
    served.jobs.jobs[hostile] = Job([document(0, 2, [entry], host=hostile), document(1, 2, [])])
    tab.on("dialog", lambda dialog: tab.problems.append("an alert"))
    log_in(tab, served)
    tab.locator("#ranks tbody tr").nth(1).wait_for()
    assert hostile in tab.locator("#ranks tbody tr").nth(0).inner_text()
    assert tab.locator("main script, main img").count() == 0


def test_a_thousand_ranks_are_quick(tab: Any, served: Served) -> None:
    served.jobs.jobs["large"] = hanging(1000)
    log_in(tab, served)
    began_s = time.monotonic()
    tab.locator("#ranks tbody tr").nth(999).wait_for()
    assert time.monotonic() - began_s < 3.0
    longest_ms = tab.evaluate(
        """async () => {
            let longest = 0, before = performance.now();
            const until = before + 2500;
            while (performance.now() < until) {
                await new Promise((go) => setTimeout(go, 0));
                longest = Math.max(longest, performance.now() - before);
                before = performance.now();
            }
            return longest;
        }"""
    )
    assert longest_ms < 1000  # on a busy machine; 100 ms on an idle one


def test_the_timeline_is_downloaded(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Timeline").click()
    assert download.value.suggested_filename == "job.pftrace"


def test_it_is_read_on_a_phone_in_the_dark(browser: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    with browser.new_context(viewport={"width": 360, "height": 740}, color_scheme="dark") as context:
        tab = context.new_page()
        log_in(tab, served)
        tab.locator("#ranks tbody tr").nth(3).wait_for()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(13, 17, 23)"


def test_logging_out_hides_names(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    tab.get_by_role("button", name="Log out").click()
    tab.get_by_label("Token").wait_for()
    assert not tab.locator("main").is_visible()


def test_another_port_of_the_host_gets_no_session(tab: Any, served: Served) -> None:
    """Its server may belong to somebody else. The session is there again after a look at it, and after a reload."""
    heard = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<script>document.title = JSON.stringify([document.cookie, sessionStorage])</script>")

    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        tab.goto(f"http://localhost:{other.server_port}/")
        assert tab.title() == '["",{}]'
        other.shutdown()
    assert heard
    assert not any({"Cookie", "Authorization"} & set(headers) for headers in heard)
    tab.problems.clear()
    tab.go_back()
    tab.locator("#ranks tbody tr").nth(3).wait_for()
    tab.reload()
    tab.locator("#ranks tbody tr").nth(3).wait_for()


def test_a_stream_that_breaks_is_followed_again(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    tab.locator("#ranks tbody tr").nth(3).wait_for()
    served.break_streams()
    served.jobs.jobs["train"] = hanging(5)
    tab.locator("#ranks tbody tr").nth(4).wait_for()
    tab.locator("#link").filter(has_text=re.compile("^$")).wait_for(state="attached")
    tab.problems.clear()


def test_nobody_asks_when_nobody_looks(tab: Any, served: Served) -> None:
    served.jobs.jobs["train"] = hanging()
    log_in(tab, served)
    tab.locator("#ranks tbody tr").nth(3).wait_for()
    tab.goto("about:blank")
    time.sleep(1.5)  # a look that was under way
    asked = served.jobs.asked
    time.sleep(1.5)
    assert served.jobs.asked == asked
