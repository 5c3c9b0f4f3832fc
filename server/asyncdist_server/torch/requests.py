"""What each query of a torch client does, but for those that wait: one function each, (session, fields...).

Semantics and answers are those of torch's server, which has no answer that means an error: what it cannot do closes
the connection, by way of a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from asyncdist_server.engine.clients import KEY_WORK_BYTES
from asyncdist_server.engine.operations import INT64_MAX, INT64_MIN, parse_number
from asyncdist_server.torch.namespaces import JOB_KEY_STARTS
from asyncdist_server.torch.wire import Query, encode_integer, encode_length, encode_nonce
from asyncdist_server.wire.messages import (
    ADD,
    APPEND,
    COMPARE_SET,
    DELETE,
    LIST_KEYS,
    MULTI_SET,
    NUM_KEYS,
    OK,
    QUEUE_LEN,
    QUEUE_PUSH,
    SET,
    ProtocolError,
)

if TYPE_CHECKING:
    from asyncdist_server.torch.session import TorchSession


def _validate(session: TorchSession, magic: int) -> None:
    raise ProtocolError("a torch client sent its magic number twice")


def _ping(session: TorchSession, nonce: int) -> None:
    session.say(encode_nonce(nonce))


def _set(session: TorchSession, key: bytes, value: bytes) -> None:
    session.do(SET, key, value)


def _append(session: TorchSession, key: bytes, value: bytes) -> None:
    session.do(APPEND, key, value)


def _multi_set(session: TorchSession, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
    session.name_jobs(*keys)
    session.must(session.ask(MULTI_SET, keys, values))


def _compare_set(session: TorchSession, key: bytes, expected: bytes, desired: bytes) -> None:
    session.say_string(session.do(COMPARE_SET, key, expected, desired))


def _get(session: TorchSession, key: bytes) -> None:
    if key.startswith(JOB_KEY_STARTS):
        session.name_jobs(key)
    session.say_string(session.stored.values.get(key, b""))


def _multi_get(session: TorchSession, keys: tuple[bytes, ...]) -> None:
    session.name_jobs(*keys)
    session.client.work_bytes += KEY_WORK_BYTES * len(keys)
    values = [session.stored.values.get(key, b"") for key in keys]
    size = sum(map(len, values))
    if size > session.engine.limits.frame_bytes:
        raise ProtocolError(f"the values of one request have {size} bytes, more than one reply may have")
    for value in values:
        session.say_string(value)


def _add(session: TorchSession, key: bytes, amount: int) -> None:
    if key.startswith(JOB_KEY_STARTS):
        session.name_jobs(key)
    reply = session.ask(ADD, key, amount)
    if reply[1] == OK:
        session.say(encode_integer(reply[2]))
        return
    number = parse_number(session.stored.values.get(key, b"0"))
    if number is None or INT64_MIN <= number + amount <= INT64_MAX:
        raise ProtocolError(reply[2])
    total = (number + amount - INT64_MIN) % 2**64 + INT64_MIN  # torch's counters wrap
    session.must(session.ask(SET, key, b"%d" % total))
    session.say(encode_integer(total))


def _check(session: TorchSession, keys: tuple[bytes, ...]) -> None:
    session.name_jobs(*keys)
    session.client.work_bytes += KEY_WORK_BYTES * len(keys)
    session.say(b"\x00" if all(map(session.stored.present, keys)) else b"\x01")


def _num_keys(session: TorchSession) -> None:
    session.say(encode_integer(session.must(session.ask(NUM_KEYS))))


def _delete(session: TorchSession, key: bytes) -> None:
    session.say(encode_integer(session.do(DELETE, key)))


def _list_keys(session: TorchSession) -> None:
    keys: list[bytes] = []
    start: bytes | None = b""
    while start is not None:
        start, more = session.must(session.ask(LIST_KEYS, b"", start))
        keys += more
    if sum(map(len, keys)) > session.engine.limits.frame_bytes:
        raise ProtocolError(f"the {len(keys)} keys are more than one reply may have")
    session.say(encode_integer(len(keys)))
    session.say(b"".join([part for key in keys for part in (encode_length(len(key)), key)]))


def _queue_push(session: TorchSession, key: bytes, item: bytes) -> None:
    session.do(QUEUE_PUSH, key, item)
    session.namespace.offer(session, key, session.now)


def _queue_pop(session: TorchSession, key: bytes) -> None:
    session.name_jobs(key)
    if session.namespace.free_items(session, key) > 0:
        session.say(encode_integer(session.must(session.ask(QUEUE_LEN, key))))
        session.pop(key)
    else:
        session.say(encode_integer(0))
    session.drop_claim(session.now)


def _queue_len(session: TorchSession, key: bytes) -> None:
    session.say(encode_integer(session.do(QUEUE_LEN, key)))


REQUESTS: Final[Mapping[int, Callable[..., None]]] = {
    Query.VALIDATE: _validate,
    Query.SET: _set,
    Query.COMPARE_SET: _compare_set,
    Query.GET: _get,
    Query.ADD: _add,
    Query.CHECK: _check,
    Query.WAIT: lambda session, keys: session.wait(keys),
    Query.GETNUMKEYS: _num_keys,
    Query.DELETE_KEY: _delete,
    Query.APPEND: _append,
    Query.MULTI_GET: _multi_get,
    Query.MULTI_SET: _multi_set,
    Query.CANCEL_WAIT: lambda session: session.cancel_wait(),
    Query.PING: _ping,
    Query.QUEUE_PUSH: _queue_push,
    Query.QUEUE_POP: _queue_pop,
    Query.QUEUE_LEN: _queue_len,
    Query.LIST_KEYS: _list_keys,
    Query.BARRIER: lambda session, key, world_size: session.barrier(key, world_size),
}
