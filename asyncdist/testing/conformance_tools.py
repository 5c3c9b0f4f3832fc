"""What the conformance checks of stores and meshes are written in."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

from asyncdist.errors import PeerLostError
from asyncdist.store.base import Store
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

__all__ = [
    "GROUP",
    "LONG_S",
    "SHORT_S",
    "MeshCheck",
    "OpenMeshes",
    "OpenStore",
    "Operation",
    "Rank",
    "StoreCheck",
    "checks_of",
    "clients",
    "eventually",
    "expect",
    "expect_pending",
    "expect_raises",
    "expect_refused",
    "open_world",
    "pattern",
    "task",
]


OpenStore: TypeAlias = Callable[[], Awaitable[Store]]
"""Opens one more client of the store under check."""

StoreCheck: TypeAlias = Callable[[OpenStore], Awaitable[None]]


OpenMeshes: TypeAlias = Callable[[Sequence[MeshOwner]], Awaitable[Sequence[BaseMesh]]]
"""Open one mesh per owner, ranks 0, 1, ... of a new world, all listening and able to find each other."""

MeshCheck: TypeAlias = Callable[[OpenMeshes], Coroutine[Any, Any, None]]

SHORT_S: Final = 0.05
"""A time-out that is meant to expire."""

LONG_S: Final = 20.0
"""A time-out that only a store that hangs reaches."""


PATIENCE_S: Final = 30.0
"""Far more than any check takes; one that waits this long has failed."""

CLOSE_TIMEOUT_S: Final = 10.0

GROUP: Final = 11
"""The group whose messages the checks send."""

T = TypeVar("T")

E = TypeVar("E", bound=BaseException)


def checks_of(module: str) -> tuple[Any, ...]:
    """Every public function that `module` itself defines, in the order of its lines; to be called at its end."""
    functions = filter(inspect.isfunction, vars(sys.modules[module]).values())
    return tuple(f for f in functions if f.__module__ == module and not f.__name__.startswith("_"))


def expect_refused(kind: type[Exception], *calls: Callable[[], object]) -> None:
    """Raise AssertionError unless each of `calls` raises `kind` at the call."""
    for call in calls:
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"expected a {kind.__name__} at the call")


@asynccontextmanager
async def clients(open_store: OpenStore, count: int) -> AsyncIterator[list[Store]]:
    """Open `count` clients of one store and close them at the end; nothing may take longer than `LONG_S`."""
    async with AsyncExitStack() as stack, asyncio.timeout(LONG_S):
        yield [await stack.enter_async_context(await open_store()) for _ in range(count)]


def expect(actual: object, expected: object) -> None:
    """Raise AssertionError unless both are equal and of one type."""
    if type(actual) is not type(expected) or actual != expected:
        raise AssertionError(f"expected {expected!r}, got {actual!r}")


async def expect_none(awaitable: Awaitable[object]) -> None:
    """Raise AssertionError unless `awaitable` gives None."""
    expect(await awaitable, None)


async def expect_raises(kind: type[E], call: Callable[[], Awaitable[Any]]) -> E:
    """Return the exception of type `kind` that `call()`, or awaiting what it returns, raises."""
    try:
        result = await call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got the result {result!r}")


def task(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Start waiting for `awaitable` without waiting here."""
    return asyncio.ensure_future(awaitable)


async def expect_pending(future: asyncio.Future[Any], store: Store) -> None:
    """Raise AssertionError if `future` is done although all that `store` was asked has had time to be answered.

    Two round trips: the first makes sure that a request issued before it was seen, the second that an answer would have
    come back.
    """
    for _ in range(2):
        await asyncio.sleep(0)
        await store.check([])
        await store.num_keys()
    if future.done():
        raise AssertionError(f"expected to be waiting, got {future!r}")


