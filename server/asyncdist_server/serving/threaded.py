"""ThreadedServer: a daemon on a thread of this process, with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from pathlib import Path
from typing import Final

from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import StoreServer
from asyncdist_server.serving.sockets import running
from asyncdist_server.wire.messages import Limits

STOP_MARGIN_S: Final = 5.0
"""How long `close` waits beyond the drain time-out before it gives up on the thread."""


class ThreadedServer:
    """A running store; make it with `serve_in_thread`. Closing it twice is harmless; it is a context manager too."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config.within_descriptors()  # else those who connect leave none to the rest of the process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event: asyncio.Event | None = None
        self._started = threading.Event()
        self._errors: list[BaseException] = []
        self._server: StoreServer  # set by the thread before it says that it has started
        self._thread = threading.Thread(target=self._run, name="asyncdist-store", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._errors:
            self._thread.join()
            raise self._errors[0]
        _watch_forks()
        running.add(self)

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._server.port

    @property
    def token(self) -> str | None:
        """What clients must prove."""
        return self._config.token

    @property
    def address(self) -> str:
        """Where clients connect, as host:port."""
        return self._server.address

    @property
    def connection_count(self) -> int:
        """Connections open now; may be asked from any thread."""
        return self._server.connection_count

    def close(self) -> None:
        """Stop serving and join the thread; blocks up to the drain time-out while clients read their last replies."""
        if self._loop is not None and self._stop_event is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop closed by itself in this moment
                self._loop.call_soon_threadsafe(self._stop_event.set)
        if self._loop is not None:
            self._thread.join(self._config.drain_timeout_s + STOP_MARGIN_S)
        running.discard(self)

    def close_after_fork(self) -> None:
        """In a forked child: give up the copies of the sockets, or the port would stay taken when the parent ends.

        They are replaced rather than closed: objects of the parent's loop still close those numbers some day.
        """
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._server.descriptors():
            with contextlib.suppress(OSError):
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        self._loop = None

    def __enter__(self) -> ThreadedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        server = StoreServer(self._config)
        await server.start()
        self._loop = asyncio.get_running_loop()
        self._stop_event = asyncio.Event()
        self._server = server
        self._started.set()
        try:
            await self._stop_event.wait()
        finally:
            await server.stop()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for server in list(running):
        server.close_after_fork()
    running.clear()


def serve_in_thread(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    former_token: str | None = None,
    insecure_no_auth: bool = False,
    limits: Limits | None = None,
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
) -> ThreadedServer:
    """Start a store on a thread of its own and return it once it accepts connections.

    Clients prove `token`, or `former_token` instead.

    Raises `ConfigError` for an address that needs a token and `OSError` if it cannot be bound (EADDRINUSE). Blocks for
    the few milliseconds that binding takes.
    """
    return ThreadedServer(
        ServerConfig(
            host=host,
            port=port,
            token=token,
            former_token=former_token,
            insecure_no_auth=insecure_no_auth,
            limits=limits or Limits(),
            tls_cert=None if tls_cert is None else Path(tls_cert),
            tls_key=None if tls_key is None else Path(tls_key),
        )
    )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop: uvloop's where it is installed, asyncio's otherwise."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
