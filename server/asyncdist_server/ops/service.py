"""Running the daemon as a service: signals, readiness, the service manager, and an end that says why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncdist_server.ops.backups import BackupRequests
from asyncdist_server.serving.config import ConfigError, ServerConfig
from asyncdist_server.serving.daemon import StoreServer, version
from asyncdist_server.serving.sockets import descriptor_limit


async def run_until_signalled(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; prints one line once connections are accepted.

    The first signal drains the daemon, the second ends it at once. HTTP is served before the store is and until after
    it, and says so. Raises what `StoreServer.start` does, and `StoreServer.failure` when that ended it.
    """
    loop = asyncio.get_running_loop()
    wanted = config.limits.connections
    server, stop, notifier = StoreServer(config.within_descriptors()), asyncio.Event(), Notifier(os.environ)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, _on_signal, server, stop, signal_number)
    for signal_number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(signal_number, _ignore, server, signal_number)
    if _reloads(config) or not sys.stdin or not sys.stdin.isatty():  # else a terminal that closes ends it
        loop.add_signal_handler(signal.SIGHUP, _reload, server)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(notifier.close)
        notifier.watch(loop)
        http = None
        if config.http_port is not None:
            from asyncdist_server.ops.http import serve_http

            http = await stack.enter_async_context(serve_http(server))
        if not await _start(server, stop):
            return
        try:
            if server.gate is not None and config.data_dir is not None:
                backups = BackupRequests(server, server.gate, Path(config.data_dir))
                stack.push_async_callback(backups.close)
                backups.listen()
            _say_ready(server, http, wanted)
            notifier.send("READY=1", f"STATUS=serving on {server.address}")
            await _until_over(server, stop)
            notifier.send("STOPPING=1", f"STATUS={server.not_ready}")
        finally:
            await _drain(server)
        if server.failure is not None:
            raise server.failure


def _on_signal(server: StoreServer, stop: asyncio.Event, signal_number: signal.Signals) -> None:
    server.events.info("signal", signal=signal_number.name, second=stop.is_set() or None)
    if stop.is_set():
        server.hurry()
    server.not_ready = "draining"
    stop.set()


def _ignore(server: StoreServer, signal_number: signal.Signals) -> None:
    """Survive a signal that asks for nothing, and by default ends a process."""
    if signal_number == signal.SIGUSR1:
        reason = "no backup is made: there is no journal, or it is not read yet"
    else:
        reason = "it asks for nothing"
    server.events.info("signal_ignored", signal=signal_number.name, reason=reason)


async def _start(server: StoreServer, stop: asyncio.Event) -> bool:
    """Start serving; false if a signal came first. Raises what `StoreServer.start` does."""
    start, stopped = asyncio.ensure_future(server.start()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (start, stopped):
            if not task.done():
                task.cancel()
        await asyncio.gather(start, stopped, return_exceptions=True)
    if start.cancelled():
        return False
    start.result()
    return True


async def _until_over(server: StoreServer, stop: asyncio.Event) -> None:
    """Wait for a signal, or for a journal that cannot be written."""
    ends = [asyncio.ensure_future(event.wait()) for event in (stop, server.failed)]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _drain(server: StoreServer) -> None:
    began_s = time.monotonic()
    server.events.info("draining", connections=server.connection_count, waiters=server.engine.waiter_count)
    await server.stop()
    server.events.info("stopped", seconds=round(time.monotonic() - began_s, 3), cut=server.cut_count)


def _say_ready(server: StoreServer, http: str | None, wanted: int) -> None:
    """Say where the daemon serves, on standard output, and in the log with what is not as it
    should be; `wanted` is `--max-connections`."""
    config = server.config
    if config.token is None:
        server.events.warning("no_token", reason="every process that can connect can read and change the store")
    if server.torch_ports:
        ports = ",".join(map(str, server.torch_ports))
        reach = "every process that can connect" if config.torch_insecure_no_auth else "every process of this host"
        reason = f"torch clients are served without authentication, to {reach}"
        server.events.warning("torch_unauthenticated", ports=ports, reason=reason)
    most = config.limits.connections
    if most < wanted:
        why = "raise the limit of file descriptors (ulimit -n, LimitNOFILE)"
        reason = f"{most} connections are let in, not --max-connections {wanted}: {why}"
        server.events.warning("few_descriptors", allowed=descriptor_limit(), connections=most, reason=reason)
    server.events.info("ready", address=server.address, http=http, pid=os.getpid(), version=version())
    try:
        print(f"asyncdist-server ready on {server.address}" + (f" (http {http})" if http else ""), flush=True)
    except OSError:  # it has no reader, and the log has said the same; the interpreter's end must not try it again
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _reloads(config: ServerConfig) -> bool:
    """Whether there is anything that `_reload` reads."""
    return config.tls_cert is not None or config.token_file is not None


def _reload(server: StoreServer) -> None:
    """Use a new token and renewed certificates from now on, without a restart; what does not fit changes nothing."""
    if not _reloads(server.config):
        reason = "without TLS and without a file with the token; all other options count from the next start"
        server.events.info("nothing_to_reload", reason=reason)
    if server.config.token_file is not None:
        try:
            server.reload_token()
        except ConfigError as error:
            server.events.error("token_kept", reason=str(error))
        else:
            server.events.info("token_read", tokens=1 if server.former_token is None else 2)
    if server.config.tls_cert is not None:
        try:
            server.reload_certificates()
        except ConfigError as error:
            server.events.error("certificates_kept", reason=str(error))
        else:
            server.events.info("certificates_read")


BEATS_PER_TIMEOUT: Final = 3
"""Signs of life within the watchdog's time-out, so that a lost or a late one costs nothing."""


class Notifier:
    """Sends the daemon's state to systemd, if systemd listens (NOTIFY_SOCKET).

    `watch` keeps systemd's watchdog quiet while the event loop runs. A socket that does not take a message changes
    nothing: the daemon serves on.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._timeout_s = _watchdog_timeout_s(environ)
        self._timer: asyncio.TimerHandle | None = None

    def send(self, *states: str) -> None:
        """Send states such as ``READY=1``."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(states).encode(), address)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send signs of life from `loop` from now on, if systemd asks for them."""
        if self._timeout_s is not None:
            self.send("WATCHDOG=1")
            self._timer = loop.call_later(self._timeout_s / BEATS_PER_TIMEOUT, self.watch, loop)

    def close(self) -> None:
        """Send no more signs of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _watchdog_timeout_s(environ: Mapping[str, str]) -> float | None:
    """Return the time-out after which systemd restarts the service, None if it does not watch this process."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
