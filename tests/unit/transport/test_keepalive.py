"""When the host of a peer counts as gone, by what the kernel says of the connection to it."""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.transport import keepalive
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.keepalive import DEFAULT_KEEPALIVE_S, KeepaliveWatch, keepalive_from_environ, set_keepalive

LIMIT_S = 6.0
LOOK_S = LIMIT_S / 6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what has been acknowledged")


class Kernel:
    """A socket: what it has sent, and when that was acknowledged."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.unacknowledged = 0
        self.probes = 0
        self.acknowledged_s = world.now_s
        self.closed = False

    def getsockopt(self, level: int, option: int, length: int, /) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        silent_ms = round((self._world.now_s - self.acknowledged_s) * 1000)
        return keepalive._INFO.pack(self.probes, self.unacknowledged, silent_ms)[:length]


class World:
    """A loop whose clock the test turns, and a watch on it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._due: dict[int, tuple[float, Callable[[], None]]] = {}
        self._made = 0
        self.lost: list[tuple[str, float, Exception]] = []
        self.watch = KeepaliveWatch(self, LIMIT_S)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self._made += 1
        self._due[self._made] = (self.now_s + delay_s, callback)
        number = self._made
        return SimpleNamespace(cancel=lambda: self._due.pop(number, None))

    @property
    def timers(self) -> int:
        return len(self._due)

    def connect(self, name: str) -> Kernel:
        kernel = Kernel(self)
        self.watch.add(name, kernel, lambda error: self.lost.append((name, self.now_s, error)))
        return kernel

    def run(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while self._due:
            number, (at_s, callback) = min(self._due.items(), key=lambda item: item[1][0])
            if at_s > end_s:
                break
            del self._due[number]
            self.now_s = max(self.now_s, at_s)
            callback()
        self.now_s = end_s


@pytest.fixture
def world() -> World:
    """A world without connections."""
    return World()


@pytest.mark.parametrize("what", ["unacknowledged", "probes"])
def test_a_host_that_acknowledges_nothing_is_lost_in_time(world: World, what: str) -> None:
    kernel, healthy = world.connect("far"), world.connect("near")
    world.run(100)
    assert not world.lost, "nothing is under way"
    kernel.acknowledged_s = healthy.acknowledged_s = world.now_s
    setattr(kernel, what, 3)
    began_s = world.now_s
    world.run(LIMIT_S - 0.1)
    assert not world.lost
    world.run(3 * LIMIT_S)
    ((name, at_s, error),) = world.lost
    assert name == "far"
    assert LIMIT_S <= at_s - began_s <= LIMIT_S + 2 * LOOK_S
    assert "acknowledged nothing for 6 s" in str(error)
    assert "ASYNCDIST_KEEPALIVE_S" in str(error)


@pytest.mark.parametrize(("limit_s", "lasted"), [(LIMIT_S, "nothing for 6 s,"), (0.0, "nothing,")])
def test_a_time_out_of_the_kernel_is_said_in_the_same_words(world: World, limit_s: float, lasted: str) -> None:
    """An idle connection is ended by the kernel's probes, which may be quicker than the watch."""
    watch = KeepaliveWatch(world, limit_s)  # type: ignore[arg-type]
    timed_out = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    assert f"its host has acknowledged {lasted} so it is down or cut off" in str(watch.explained(timed_out))
    for other in (OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)), TimeoutError("of a handshake")):
        assert watch.explained(other) is other


def test_whoever_acknowledges_now_and_then_is_there(world: World) -> None:
    kernel = world.connect("far")
    kernel.unacknowledged = 1
    for _ in range(20):
        world.run(LIMIT_S - 2 * LOOK_S)
        kernel.acknowledged_s = world.now_s  # something, but more is under way already
    assert not world.lost


def test_what_has_just_been_sent_into_a_long_silence_has_its_time(world: World) -> None:
    """As when a window has been closed for minutes, and the kernel asks once more whether it is open."""
    kernel = world.connect("far")
    world.run(50 * LIMIT_S)
    kernel.probes = 1
    world.run(LOOK_S)
    kernel.probes = 0
    kernel.acknowledged_s = world.now_s
    world.run(50 * LIMIT_S)
    kernel.probes = 1
    world.run(LIMIT_S - LOOK_S)
    assert not world.lost
    world.run(3 * LOOK_S)
    assert len(world.lost) == 1


def test_a_loop_that_was_busy_for_long_blames_nobody_for_it(world: World) -> None:
    kernel = world.connect("far")
    kernel.unacknowledged = 1
    world.run(LOOK_S)
    world.now_s += 100 * LIMIT_S  # in which the kernel went on
    kernel.acknowledged_s = world.now_s - 0.1
    world.run(LIMIT_S - LOOK_S)
    assert not world.lost


def test_no_timer_without_connections(world: World) -> None:
    assert not world.timers
    kernel = world.connect("far")
    world.connect("near")
    assert world.timers == 1
    kernel.closed = True
    world.run(5 * LIMIT_S)
    assert not world.lost, "a socket that is being closed is for others to judge"
    for name in ("far", "near", "near"):
        world.watch.remove(name)
    assert not world.timers


def test_one_that_ends_another_while_it_is_told(world: World) -> None:
    """All connections to a host are silent together."""
    told = []
    for name, other in (("a", "b"), ("b", "a")):
        kernel = Kernel(world)
        kernel.unacknowledged = 1

        def lost(_error: Exception, name: str = name, other: str = other) -> None:
            told.append(name)
            world.watch.remove(other)

        world.watch.add(name, kernel, lost)
    world.run(3 * LIMIT_S)
    assert told == ["a"]
    assert not world.timers


def test_no_limit_is_no_watch() -> None:
    watch = KeepaliveWatch(None, 0.0)  # type: ignore[arg-type]
    watch.add("far", None, print)  # type: ignore[arg-type]
    watch.remove("far")


@pytest.mark.parametrize(
    ("limit_s", "options"), [(0, (15, 5, 6)), (1, (1, 1, 1)), (2, (1, 1, 1)), (30, (10, 5, 4)), (600, (200, 100, 4))]
)
def test_the_kernel_gives_up_idle_connections_at_about_the_same_time(
    limit_s: float, options: tuple[int, int, int]
) -> None:
    with socket.socket() as sock:
        set_keepalive(sock, limit_s)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert tuple(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names) == options


def test_what_the_kernel_says_is_read_where_it_stands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        sock.sendall(b"x")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, keepalive._INFO.size)
        probes, unacknowledged, silent_ms = keepalive._INFO.unpack(info)
        assert (probes, unacknowledged) == (0, 0)
        assert silent_ms < 60_000


@pytest.mark.parametrize(
    ("text", "value"), [("", DEFAULT_KEEPALIVE_S), (" 5 ", 5.0), ("0", 0.0), ("1", 1.0), ("86400", 86400.0)]
)
def test_the_limit_is_read(text: str, value: float) -> None:
    assert TransportConfig.from_environ({"ASYNCDIST_KEEPALIVE_S": text}).keepalive_s == value
    assert TransportConfig.from_environ({}).keepalive_s == DEFAULT_KEEPALIVE_S


@pytest.mark.parametrize("text", ["-1", "0.9", "86401", "nan", "inf", "soon"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ASYNCDIST_KEEPALIVE_S"):
        keepalive_from_environ({"ASYNCDIST_KEEPALIVE_S": text})
    assert math.isfinite(DEFAULT_KEEPALIVE_S)
