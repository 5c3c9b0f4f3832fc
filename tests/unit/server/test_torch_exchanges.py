"""What torch's client and server said to each other in a recording, said again to this server, however it is cut."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
from torch_wire_kit import MemoryTorchClient, World

from asyncdist_server.torch.wire import Query

RECORDING = Path(__file__).parents[2] / "data" / "torch_exchanges.txt"


class Exchange(NamedTuple):
    title: str
    segments: list[tuple[str, bytes]]


def exchanges() -> list[Exchange]:
    found: list[Exchange] = []
    for paragraph in RECORDING.read_text().split("\n# ")[1:]:
        title, *lines = paragraph.strip().splitlines()
        segments: list[tuple[str, bytes]] = []
        for line in lines:
            who, data = line[:3], bytes.fromhex(line[4:])
            if who.strip():
                segments.append((who, data))
            else:
                segments[-1] = (segments[-1][0], segments[-1][1] + data)
        found.append(Exchange(title, segments))
    return found


EXCHANGES = exchanges()
ELSEWHERE = ("client world_size=2", "wait zero timeout present")  # recorded on stores of their own


def cut(data: bytes, size: int) -> list[bytes]:
    """`data` in pieces of `size`; a negative size cuts once, so many bytes from the start."""
    if size < 0:
        return [piece for piece in (data[:-size], data[-size:]) if piece]
    return [data[start : start + size] for start in range(0, len(data), size)]


def any_order(answer: bytes) -> list[bytes]:
    """The keys that LIST_KEYS answers, whose order means nothing."""
    keys = []
    position = 8
    while position < len(answer):
        length = struct.unpack_from("<Q", answer, position)[0]
        keys.append(answer[position + 8 : position + 8 + length])
        position += 8 + length
    assert len(keys) == struct.unpack_from("<Q", answer)[0]
    return sorted(keys)


def replay(size: int) -> None:
    world = World()
    other = world.client()
    client = MemoryTorchClient(world)
    for title, segments in EXCHANGES:
        alone = title.startswith(ELSEWHERE)
        speaker = client
        if alone:
            speaker = World().client() if segments[0][1][0] else MemoryTorchClient(World())
        heard = b""
        for position, (who, data) in enumerate(segments):
            if who == "C>S":
                for piece in cut(data, size):
                    heard += speaker.send(piece)
                continue
            if "satisfied after" in title:
                assert heard == b""
                other.ask(Query.SET, b"/late", b"1")
                heard += speaker.heard()
            if title.startswith("list_keys"):
                assert any_order(heard) == any_order(data)
            else:
                assert heard[: len(data)] == data, (title, position)
            heard = b"" if title.startswith("list_keys") else heard[len(data) :]
        assert heard == b"", title
        assert not speaker.session.closing, title
        if alone:
            speaker.leave()
    client.leave()
    other.leave()
    assert set(world.engine.statistics().values()) == {0}


def test_the_recording_is_whole() -> None:
    assert len(EXCHANGES) == 52
    assert not [title for title, segments in EXCHANGES if not segments]
    spoken = {data[0] for _, segments in EXCHANGES for who, data in segments if who == "C>S"}
    assert spoken == set(Query) - {Query.PING}, "every query begins a segment but PING, which follows VALIDATE"
    assert re.search(r"0d a1 02 00 00", RECORDING.read_text())


def test_the_recording_as_it_was() -> None:
    replay(1 << 20)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 11])
def test_the_recording_in_small_pieces(size: int) -> None:
    replay(size)


def test_the_recording_cut_at_every_byte() -> None:
    longest = max(len(data) for _, segments in EXCHANGES for who, data in segments if who == "C>S")
    for position in range(1, longest):
        replay(-position)
