"""A store that is full: what it told members is kept all the same, and who waited for a lock gets it."""

from __future__ import annotations

from engine_model import StoreModel

from asyncdist_server import messages as m
from asyncdist_server.clients import Reply
from asyncdist_server.config import limits_for
from asyncdist_server.engine import StoreEngine

MEMORY_BYTES = 9_000


def epoch_with(filler_bytes: int) -> tuple[bool, int]:
    """Join a job alone in a store that holds so much already; returns whether that worked, and the memory then."""
    late: list[Reply] = []
    engine = StoreEngine(b"i" * 16, limits_for(4_000, memory_bytes=MEMORY_BYTES))
    client = engine.open("job", late.append)
    for number, size in enumerate((2_000, filler_bytes), 1):
        assert engine.request(client, (number, m.SET, b"%d" % number, b"x" * size), 0.0) == (number, m.OK, None)
    engine.request(client, (3, m.GRANT, 1, 60_000, False), 0.0)
    reply = engine.request(client, (4, m.JOIN, b"j", b"me", 1, 1, 0, 1, None), 0.0)
    if reply is not None:
        assert reply[1] in (m.LIMIT, m.LEASE_LOST)
        return False, engine.memory_bytes
    assert late[0][:2] == (4, m.OK)
    assert StoreModel.PREFIX + b"epoch" in engine.namespaces["job"].values, "it would be given again after a restart"
    return True, engine.memory_bytes


def test_an_epoch_is_among_the_keys_even_if_the_store_is_full() -> None:
    outcomes = [epoch_with(filler_bytes) for filler_bytes in range(0, 3_500, 20)]
    assert {joined for joined, _ in outcomes} == {True, False}
    assert all(memory_bytes <= MEMORY_BYTES + 500 for _, memory_bytes in outcomes)


def test_a_lock_is_passed_on_even_if_the_store_is_full() -> None:
    late: list[Reply] = []
    engine = StoreEngine(b"i" * 16, limits_for(4_000, memory_bytes=MEMORY_BYTES))
    client = engine.open("job", late.append)
    engine.request(client, (1, m.GRANT, 1, 60_000, False), 0.0)
    assert engine.request(client, (2, m.SET, b"lock", b""), 0.0) == (2, m.OK, None)
    assert engine.request(client, (3, m.LOCK, b"lock", 1, None), 0.0) is None
    assert engine.request(client, (4, m.SET, b"a", bytes(4_000)), 0.0) == (4, m.OK, None)
    room = MEMORY_BYTES - engine.memory_bytes - client.namespace.growth_by_value(b"b", b"")
    assert engine.request(client, (5, m.SET, b"b", bytes(room)), 0.0) == (5, m.OK, None)
    assert engine.request(client, (6, m.DELETE, b"lock"), 0.0) == (6, m.OK, True)
    assert [reply[:2] for reply in late] == [(3, m.OK)]
    assert engine.memory_bytes < MEMORY_BYTES
