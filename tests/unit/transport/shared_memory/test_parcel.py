"""Parcels: descriptors come with their record or not at all; whatever else comes is refused, and nothing leaks."""

from __future__ import annotations

import gc
import os
import random
import resource
import socket
import struct
from collections.abc import Iterator

import pytest
from mesh_world import open_fds

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.shared_memory.segment import READY, REFUSAL, SEGMENT, SETUP, Parcel, ParcelReader, send_parcel

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    gc.collect()
    before = open_fds()
    left, right = socket.socketpair()
    right.setblocking(False)
    left.setblocking(False)
    yield left, right
    left.close()
    right.close()
    assert open_fds() == before


def close(parcel: Parcel | None) -> Parcel:
    assert parcel is not None
    for fd in parcel.fds:
        os.close(fd)
    return parcel


def record(kind: int, number: int = 0, size: int = 0) -> bytes:
    return struct.pack("<IIQ", kind, number, size)


def test_descriptors_arrive_with_their_record(pair: Pair) -> None:
    left, right = pair
    reader = ParcelReader()
    with pytest.raises(BlockingIOError):
        reader.read(right)
    send_parcel(left, SETUP, 7, 4096, (0, 1, 2))
    send_parcel(left, READY)
    send_parcel(left, SEGMENT, 3, 1 << 40, (left.fileno(),))
    setup = close(reader.read(right))
    assert setup[:3] == (SETUP, 7, 4096)
    assert len(setup.fds) == 3
    assert not any(os.get_inheritable(fd) for fd in setup.fds if fd in open_fds())
    assert reader.read(right) == (READY, 0, 0, ())
    assert close(reader.read(right))[:3] == (SEGMENT, 3, 1 << 40)
    left.shutdown(socket.SHUT_WR)
    assert reader.read(right) is None


def test_it_never_reads_past_a_record(pair: Pair) -> None:
    left, right = pair
    left.send(record(REFUSAL) + b"frames of the stream")
    assert ParcelReader().read(right) == (REFUSAL, 0, 0, ())
    assert right.recv(100) == b"frames of the stream"


def test_a_record_in_pieces(pair: Pair) -> None:
    left, right = pair
    reader = ParcelReader()
    data = record(SEGMENT, 1, 4096)
    socket.send_fds(left, [data[:5]], [0])
    with pytest.raises(BlockingIOError):
        reader.read(right)
    left.send(data[5:])
    assert len(close(reader.read(right)).fds) == 1


@pytest.mark.parametrize(
    ("kind", "count"), [(SETUP, 0), (SETUP, 2), (REFUSAL, 1), (READY, 1), (SEGMENT, 0), (SEGMENT, 2), (0, 0), (99, 1)]
)
def test_the_wrong_number_of_descriptors(pair: Pair, kind: int, count: int) -> None:
    left, right = pair
    reader = ParcelReader()
    socket.send_fds(left, [record(kind)], [0] * count)
    with pytest.raises(RemoteProtocolError, match="passed"):
        reader.read(right)
    reader.close()
    reader.close()


@pytest.mark.parametrize("count", [4, 100, 253])
def test_more_descriptors_than_a_parcel_has(pair: Pair, count: int) -> None:
    """The kernel drops what there is no room for; three of them fit no segment."""
    left, right = pair
    reader = ParcelReader()
    socket.send_fds(left, [record(SEGMENT, 1, 4096)], [0] * count)
    with pytest.raises(RemoteProtocolError, match="passed 3 descriptors"):
        reader.read(right)
    reader.close()


def test_descriptors_with_every_byte(pair: Pair) -> None:
    left, right = pair
    reader = ParcelReader()
    for byte in record(SETUP):
        socket.send_fds(left, [bytes([byte])], [0])
    with pytest.raises(RemoteProtocolError, match="more descriptors"):
        reader.read(right)
    reader.close()


def test_garbage(pair: Pair) -> None:
    left, right = pair
    rng = random.Random(1)
    for _ in range(200):
        reader = ParcelReader()
        data = rng.randbytes(16)
        socket.send_fds(left, [data], [0] * rng.randint(0, 3))
        with pytest.raises(RemoteProtocolError):
            close(reader.read(right))
        reader.close()


def test_a_full_socket_is_an_error(pair: Pair) -> None:
    left, _ = pair

    def send_for_ever() -> None:
        while True:
            send_parcel(left, READY)

    with pytest.raises(BlockingIOError):
        send_for_ever()


@pytest.mark.parametrize(("kind", "count"), [(SETUP, 3), (SEGMENT, 1)])
def test_a_process_without_descriptors_gets_the_record_without_them(pair: Pair, kind: int, count: int) -> None:
    left, right = pair
    reader = ParcelReader()
    send_parcel(left, kind, 5, 4096, [0] * count)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_fds()
    fillers = [os.dup(0) for fd in range(max(used)) if fd not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([*used, *fillers]) + 1, hard))
    try:
        parcel = reader.read(right)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    assert parcel == (kind, 5, 4096, ())
    send_parcel(left, kind, 6, 4096, [0] * count)
    assert len(close(reader.read(right)).fds) == count, "the next one is whole"
