"""The page's part of the daemon's HTTP port: who may see names, and a look at a job each second while somebody does.

Numbers of the store are for everybody who reaches the port, as `/healthz` has them. Names need the store's token. A
form takes it, over loopback only, as the port has no TLS. A session is a secret that the page keeps for its own origin
and sends in a header: a cookie would be sent to all ports of a host. A store without a token shows all to its own
host, whose processes can read it anyway.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from aiohttp import web

from asyncdist.errors import DistError
from asyncdist.inspect.job import Job
from asyncdist.page.look import look_back, look_now
from asyncdist_server.serving.sockets import is_loopback

STATIC: Final = Path(__file__).with_name("static").resolve()
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
SEES_NAMES: Final = ("open", "logged in")
SESSION_S: Final = 8 * 3600.0
SESSIONS: Final = 64
"""The oldest makes room."""
REFUSED_S: Final = 1.0
"""How long a wrong token waits for its answer."""
LOOK_EVERY_S: Final = 1.0
LOOK_BACK_EVERY: Final = 10
"""Looks. All that a rank remembers is a MB, and while its JSON is read the daemon's clients wait for milliseconds."""
VIEWERS: Final = 32
READ_S: Final = 10.0
"""A browser that reads nothing for so long makes room for others."""


Known: TypeAlias = tuple[Sequence[str], Sequence[Mapping[str, Any]]]
"""The names of the jobs, and what is known of each client of the store."""


class Jobs(Protocol):
    """Where jobs are found, and asked."""

    async def store(self) -> Known:
        """What the store knows now. Raises DistError."""

    async def ask(self, name: str, *, all_remembered: bool) -> Job | None:
        """What its ranks say now, of what is under way or of all that they remember, unless these are too many.

        None if it is not there any more. Raises DistError.
        """

    async def timeline(self, name: str) -> bytes | None:
        """Its timeline, as Perfetto opens it; None if it is not there any more. Raises DistError."""


