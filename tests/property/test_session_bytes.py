"""Any bytes a client sends are accepted or close that session alone; the engine and its other clients stay whole."""

from __future__ import annotations

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import MemoryClient

from asyncdist_server import messages as m
from asyncdist_server.engine import StoreEngine
from asyncdist_server.messages import Limits

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=2), inner, max_size=2),
    max_leaves=8,
)
# Near misses: mostly the right operation and plausible arguments, so that the checks behind the first ones are met.
ARGUMENTS = st.sampled_from([b"k", b"q", b"", 0, 1, None, [b"k"], [b"k", b"q"], [], 2**63, -1]) | VALUES
REQUESTS = st.lists(ARGUMENTS, max_size=4).flatmap(
    lambda arguments: st.builds(
        lambda request_id, operation: [request_id, operation, *arguments],
        st.integers(0, 30) | VALUES,
        st.integers(0, 21) | VALUES,
    )
)
FRAMES = st.lists(REQUESTS | VALUES, max_size=6).map(lambda requests: msgpack.packb([0, *requests]))


def check_unharmed(engine: StoreEngine, fuzzed: MemoryClient) -> None:
    """The engine still serves, and forgets the fuzzed client without a trace."""
    witness = MemoryClient(engine, namespace="witness", client_id=b"witness-client-x")
    witness.open()
    assert witness.ask((m.SET, b"w", b"1"), (m.GET, b"w", 0))[1] == (2, m.OK, b"1")
    assert witness.ask((m.DELETE, b"w"), (m.GOODBYE,))[1][1] == m.OK
    witness.session.close(0.0)
    cleaner = MemoryClient(engine, client_id=b"cleaning-clientx")
    fuzzed.session.close(0.0)
    cleaner.open()
    cleaner.ask((m.DELETE_NAMESPACE,), (m.GOODBYE,))
    cleaner.session.close(0.0)
    engine.expire(m.CLIENT_LINGER_S + 1.0)
    assert engine.statistics() == dict.fromkeys(engine.statistics(), 0)


@given(st.lists(st.binary(max_size=300), max_size=8), st.sampled_from(["nothing", "magic", "proof", "hello"]))
@settings(deadline=None)
def test_any_bytes_at_any_stage(chunks: list[bytes], stage: str) -> None:
    engine = StoreEngine(b"i" * 16, Limits(frame_bytes=4096, value_bytes=1024))
    client = MemoryClient(engine)
    if stage == "magic":
        client.send(b"\xadDST")
    elif stage == "proof":
        client.prove()
    elif stage == "hello":
        client.open()
    for chunk in chunks:
        client.send(chunk)
    check_unharmed(engine, client)


@given(st.lists(FRAMES, min_size=1, max_size=5), st.integers(1, 500))
@settings(deadline=None, max_examples=300)
def test_any_messages_in_valid_frames(payloads: list[bytes], cut: int) -> None:
    engine = StoreEngine(b"i" * 16, Limits(memory_bytes=5000, waiters=3, in_flight=10))
    client = MemoryClient(engine)
    client.open()
    stream = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
    said = client.send(stream[:cut]) + client.send(stream[cut:])
    for reply in client.replies(said):
        assert len(reply) == 3
    assert engine.memory_bytes <= 5000 + 300 * 200
    check_unharmed(engine, client)
