"""Who may see names on the page, without a browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from page_kit import TOKEN, RecordedJobs, all_reduce, document
from waiting import eventually

from asyncdist.errors import DistStoreError
from asyncdist.inspect.job import Job
from asyncdist.page import routes


class Browser:
    """A client of the page, and what the page is made of."""

    def __init__(self) -> None:
        self.jobs = RecordedJobs()
        self.jobs.jobs["train"] = Job([document(0, 2, [all_reduce(0, -3, waiting_for=[1])]), document(1, 2, [])])
        self.tokens = [TOKEN]
        self.page = routes.Page(self.jobs, lambda: self.tokens, lambda: {"keys": 1})
        application = web.Application(client_max_size=1024)
        self.page.add_to(application)
        self.client = TestClient(TestServer(application, host="127.0.0.1"))
        self.session: dict[str, str] = {}

    async def log_in(self, token: str = TOKEN, **headers: str) -> int:
        async with self.client.post("/page/login", data=token, headers=headers) as answer:
            if answer.status == 200:
                self.session = {"Authorization": f"Bearer {await answer.text()}"}
            return answer.status

    async def access(self) -> str:
        async with self.client.get("/page/state", headers=self.session) as answer:
            return str((await answer.json())["access"])

    async def first_look(self) -> tuple[int, bytes]:
        async with self.client.get("/page/events", params={"job": "train"}, headers=self.session) as answer:
            return answer.status, await answer.content.readline()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    browser = Browser()
    async with browser.client:
        yield browser


async def test_names_need_the_token(browser: Browser) -> None:
    assert await browser.access() == "log in"
    async with browser.client.get("/page/state") as answer:
        assert (await answer.json())["jobs"] == []
    for path in ("/page/events?job=train", "/page/timeline?job=train"):
        async with browser.client.get(path) as answer:
            assert answer.status == 401
    assert await browser.log_in() == 200
    status, look = await browser.first_look()
    assert status == 200
    assert json.loads(look.removeprefix(b"data: "))["ranks"][0]["waits_for"] == [1]
    async with browser.client.post("/page/logout", headers=browser.session) as answer:
        assert answer.status == 204
    assert await browser.access() == "log in"


async def test_a_former_token_counts_until_it_does_not(browser: Browser) -> None:
    browser.tokens = ["the new token of 32 characters...", TOKEN]
    assert await browser.log_in() == 200


@pytest.mark.parametrize("token", ["", "guess", TOKEN[:-1], "\N{SNOWMAN}" * 40])
async def test_guesses_are_refused_and_keep_nobody_out(
    browser: Browser, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "REFUSED_S", 60.0)
    guesses = [asyncio.create_task(browser.log_in(token)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert await browser.access() == "log in"
    async with asyncio.timeout(5):
        assert await browser.log_in() == 200
    for guess in guesses:
        guess.cancel()
    monkeypatch.setattr(routes, "REFUSED_S", 0.0)
    assert await browser.log_in(token) == 403


@pytest.mark.parametrize("charset", ["utf-7", "unicode_escape", "none-such", "zlib"])
async def test_a_strange_log_in_is_a_wrong_one(browser: Browser, charset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REFUSED_S", 0.0)
    strange = {"Content-Type": f"text/plain; charset={charset}"}
    assert await browser.log_in("\\ud800+2AA-", **strange) == 403


@pytest.mark.parametrize("sent", ["", "Bearer ", "Bearer guess", "Basic Og==", "\N{SNOWMAN}"])
async def test_a_session_is_not_guessed(browser: Browser, sent: str) -> None:
    assert await browser.log_in() == 200
    browser.session = {"Authorization": sent}
    assert await browser.access() == "log in"
    async with browser.client.post("/page/logout", headers=browser.session) as answer:
        assert answer.status == 204


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_other_sites_cannot_keep_ranks_busy(browser: Browser, site: str) -> None:
    browser.tokens = []
    for path in ("/page/events", "/page/timeline"):
        async with browser.client.get(f"{path}?job=train", headers={"Sec-Fetch-Site": site}) as answer:
            assert answer.status == 403


async def test_viewers_that_read_nothing_make_room(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "READ_S", 0.2)
    monkeypatch.setattr(routes, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(routes, "look_now", lambda job: {"sentence": "x" * 2_000_000})
    browser.tokens = []
    reader, writer = await asyncio.open_connection("127.0.0.1", browser.client.port, limit=1024)
    writer.write(b"GET /page/events?job=train HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readline()
    await asyncio.sleep(0.1)
    assert browser.page._looks
    await eventually(lambda: not browser.page._looks)
    writer.close()


async def test_a_browser_sends_a_session_for_nobody_else(browser: Browser) -> None:
    """Neither of itself to other ports of the host, nor for pages of other origins, which may not set this header."""
    assert await browser.log_in() == 200
    assert not list(browser.client.session.cookie_jar)
    async with browser.client.get("/page/state") as answer:
        assert (await answer.json())["access"] == "log in"
    asked = {"Origin": "http://localhost:1", "Access-Control-Request-Headers": "authorization"}
    async with browser.client.options(
        "/page/state", headers=asked | {"Access-Control-Request-Method": "GET"}
    ) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_a_token_is_not_taken_from_other_hosts(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "is_loopback", lambda host: False)
    assert await browser.access() == "elsewhere"
    assert await browser.log_in() == 403
    browser.tokens = []
    assert await browser.access() == "elsewhere"


async def test_a_store_without_a_token_is_open_to_its_host(browser: Browser) -> None:
    browser.tokens = []
    assert await browser.access() == "open"
    assert (await browser.first_look())[0] == 200


async def test_a_session_ends(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SESSION_S", 0.0)
    assert await browser.log_in() == 200
    assert await browser.access() == "log in"


async def test_a_session_ends_with_its_token(browser: Browser) -> None:
    assert await browser.log_in() == 200
    browser.tokens = ["the new token of 32 characters...", TOKEN]
    assert await browser.access() == "logged in"
    browser.tokens = ["the new token of 32 characters..."]
    assert await browser.access() == "log in"


@pytest.mark.parametrize("path", ["../routes.py", "..%2froutes.py", "%2e%2e/look.py", "vendor/", "none.js"])
async def test_only_the_pages_own_files_are_there(browser: Browser, path: str) -> None:
    async with browser.client.get(f"/page/{path}") as answer:
        assert answer.status in (403, 404)


async def test_every_answer_has_a_policy(browser: Browser) -> None:
    for path in ("/", "/page/page.js", "/page/state"):
        async with browser.client.get(path) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_viewers_are_bounded_and_share_looks(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "VIEWERS", 3)
    monkeypatch.setattr(routes, "LOOK_EVERY_S", 0.05)
    browser.tokens = []
    several = [await browser.client.get("/page/events", params={"job": "train"}) for _ in range(3)]
    for one in several:
        await one.content.readline()
    assert (await browser.first_look())[0] == 503
    assert browser.jobs.asked <= 3
    for one in several:
        one.close()
    await asyncio.sleep(0.3)
    assert (await browser.first_look())[0] == 200


async def test_the_store_is_asked_once_for_all_who_look(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], browser.jobs.store

    async def store() -> routes.Known:
        asked.append(0)
        await asyncio.sleep(0.05)
        return await real()

    monkeypatch.setattr(browser.jobs, "store", store)
    monkeypatch.setattr(routes, "LOOK_EVERY_S", 1000.0)
    browser.tokens = []
    assert await asyncio.gather(*(browser.access() for _ in range(8))) == ["open"] * 8
    assert await browser.access() == "open"
    assert len(asked) == 1
    monkeypatch.setattr(routes, "LOOK_EVERY_S", 0.0)
    assert await browser.access() == "open"
    assert len(asked) == 2


async def test_a_job_that_ends_and_a_store_that_fails_end_the_stream(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "LOOK_EVERY_S", 0.0)
    browser.tokens = []
    async with browser.client.get("/page/events", params={"job": "train"}) as stream:
        await stream.content.readline()
        browser.jobs.jobs.clear()
        await stream.read()

    async def fail(name: str, *, all_remembered: bool = False) -> Job | None:
        raise DistStoreError("the store is away")

    browser.jobs.ask = fail  # type: ignore[method-assign]
    async with browser.client.get("/page/events", params={"job": "train"}) as stream:
        assert await stream.read() == b""
    monkeypatch.setattr(browser.jobs, "store", lambda: fail(""))
    monkeypatch.setattr(browser.jobs, "timeline", fail)
    for path in ("/page/state", "/page/timeline?job=train"):
        async with browser.client.get(path) as answer:
            assert answer.status == 503


async def test_what_ranks_remember_is_asked_for_less_often(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(routes, "LOOK_BACK_EVERY", 3)
    browser.tokens, asked, real = [], [], browser.jobs.ask

    async def ask(name: str, *, all_remembered: bool) -> Job | None:
        asked.append(all_remembered)
        return await real(name, all_remembered=all_remembered)

    browser.jobs.ask = ask  # type: ignore[method-assign]
    async with browser.client.get("/page/events", params={"job": "train"}) as stream:
        looks = [
            json.loads((await stream.content.readline()).removeprefix(b"data: ").strip() or "0") for _ in range(9)
        ][::2]
    assert asked[:5] == [True, False, False, True, False]
    assert looks[0]["back_to"] == looks[1]["back_to"] == looks[2]["back_to"] < looks[3]["back_to"]
