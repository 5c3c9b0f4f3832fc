"""Who has much to read, reads nothing of it, and keeps others waiting, is cut off; who reads, be it slowly, is not."""

from __future__ import annotations

from typing import Any, cast

import pytest

from asyncdist_server.config import ServerConfig
from asyncdist_server.connection import Connection
from asyncdist_server.daemon import StoreServer
from asyncdist_server.unsent import SMALL_REPLY_BYTES

MUCH = 10 * SMALL_REPLY_BYTES


class Transport:
    """What has been written and not been read."""

    def __init__(self) -> None:
        self.unread = 0
        self.cut = False

    def writelines(self, pieces: list[bytes]) -> None:
        self.unread += sum(map(len, pieces))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.cut = True


def holding(size: int) -> tuple[Connection, Transport]:
    """A connection whose client has so much to read, while another one waits for room."""
    server = StoreServer(ServerConfig(port=0))
    connection, transport = Connection(server), Transport()
    connection._transport = cast("Any", transport)
    connection._opening = False
    say(connection, size)
    server.unsent.waiting[Connection(server)] = None
    connection.hurry()
    return connection, transport


def say(connection: Connection, size: int) -> None:
    connection._send(cast("Any", connection._transport), [bytes(size), b""], size)


def time_is_up(connection: Connection) -> None:
    connection._cancel_timer()
    connection._check_stall()


@pytest.mark.parametrize(("size", "cut"), [(SMALL_REPLY_BYTES, False), (SMALL_REPLY_BYTES + 1, True)])
async def test_who_reads_nothing_is_cut_off_if_it_is_much(size: int, cut: bool) -> None:
    connection, transport = holding(size)
    time_is_up(connection)
    assert transport.cut is cut
    connection._cancel_timer()


async def test_who_reads_is_not_cut_off_although_it_never_has_less_to_read() -> None:
    connection, transport = holding(MUCH)
    for _ in range(3):
        transport.unread -= 1
        say(connection, 10)
        time_is_up(connection)
        assert not transport.cut
    time_is_up(connection)
    assert transport.cut
    connection._cancel_timer()


async def test_nobody_is_cut_off_for_whom_nobody_waits() -> None:
    connection, transport = holding(MUCH)
    connection._server.unsent.waiting.clear()
    time_is_up(connection)
    assert not transport.cut
    assert connection._timer is None
