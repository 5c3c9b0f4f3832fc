"""The daemon's HTTP port: /healthz. The only file that needs aiohttp (extra `server`), which is imported when used."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from asyncdist_server.config import ConfigError
from asyncdist_server.daemon import StoreServer

MISSING: str = "the HTTP port needs aiohttp: pip install 'asyncdist[server]', or start without --http-port"


@contextlib.asynccontextmanager
async def serve_http(server: StoreServer) -> AsyncIterator[str]:
    """Serve HTTP for `server` while the block runs; gives the address as host:port.

    Raises `ConfigError` when aiohttp is missing, `OSError` if the address cannot be bound.
    """
    try:
        from aiohttp import web
    except ImportError as error:
        raise ConfigError(MISSING) from error

    async def healthz(request: web.Request) -> web.Response:
        """200 while the loop serves: an answer at all is the news, the numbers are for people."""
        return web.json_response({"status": "ok", "connections": server.connection_count, **server.engine.statistics()})

    application = web.Application()
    application.router.add_get("/healthz", healthz)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, server.config.http_host, server.config.http_port).start()
        host, port = runner.addresses[0][:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()
