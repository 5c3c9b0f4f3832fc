"""A page that shows what running jobs do, served by the daemon's HTTP port (extra `server`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiohttp import web

    from asyncdist_server.serving.daemon import StoreServer


SWITCH_S: Final = 1e-4
"""After so long the threads that read what ranks say let the daemon's loop go on: of Python's 5 ms each, clients of the
store notice several."""


def add_page(server: StoreServer, application: web.Application) -> None:
    """Have a daemon's HTTP port show the jobs that meet through it."""
    from asyncdist.page.routes import Page
    from asyncdist.page.store_jobs import StoreJobs

    def tokens() -> list[str]:
        return [token for token in (server.token, server.former_token) if token is not None]

    def numbers() -> dict[str, int]:
        known = server.engine.statistics()
        return {name: known[name] for name in ("clients", "keys", "waiters")}

    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
    Page(StoreJobs(server), tokens, numbers).add_to(application)
