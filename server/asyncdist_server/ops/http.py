"""The daemon's HTTP port, to be read only: /healthz, /readyz, /metrics, and pages that other packages add.

The only file that needs aiohttp and prometheus-client (extra `server`), which are imported when used. Nothing here asks
who the reader is: the port is for this host unless it is told otherwise, and a browser of this host that was led here
by a page of another site is turned away (`Host` must name this host).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from asyncdist_server.ops.metrics import PREFIX, Metric, Samples, collect
from asyncdist_server.serving.config import ConfigError
from asyncdist_server.serving.daemon import StoreServer, not_served, stuck
from asyncdist_server.serving.sockets import format_address, is_loopback

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

MISSING: Final = (
    "the HTTP port needs aiohttp and prometheus-client: pip install 'asyncdist[server]', or start without --http-port"
)
MAX_HTTP_CONNECTIONS: Final = 64
"""HTTP connections at a time; a few readers need a few. Beyond that the most silent ones are cut: the store needs the
files."""
MAX_REQUEST_BYTES: Final = 1024
"""Longest body of a request; nothing here has one."""
SHOWN_CHARACTERS: Final = 200
"""How much of what is wrong with a request is written into the log."""
END_S: Final = 2.0
"""How long the end waits for answers under way: a reader that reads nothing holds up no job and no daemon."""
PAGES: Final = "asyncdist_server.pages"
"""The entry points of `_add_pages`."""
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.asynccontextmanager
async def serve_http(server: StoreServer) -> AsyncIterator[str]:
    """Serve HTTP for `server` while the block runs; gives the address as host:port.

    Raises `ConfigError` when a library is missing, `OSError` if the address cannot be bound.
    """
    try:
        routes, logger = _routes(server), _logger(server)
    except ImportError as error:
        raise ConfigError(MISSING) from error
    config = server.config
    async with serve_routes(
        routes, config.http_host, config.http_port or 0, logger, partial(_add_pages, server)
    ) as one:
        yield one


def _add_pages(server: StoreServer, application: web.Application) -> None:
    """Let what is installed add pages of its own: functions of this server and of the application."""
    for page in entry_points(group=PAGES):
        page.load()(server, application)


@contextlib.asynccontextmanager
async def serve_routes(
    routes: Mapping[str, Handler],
    host: str,
    port: int,
    logger: logging.Logger,
    extend: Callable[[web.Application], None] = lambda application: None,
) -> AsyncIterator[str]:
    """Answer GET of the paths of `routes` while the block runs; gives the address as host:port.

    `logger` gets what is wrong with requests, `extend` may add more to the application.
    Raises `OSError` if the address cannot be bound, ImportError.
    """
    from aiohttp import web

    @web.middleware
    async def this_host_only(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not names_this_host(request.host, request.transport):
            return web.Response(status=421, text="this port is for the host it is on: use localhost or an address\n")
        return await handler(request)

    application = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[this_host_only])
    for path, handler in routes.items():
        application.router.add_get(path, handler)
    extend(application)
    runner = web.AppRunner(application, access_log=None, logger=logger, shutdown_timeout=END_S)
    await runner.setup()
    try:
        assert runner.server is not None
        protocols = _Bounded(runner.server)
        try:
            listener = await asyncio.get_running_loop().create_server(protocols, host, port)
        except OSError as error:
            raise OSError(error.errno, f"cannot serve HTTP on {host} port {port}: {error}") from error
        try:
            yield format_address(listener.sockets[0].getsockname())
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def _routes(server: StoreServer) -> dict[str, Handler]:
    from aiohttp import web
    from prometheus_client import generate_latest

    process = _process_registry()

    async def healthz(request: web.Request) -> web.Response:
        """200 while the loop serves: an answer at all is the news, the numbers are for people."""
        return web.json_response(
            {
                "status": "ok",
                "connections": server.connection_count,
                **server.engine.statistics(),
                **stuck(server),
            }
        )

    async def readyz(request: web.Request) -> web.Response:
        """200 while clients are served, else 503 and why not."""
        reason = not_served(server)
        return web.json_response({"status": reason or "ready", **stuck(server)}, status=503 if reason else 200)

    async def metrics(request: web.Request) -> web.Response:
        """Everything `metrics` knows, and the process."""
        # To count its files, a process lists them: with 10,000 connections clients would wait for ten milliseconds.
        of_process = await asyncio.to_thread(generate_latest, process)
        now = asyncio.get_running_loop().time()
        text = metrics_text(PREFIX, collect(server, now)) + of_process
        return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})

    return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}


def metrics_text(prefix: str, found: Iterable[tuple[Metric, Samples]]) -> bytes:
    """Write metrics as Prometheus reads them; their names begin with `prefix`."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Collector:
        def collect(self) -> Iterator[Family]:
            return (_family(prefix, metric, samples) for metric, samples in found)

        def describe(self) -> list[Family]:
            return []  # else `collect` is called when it is registered

    registry = CollectorRegistry(auto_describe=False)  # several daemons may run in one process
    registry.register(Collector())
    return generate_latest(registry)


