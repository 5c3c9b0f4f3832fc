"""A store that is full: what it told members is kept all the same."""

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