def pattern(nbytes: int, salt: int = 0) -> bytes:
    """Bytes of which no two stretches look alike soon."""
    block = bytes((i * i + salt) % 251 for i in range(1009))
    return (block * (nbytes // len(block) + 1))[:nbytes]


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a condition of any kind has no event to wait for
            await asyncio.sleep(0.001)


class Operation:
    """One send or receive: a sink that turns what it is told into a future, and objects to being told twice."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.data = bytearray()
        self.meta = b""
        self.source: int | None = None
        self.refusal: Exception | None = None
        self.receive: Receive | None = None
        self.calls = 0

    def message_sent(self, token: Any) -> None:
        self._end(None)

    def message_received(self, token: Any, receive: Receive) -> None:
        self.source = receive.source
        self.meta = receive.meta
        assert receive.nbytes == len(self.data)
        self._end(None)

    def message_failed(self, token: Any, error: BaseException) -> None:
        self._end(error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        if self.refusal is not None:
            raise self.refusal
        self.data = bytearray(nbytes)
        return memoryview(self.data)

    def _end(self, error: BaseException | None) -> None:
        self.calls += 1
        assert self.calls == 1, "told twice"
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
            self.future.exception()  # not every check asks

    async def done(self) -> bytes:
        """Wait for the end; returns the data received."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.future)
        return bytes(self.data)

    async def failure(self) -> BaseException:
        """Wait for the failure."""
        try:
            await self.done()
        except Exception as error:
            return error
        raise AssertionError("it did not fail")


class Rank:
    """One mesh, what its owner was told, and its operations as `Operation`s."""

    def __init__(self) -> None:
        self.lost: dict[int, PeerLostError] = {}
        self.left: list[int] = []
        self.connected: list[int] = []
        self.greetings: list[bytes] = []  # controls sent to each rank that connects
        self.controls: list[tuple[int, bytes]] = []
        self.events: list[str] = []
        self.mesh: BaseMesh

    def peer_connected(self, rank: int) -> None:
        assert rank not in self.connected
        self.connected.append(rank)
        for payload in self.greetings:
            self.mesh.send_control(rank, payload)

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        assert rank not in self.lost
        self.lost[rank] = error

    def peer_left(self, rank: int) -> None:
        assert rank not in self.left
        self.left.append(rank)

    def control_received(self, rank: int, payload: bytes) -> None:
        self.controls.append((rank, payload))
        self.events.append("control")

    def send(self, rank: int, data: bytes, tag: int = 0, channel: int = 0, meta: bytes = b"") -> Operation:
        operation = Operation()
        op = SendOp(pack_key(GROUP, tag, 0, 0, channel), memoryview(data), meta, operation, None)
        try:
            complete = self.mesh.post_send(rank, op)
        except PeerLostError as error:
            operation.message_failed(None, error)
        else:
            if complete:
                operation.message_sent(None)
        return operation

    def receive(
        self,
        rank: int | None,
        tag: int = 0,
        channel: int = 0,
        nbytes: int | None = None,
        ranks: Collection[int] = (),
        refusal: Exception | None = None,
    ) -> Operation:
        """Post a receive from `rank`, or from any of `ranks`; into `nbytes` bytes, or whatever comes."""
        operation = Operation()
        operation.refusal = refusal
        target = None
        if nbytes is not None:
            operation.data = bytearray(nbytes)
            target = memoryview(operation.data)
        receive = operation.receive = Receive(pack_key(GROUP, tag, 0, 0, channel), target, operation, None)
        try:
            if rank is None:
                complete = self.mesh.post_receive_any(ranks, receive)
            else:
                complete = self.mesh.post_receive(rank, receive)
        except Exception as error:  # it was here already, and did not suit
            operation.message_failed(None, error)
        else:
            if complete:
                operation.message_received(None, receive)
        return operation


@asynccontextmanager
async def open_world(open_meshes: OpenMeshes, size: int) -> AsyncIterator[list[Rank]]:
    """`size` ranks; all leave at the end."""
    ranks = [Rank() for _ in range(size)]
    for rank, mesh in zip(ranks, await open_meshes(ranks), strict=True):
        rank.mesh = mesh
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.mesh.close(CLOSE_TIMEOUT_S) for rank in ranks))
