"""Any bytes of a torch client are accepted or close that connection alone, and how they are cut changes nothing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from torch_wire_kit import VALIDATE, MemoryTorchClient, World, blob, number, query

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.torch.namespaces import CLAIM_S
from asyncdist_server.torch.wire import Query, TorchReader, read_small
from asyncdist_server.wire.messages import Limits

LIMITS = Limits(frame_bytes=2 << 20, value_bytes=1024, key_bytes=64, waiters=6, memory_bytes=20_000)
KEYS = st.sampled_from([b"/k", b"/q", b"/b", b"", b"/torch.rendezvous.a", b"/asyncdist.job.a/x", b"barrier /b"])
VALUES = st.sampled_from([b"", b"1", b"-9", b"text", bytes(500)])
LISTS = st.lists(KEYS, max_size=3)
AMOUNTS = st.sampled_from([0, 1, 2, -1, 2**63 - 1, -(2**63)])
PAIRS = st.lists(st.tuples(KEYS, VALUES), max_size=3)
REQUESTS = st.one_of(
    st.builds(query, st.sampled_from([Query.SET, Query.APPEND, Query.QUEUE_PUSH]), KEYS, VALUES),
    st.builds(query, st.sampled_from([Query.GET, Query.DELETE_KEY, Query.QUEUE_POP, Query.QUEUE_LEN]), KEYS),
    st.builds(query, st.sampled_from([Query.ADD, Query.BARRIER]), KEYS, AMOUNTS),
    st.builds(query, st.sampled_from([Query.CHECK, Query.WAIT, Query.MULTI_GET]), LISTS),
    st.builds(query, st.just(Query.COMPARE_SET), KEYS, VALUES, VALUES),
    st.builds(query, st.sampled_from([Query.GETNUMKEYS, Query.LIST_KEYS, Query.CANCEL_WAIT])),
    PAIRS.map(lambda pairs: b"\x0b" + number(len(pairs)) + b"".join(blob(key) + blob(value) for key, value in pairs)),
    st.just(b"\x0dping"),
)


def new_world() -> World:
    return World(StoreEngine(b"i" * 16, LIMITS))


def check_unharmed(world: World, *fuzzed: MemoryTorchClient) -> None:
    """The others are served, and of the fuzzed clients nothing is left."""
    witness = world.client(1)
    assert witness.ask(Query.SET, b"/w", b"1") + witness.ask(Query.GET, b"/w") == blob(b"1")
    witness.leave()
    for client in fuzzed:
        client.leave()
    world.advance(CLAIM_S)
    assert world.namespaces.next_deadline() is None
    assert world.engine.statistics() == dict.fromkeys(world.engine.statistics(), 0)


@given(st.lists(st.binary(max_size=300), max_size=8), st.booleans())
def test_any_bytes_at_any_stage(chunks: list[bytes], validated: bool) -> None:
    world = new_world()
    client = MemoryTorchClient(world)
    if validated:
        client.send(VALIDATE)
    for chunk in chunks:
        client.send(chunk)
    assert client.session.buffered <= LIMITS.frame_bytes
    check_unharmed(world, client)


@given(st.lists(REQUESTS, max_size=12), st.data())
def test_spoiled_requests(requests: list[bytes], data: st.DataObject) -> None:
    stream = bytearray(b"".join(requests))
    for _ in range(data.draw(st.integers(0, 3)) if stream else 0):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    world = new_world()
    client, other = world.client(), world.client()
    client.send(bytes(stream))
    other.send(b"".join(reversed(requests)))
    check_unharmed(world, client, other)


ENDS = st.sampled_from([b"", b"\xee", b"\x00", query(Query.GET, b"")[:1] + b"\xff" * 8, b"\x0b" + b"\xff" * 8])


@given(st.lists(REQUESTS, max_size=12), ENDS, st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_the_answer_does_not_depend_on_how_it_is_cut(requests: list[bytes], end: bytes, sizes: list[int]) -> None:
    stream = b"".join(requests) + end
    whole, cut = new_world().client(), new_world().client()
    expected = whole.send(stream)
    heard = b""
    position = index = 0
    while position < len(stream):
        size = sizes[index % len(sizes)]
        heard += cut.send(stream[position : position + size])
        position += size
        index += 1
    assert heard == expected
    assert cut.session.error == whole.session.error
    assert cut.session.stored.values == whole.session.stored.values


@given(st.lists(st.tuples(st.integers(0, 2), REQUESTS), max_size=40))
def test_clients_among_each_other(script: list[tuple[int, bytes]]) -> None:
    """Whatever three clients do to each other, those who wait are let go on once and nothing is left in the end."""
    world = new_world()
    clients = [world.client() for _ in range(3)]
    for who, request in script:
        clients[who].send(request)
    check_unharmed(world, *clients)


@given(st.binary(max_size=3), REQUESTS, st.binary(max_size=3), st.integers(1, 20))
def test_what_is_read_in_one_step_is_what_is_read_step_by_step(
    before: bytes, request: bytes, more: bytes, less: int
) -> None:
    reader = TorchReader(LIMITS)
    reader.feed(VALIDATE + request)
    reader.next()
    small = read_small(before + request + more, len(before), LIMITS)
    assert small is None or small == (reader.next(), len(before + request))
    assert read_small(request[:-less], 0, LIMITS) is None
    assert read_small(more, 0, LIMITS) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_read_in_one_step_as_step_by_step(data: bytes) -> None:
    reader = TorchReader(LIMITS)
    reader.feed(VALIDATE + data)
    reader.next()
    small = read_small(data, 0, LIMITS)
    if small is not None:
        assert small[0] == reader.next()
        assert len(data) - small[1] == reader.buffered


def test_a_long_seeded_flood() -> None:
    """Four clients that come, spoil a third of their requests and go: what builds up over thousands of requests."""
    generator = random.Random(3)
    world = World()
    clients = [world.client() for _ in range(4)]
    keys = [b"/k", b"/q", b"/torch.rendezvous.a", b""]

    def request() -> bytes:
        kind = Query(generator.randrange(1, 19))
        key = generator.choice(keys)
        if kind in (Query.SET, Query.APPEND, Query.QUEUE_PUSH):
            return query(kind, key, generator.choice([b"1", bytes(20)]))
        if kind in (Query.GET, Query.DELETE_KEY, Query.QUEUE_POP, Query.QUEUE_LEN):
            return query(kind, key)
        if kind in (Query.ADD, Query.BARRIER):
            return query(kind, key, generator.choice([1, 2, 3]))
        if kind in (Query.CHECK, Query.WAIT, Query.MULTI_GET):
            return query(kind, [key] * generator.randrange(3))
        if kind == Query.COMPARE_SET:
            return query(kind, key, b"", b"1")
        return {Query.MULTI_SET: b"\x0b" + number(1) + blob(key) + blob(b"v"), Query.PING: b"\x0dping"}.get(
            kind, query(kind)
        )

    for _ in range(30_000):
        index = generator.randrange(4)
        client = clients[index]
        data = bytearray(request())
        if generator.random() < 0.3:
            data[generator.randrange(len(data))] = generator.randrange(256)
        client.send(bytes(data))
        if client.session.closing or client.session.buffered > 10_000:
            client.leave()
            clients[index] = world.client()
    check_unharmed(world, *clients)
