"""Whatever arrives is either understood or raises RemoteProtocolError, in bounded memory, however it is cut up."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_limits import CREDIT, EAGER, EARLY_PULLS, OFFERS, small_limits
from transport_pair import Pair, Recorder, collective, p2p, receive, send
from zero_copy_pair import ZeroCopyPair

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.frame import (
    EARLY_ID,
    Flag,
    Kind,
    pack_exposed,
    pack_fragment,
    pack_header,
    pack_key,
    pack_memory,
)
from asyncdist.transport.shared_memory.process_memory import PROCESS, OwnMemory

OWN = OwnMemory()
READABLE = np.zeros(4000, np.uint8)
KEYS = st.sampled_from([p2p(0), p2p(1), collective(0), collective(1), pack_key(9, 0, 0, 0, 0), b"\xff" * 24])
LENGTHS = st.one_of(st.sampled_from([0, 1, 10, EAGER, EAGER + 1, 3000, 1 << 48, (1 << 64) - 1]), st.integers(0, 4000))
IDS = st.sampled_from([0, 1, 2, 3, EARLY_ID, EARLY_ID + 1, EARLY_ID + 2, (1 << 32) - 1])

ADDRESSES = st.sampled_from([*[READABLE.ctypes.data] * 4, 0, 1 << 63, (1 << 64) - 1000])
ON_OFFERS = [Kind.PULL, Kind.DISCARD, Kind.WITHDRAW]
AGREED = pack_memory(*OWN.token) + pack_header(Kind.MAPPED, length=PROCESS)
LOANS = st.one_of(
    st.builds(pack_exposed, st.just(EARLY_ID), st.just(PROCESS), ADDRESSES, st.sampled_from([3000, 3000, 3000, 10])),
    st.builds(pack_header, st.just(Kind.RELEASED), flags=st.sampled_from([0, Flag.ABORT]), message_id=st.just(2)),
    st.builds(pack_header, st.sampled_from(ON_OFFERS), message_id=st.sampled_from([1, 2, 2])),
    st.builds(pack_header, st.sampled_from([Kind.MAPPED, Kind.UNMAP]), length=st.just(PROCESS)),
    st.builds(pack_fragment, st.just(EARLY_ID), st.just(0), st.just(0), flags=st.sampled_from([Flag.END, Flag.ABORT])),
    st.just(pack_fragment(EARLY_ID, 0, 700) + bytes(700)),
    st.just(pack_memory(*OWN.token)),
)
"""What is said of messages that are lent, between two who have agreed to lend."""


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Frames that make sense one by one, if not together."""
    kind = draw(st.integers(0, Kind.WITHDRAW + 1))
    length = draw(LENGTHS)
    meta = draw(st.sampled_from([b"", b"", b"meta"]))
    payload = b"x" * min(length, 4000) if kind in (Kind.DATA, Kind.FRAGMENT, Kind.CONTROL) else b""
    flags = draw(st.sampled_from([0, 0, 0, 1, 2, 4, 255]))
    if kind == Kind.FRAGMENT:
        return pack_fragment(draw(IDS), draw(st.sampled_from([0, 0, 700, 1400])), len(payload), flags=flags) + payload
    header = pack_header(
        kind,
        flags=flags,
        meta_bytes=draw(st.sampled_from([len(meta), len(meta), len(meta), 65535])),
        key=draw(KEYS),
        length=length,
        credit=draw(st.sampled_from([0, 100, CREDIT, (1 << 32) - 1])),
        message_id=draw(IDS),
    )
    return header + meta + payload


def feed(pair: Pair, data: bytes, rng: random.Random) -> None:
    """Let `b` read `data`, cut at random."""
    view = memoryview(data)
    while view:
        buffer = pair.b.get_buffer()
        assert len(buffer)
        count = min(len(buffer), len(view), rng.choice((1, 30, 48, 48, 1000, 100_000)))
        buffer[:count] = view[:count]
        view = view[count:]
        pair.b.buffer_updated(count)
        while isinstance(pair, ZeroCopyPair) and rng.random() < 0.9 and pair.copy():
            pass


def check_bounds(pair: Pair) -> None:
    held = pair.b.statistics()
    assert held["unexpected_bytes"] <= 2 * CREDIT + 4000
    assert held["unexpected_offers"] <= 2 * OFFERS
    assert held["early_pulls"] <= EARLY_PULLS
    assert held["streams_in"] <= 20


def read(pair: Pair, data: bytes, seed: int) -> None:
    """Let `b`, in the midst of what it does, read `data`."""
    sink = Recorder()
    send(pair.b, sink, p2p(0), bytes(EAGER + 1), "offered")
    send(pair.b, sink, collective(1), bytes(3000), "collective")
    receive(pair.b, sink, p2p(0), None, "p2p")
    receive(pair.b, sink, collective(0), 10, "small")
    receive(pair.b, sink, collective(1), 3000, "large")
    with contextlib.suppress(RemoteProtocolError):
        feed(pair, data, random.Random(seed))
    check_bounds(pair)
    pair.b.fail(RuntimeError("over"))
    assert len(sink.order) == 5


@settings(max_examples=examples(100))
@given(data=st.one_of(st.binary(max_size=300), st.lists(frames(), max_size=30).map(b"".join)), seed=st.integers())
def test_anything_is_understood_or_refused(data: bytes, seed: int) -> None:
    with small_limits():
        read(Pair(), data, seed)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@settings(max_examples=examples(100))
@given(data=st.lists(st.one_of(LOANS, LOANS, frames()), max_size=10).map(b"".join), seed=st.integers())
def test_any_loan_is_understood_or_refused(data: bytes, seed: int) -> None:
    with small_limits():
        pair = ZeroCopyPair(reading=(1,))
        read(pair, AGREED + data, seed)
        pair.close()


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1 << 32))
def test_any_cutting_gives_the_same(seed: int) -> None:
    """One stream of every kind of message, read whole, byte by byte, and at random."""
    with small_limits():
        results = []
        for step in ("whole", "bytes", "random"):
            pair = Pair()
            sink = Recorder()
            rng = random.Random(seed)
            operations: list[tuple[Callable[..., object], tuple[object, ...]]] = []
            for slot, size in enumerate((0, 1, EAGER, EAGER + 1, 5000)):
                data = rng.randbytes(size)
                for key in (p2p(slot), collective(slot)):
                    nbytes = size if key[20] else None
                    operations.append((receive, (pair.b, sink, key, nbytes, (key, "r"))))
                    operations.append((send, (pair.a, sink, key, data, (key, "s"))))
            rng.shuffle(operations)
            for post, arguments in operations:
                post(*arguments)
            pair.a.send_control(b"control")
            pair.ab.rng = pair.ba.rng = random.Random(seed) if step == "random" else None
            while pair.ab.deliver(step=1 if step == "bytes" else None) | pair.ba.deliver():
                pass
            assert len(sink.order) == len(operations)
            assert pair.controls == [(1, 0, b"control")]
            results.append({key: bytes(array) for key, array in sink.arrays.items()})
        assert results[0] == results[1] == results[2]
