"""Who has much to read, and reads nothing of it, is cut off; who reads, be it slowly, is not."""

from __future__ import annotations

from typing import Any, cast

from asyncdist_server.engine.replies import PIECE_BYTES
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.connection import Connection
from asyncdist_server.serving.daemon import StoreServer


class Transport:
    """What has been written and not been read."""

    def __init__(self) -> None:
        self.unread = 0
        self.cut = False

    def writelines(self, pieces: list[bytes]) -> None:
        self.unread += sum(map(len, pieces))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        """Nothing is read here."""

    def resume_reading(self) -> None:
        """Nothing is read here."""

    def abort(self) -> None:
        self.cut = True


def holding(size: int) -> tuple[Connection, Transport]:
    """A connection whose client has so much to read that the transport takes no more."""
    connection, transport = Connection(StoreServer(ServerConfig(port=0))), Transport()
    connection._transport = cast("Any", transport)
    say(connection, size)
    connection.pause_writing()
    return connection, transport


def say(connection: Connection, size: int) -> None:
    connection._send(cast("Any", connection._transport), [bytes(size), b""], size)


def time_is_up(connection: Connection) -> None:
    connection._cancel_timer()
    connection._check_stall()


async def test_who_reads_nothing_is_cut_off() -> None:
    connection, transport = holding(PIECE_BYTES)
    time_is_up(connection)
    assert transport.cut
    connection._cancel_timer()


async def test_who_reads_is_not_cut_off_although_it_never_has_less_to_read() -> None:
    connection, transport = holding(PIECE_BYTES)
    for _ in range(3):
        transport.unread -= 1
        say(connection, 10)
        time_is_up(connection)
        assert not transport.cut
    time_is_up(connection)
    assert transport.cut
    connection._cancel_timer()


async def test_who_has_read_all_meanwhile_is_not_cut_off_and_watched_no_more() -> None:
    connection, transport = holding(PIECE_BYTES)
    transport.unread = 0
    connection.resume_writing()
    time_is_up(connection)
    assert not transport.cut
    assert connection._timer is None


async def test_who_reads_too_little_again_and_again_is_watched_by_one_timer() -> None:
    connection, transport = holding(PIECE_BYTES)
    timer = connection._timer
    for _ in range(3):
        transport.unread = 0
        connection.resume_writing()
        say(connection, PIECE_BYTES)
        connection.pause_writing()
        assert connection._timer is timer
    time_is_up(connection)
    assert not transport.cut
    time_is_up(connection)
    assert transport.cut
    connection._cancel_timer()