class Page:
    """The handlers, and what they share."""

    def __init__(
        self, jobs: Jobs, tokens: Callable[[], Sequence[str]], numbers: Callable[[], Mapping[str, float]]
    ) -> None:
        """`tokens` are those that count now; none if the store asks for none. `numbers` are those of the store."""
        self._jobs = jobs
        self._tokens = tokens
        self._numbers = numbers
        self._sessions: dict[str, tuple[str, float]] = {}
        """The token that each was begun with, and when it ends."""
        self._looks: dict[str, _Looks] = {}
        self._store: asyncio.Task[Known] | None = None
        self._asked_s = 0.0

    def add_to(self, application: web.Application) -> None:
        """Serve all paths of the page."""
        application.add_routes(
            [
                web.get("/", self._index),
                web.get("/page/state", self._state),
                web.post("/page/login", self._login),
                web.post("/page/logout", self._logout),
                web.get("/page/events", self._events),
                web.get("/page/timeline", self._timeline),
                web.static("/page", STATIC),
            ]
        )
        application.on_response_prepare.append(_add_headers)
        application.on_shutdown.append(self.close)

    async def close(self, _application: web.Application) -> None:
        """End all streams of looks."""
        for looks in self._looks.values():
            looks.close()
        if self._store is not None:
            self._store.cancel()

    async def _index(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _state(self, request: web.Request) -> web.Response:
        access = self._access(request)
        try:
            jobs, clients = await self._known() if access in SEES_NAMES else ([], [])
        except DistError as error:
            raise _unknown(error) from error
        return web.json_response({"access": access, "numbers": self._numbers(), "jobs": jobs, "clients": clients})

    async def _known(self) -> Known:
        """What the store says: it is asked once a second at most, for all who look."""
        now_s = time.monotonic()
        if self._store is None or (self._store.done() and now_s - self._asked_s >= LOOK_EVERY_S):
            self._store, self._asked_s = asyncio.create_task(self._jobs.store()), now_s
        return await asyncio.shield(self._store)

    def _access(self, request: web.Request) -> str:
        local = _over_loopback(request)
        if not self._tokens():
            return "open" if local else "elsewhere"
        token, ends_s = self._sessions.get(_session(request), ("", 0.0))
        if ends_s > time.monotonic() and token in self._tokens():
            return "logged in"
        return "log in" if local else "elsewhere"

    def _check(self, request: web.Request) -> str:
        """Which job is meant, for somebody who may see it; a page of another site is not to keep ranks busy."""
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise web.HTTPForbidden(text="sent by another page")
        if self._access(request) not in SEES_NAMES:
            raise web.HTTPUnauthorized(text="log in first")
        return request.query.get("job", "")

    async def _login(self, request: web.Request) -> web.Response:
        if not _over_loopback(request):
            raise web.HTTPForbidden(text="A token is taken over loopback only: it must not travel unencrypted.")
        given = await request.read()
        known = [token for token in self._tokens() if hmac.compare_digest(given, token.encode())]
        if not known:
            await asyncio.sleep(REFUSED_S)  # others do not wait: whoever guesses is not to keep them out
            raise web.HTTPForbidden(text="That is not the store's token.")
        session = secrets.token_urlsafe(32)
        self._sessions[session] = known[0], time.monotonic() + SESSION_S
        while len(self._sessions) > SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return web.Response(text=session)

    async def _logout(self, request: web.Request) -> web.Response:
        self._sessions.pop(_session(request), None)
        return web.Response(status=204)

    async def _timeline(self, request: web.Request) -> web.Response:
        try:
            trace = await self._jobs.timeline(self._check(request))
        except DistError as error:
            raise _unknown(error) from error
        if trace is None:
            raise web.HTTPNotFound(text="that job is not there any more")
        return web.Response(body=trace, headers=HEADERS, content_type="application/octet-stream")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send looks until the browser goes away: all who look at one job see the same ones."""
        name = self._check(request)
        if sum(looks.viewers for looks in self._looks.values()) >= VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{VIEWERS} others look already")
        looks = self._looks.get(name)
        if looks is None:
            looks = self._looks[name] = _Looks(self._jobs, name)
        looks.viewers += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while self._access(request) in SEES_NAMES:
                text = await looks.next()
                if text is None:
                    break
                async with asyncio.timeout(READ_S):
                    await response.write(b"data: " + text + b"\n\n")
        except (ConnectionError, DistError, TimeoutError):  # the browser has gone, or tries again
            pass
        finally:
            looks.viewers -= 1
            if not looks.viewers:
                looks.close()
                self._looks.pop(name, None)
        return response


class _Looks:
    """Looks at one job, one a second for all who look at it."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self.viewers = 0
        self._jobs = jobs
        self._name = name
        self._next: asyncio.Task[bytes | None] | None = None
        self._number = 0
        self._back: dict[str, Any] = {}

    async def next(self) -> bytes | None:
        """The next look, as JSON; None once the job is not there any more."""
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._look(LOOK_EVERY_S if self._next is not None else 0))
        return await asyncio.shield(self._next)

    async def _look(self, delay_s: float) -> bytes | None:
        await asyncio.sleep(delay_s)
        back = self._number % LOOK_BACK_EVERY == 0
        job = await self._jobs.ask(self._name, all_remembered=back)
        if job is None:
            return None
        self._number += 1
        if back:
            self._back = await asyncio.to_thread(look_back, job, time.time())
        return await asyncio.to_thread(lambda: json.dumps(look_now(job) | self._back).encode())

    def close(self) -> None:
        """Nobody looks any more: who waits for a look is cancelled."""
        if self._next is not None:
            self._next.cancel()


def _session(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _unknown(error: DistError) -> web.HTTPException:
    return web.HTTPServiceUnavailable(text=f"the store does not answer: {error}")


def _over_loopback(request: web.Request) -> bool:
    return bool(request.remote) and is_loopback(str(request.remote))


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
