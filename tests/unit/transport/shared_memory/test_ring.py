"""Rings: every byte arrives in order, whatever the sizes; a reader or writer that counts wrongly is found out."""

from __future__ import annotations

import random

import pytest

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.shared_memory.ring import HALF_CONTROL_BYTES, PART_BYTES, RingReader, RingWriter, half_bytes

RING_BYTES = 64
SENT, TAKEN, WANTING = 0, 64, 128


def silent() -> None:
    """The other side need not be told."""


def pair(ring_bytes: int = RING_BYTES) -> tuple[RingWriter, RingReader, memoryview, memoryview]:
    """One direction: the writer's end, the reader's, and the halves each of them owns."""
    writers, readers = (memoryview(bytearray(half_bytes(ring_bytes))) for _ in range(2))
    return RingWriter(writers, readers.toreadonly()), RingReader(readers, writers.toreadonly()), writers, readers


def put(half: memoryview, at: int, value: int) -> None:
    half[at : at + 8] = value.to_bytes(8, "little")


@pytest.mark.parametrize("seed", range(10))
def test_bytes_arrive_in_order(seed: int) -> None:
    rng = random.Random(seed)
    writer, reader, *_ = pair()
    data = rng.randbytes(5000)
    sent = got = 0
    while got < len(data):
        if rng.random() < 0.5:
            buffers, at = [], sent
            for _ in range(rng.randint(1, 4)):
                piece = data[at : at + rng.randint(1, 90)]
                buffers.append(rng.choice((bytes, memoryview))(piece))
                at += len(piece)
            sent += writer.write([buffer for buffer in buffers if buffer], silent)
            assert sent - got <= RING_BYTES
        else:
            buffer = memoryview(bytearray(rng.randint(1, 90)))
            count = reader.read_into(buffer)
            assert buffer[:count] == data[got : got + count]
            got += count
    assert reader.sent == reader.taken
    assert reader.taken == reader.sent == len(data)


def test_a_full_ring_takes_no_more_until_some_of_it_was_read() -> None:
    writer, reader, *_ = pair()
    assert writer.write([b"x" * (RING_BYTES - 1)], silent) == RING_BYTES - 1
    assert writer.has_room()
    assert writer.write([b"yz"], silent) == 1
    assert not writer.has_room()
    assert writer.write([b"z"], silent) == 0
    assert reader.read_into(memoryview(bytearray(1))) == 1
    assert writer.write([b"zz"], silent) == 1


def test_a_reader_is_asked_for_room_and_says_when_half_the_ring_is_free() -> None:
    writer, reader, _, _ = pair()
    writer.write([bytes(RING_BYTES)], silent)
    assert not reader.writer_waits()
    assert not writer.wait_for_room()
    reader.read_into(memoryview(bytearray(RING_BYTES // 2 - 1)))
    assert not reader.writer_waits(), "not worth a wake-up yet"
    reader.read_into(memoryview(bytearray(1)))
    assert reader.writer_waits()
    assert writer.write([b"x"], silent) == 1
    reader.read_into(memoryview(bytearray(1)))
    assert not reader.writer_waits(), "it has got its room"
    assert writer.wait_for_room(), "there is room, so nobody need say so"


@pytest.mark.parametrize("taken", [RING_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_reader_that_took_what_was_never_sent(taken: int) -> None:
    writer, _, _, readers = pair()
    writer.write([bytes(RING_BYTES)], silent)
    put(readers, TAKEN, taken)
    with pytest.raises(RemoteProtocolError, match="took"):
        writer.write([b"x"], silent)
    with pytest.raises(RemoteProtocolError, match="took"):
        writer.has_room()


def test_a_reader_that_gives_back_what_it_took() -> None:
    writer, reader, _, readers = pair()
    writer.write([bytes(RING_BYTES)], silent)
    reader.read_into(memoryview(bytearray(10)))
    assert writer.has_room()
    writer.write([bytes(10)], silent)
    put(readers, TAKEN, 9)
    with pytest.raises(RemoteProtocolError, match="took 9"):
        writer.write([b"x"], silent)


@pytest.mark.parametrize("sent", [RING_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_writer_that_sent_more_than_fits(sent: int) -> None:
    _, reader, writers, _ = pair()
    put(writers, SENT, sent)
    assert reader.sent != reader.taken
    with pytest.raises(RemoteProtocolError, match="sent"):
        reader.read_into(memoryview(bytearray(10)))


def test_a_writer_that_takes_back_what_it_sent() -> None:
    writer, reader, writers, _ = pair()
    writer.write([b"12345"], silent)
    assert reader.read_into(memoryview(bytearray(5))) == 5
    put(writers, SENT, 4)
    with pytest.raises(RemoteProtocolError, match="sent 4"):
        reader.read_into(memoryview(bytearray(5)))


def test_as_much_as_fits_is_believed() -> None:
    _, reader, writers, _ = pair()
    put(writers, SENT, RING_BYTES)
    assert reader.read_into(memoryview(bytearray(100))) == RING_BYTES


@pytest.mark.parametrize("seed", range(5))
def test_control_words_that_are_anything(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        writer, reader, writers, readers = pair()
        try:
            for _ in range(10):
                half = rng.choice((writers, readers))
                put(half, rng.choice((SENT, TAKEN, WANTING)), rng.choice((0, 1, 63, 64, 65, rng.randrange(1 << 64))))
                assert 0 <= writer.write([bytes(rng.randint(1, 100))], silent) <= RING_BYTES
                writer.wait_for_room()
                buffer = memoryview(bytearray(rng.randint(1, 100)))
                assert 0 <= reader.read_into(buffer) <= len(buffer)
                reader.writer_waits()
        except RemoteProtocolError:
            pass


def test_control_words_have_cache_lines_of_their_own() -> None:
    assert HALF_CONTROL_BYTES == 4096
    assert half_bytes(100) == HALF_CONTROL_BYTES + 100


def test_parts_may_be_read_while_more_is_written() -> None:
    writer, reader, *_ = pair(4 * PART_BYTES)
    told: list[int] = []
    pieces = [bytes(PART_BYTES - 1), b"x", bytes(PART_BYTES), bytes(10)]
    assert writer.write(pieces, lambda: told.append(reader.sent)) == 2 * PART_BYTES + 10
    assert told == [PART_BYTES, 2 * PART_BYTES]
    assert reader.sent == 2 * PART_BYTES + 10