def _logger(server: StoreServer) -> logging.Logger:
    """Return what aiohttp writes its errors to: nonsense that was sent becomes events, so that a flood is no flood."""
    from aiohttp.http import HttpProcessingError

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, HttpProcessingError):
                reason = " ".join(error.message.split())[:SHOWN_CHARACTERS]
                server.events.warning("http_refused", what=record.getMessage(), reason=reason)
            else:
                server.log.handle(record)

    logger = logging.Logger("asyncdist_server.ops.http")
    logger.addHandler(Handler())
    return logger


class _Bounded:
    """Makes the protocols of HTTP connections, and cuts the one that was silent for longest when there are too many.

    So no client that holds or forgets connections can keep a health check away.
    """

    def __init__(self, server: Callable[[], asyncio.Protocol]) -> None:
        self.new_handler = server
        self._by_silence: dict[_Connection, None] = {}

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    def heard(self, connection: _Connection) -> None:
        """Note that something came from a connection, perhaps the connection itself."""
        known = connection in self._by_silence
        if not known and len(self._by_silence) >= MAX_HTTP_CONNECTIONS:
            silent = next(iter(self._by_silence))
            self.forget(silent)
            silent.abort()
        self._by_silence.pop(connection, None)
        self._by_silence[connection] = None

    def forget(self, connection: _Connection) -> None:
        """Note that a connection is gone."""
        self._by_silence.pop(connection, None)


class _Connection(asyncio.Protocol):
    """aiohttp's protocol, and what `_Bounded` is to know of it."""

    def __init__(self, bounded: _Bounded) -> None:
        self._bounded = bounded
        self._handler = bounded.new_handler()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._bounded.heard(self)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._bounded.heard(self)
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounded.forget(self)
        self._handler.connection_lost(exc)

    def abort(self) -> None:
        """Cut the connection at once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def names_this_host(host: str, transport: asyncio.BaseTransport | None) -> bool:
    """Whether a request that came over loopback was meant for it: by address or as localhost, see the module.

    A page of another site can make a browser of this host send requests here under a name of its own; what comes from
    elsewhere is asked for by whatever name this host has there.
    """
    local = transport.get_extra_info("sockname") if transport is not None else None
    if not local or not is_loopback(local[0]):
        return True
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return is_loopback(name)
    except ValueError:
        return False


def _process_registry() -> CollectorRegistry:
    """Return a registry of what every Prometheus client tells of its process."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def _family(prefix: str, metric: Metric, samples: Samples) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    name = prefix + metric.name
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(name, metric.about, labels=metric.labels)
        for labels, value in samples:
            assert not isinstance(value, float | int)
            bounds = [*map(str, value.bounds), "+Inf"]
            histograms.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        return histograms
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        name, metric.about, labels=metric.labels
    )
    for labels, value in samples:
        assert isinstance(value, float | int)
        family.add_metric(labels, value)
    return family
