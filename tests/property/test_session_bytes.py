"""Any bytes a client sends are accepted or close that session alone; the engine and its other clients stay whole."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import pytest
from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import MemoryClient, Reply

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.session import TURN_REQUESTS
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import Hello, Limits

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
@settings(max_examples=examples(50))
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


CHANGES = st.sampled_from([(m.APPEND, b"k", b"x"), (m.ADD, b"n", 1), (m.GET, b"k", 0), (m.GET, b"later", None)])
ENDS = st.sampled_from([b"", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0"])


@given(
    st.lists(st.lists(CHANGES, max_size=5), max_size=5),
    ENDS,
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(0, 2),
    st.sampled_from([1, 3, TURN_REQUESTS]),
)
@settings(max_examples=examples(33))
def test_what_is_run_and_answered_does_not_depend_on_how_it_is_cut(
    frames: list[list[tuple[Any, ...]]], end: bytes, cuts: list[int], behind: int, turn_requests: int
) -> None:
    """Also where the last of it is nonsense: all that came before is run and answered, then the connection ends."""

    def talk(whole: bool) -> tuple[list[Reply], str, dict[bytes, bytes]]:
        engine = StoreEngine(b"i" * 16, Limits(frame_bytes=4096, value_bytes=1024))
        client = MemoryClient(engine)
        client.prove()
        stream = client.encoder.hello(Hello(client.client_id, ()))
        stream += b"".join(client.frame(*requests) for requests in frames) + end + bytes(behind if end else 0)
        places = [0, len(stream)] if whole else [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        for start, stop in itertools.pairwise(places):
            # Not turn after turn: requests may be left when the next bytes come.
            client.session.receive(stream[start:stop], 0.0)
        said = client.send(b"")
        answers = [reply for payload in client.reader.feed(said)[1:] for reply in m.decode_replies(payload)]
        space = engine.namespaces.get("job")
        return answers, client.session.error, {} if space is None else dict(space.values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncdist_server.engine.session.TURN_REQUESTS", turn_requests)
        assert talk(whole=True) == talk(whole=False)
