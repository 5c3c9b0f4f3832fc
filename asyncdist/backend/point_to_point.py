"""Point-to-point operations: Works that the transport reports to directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from asyncdist.arrays import Array, Flat, decode_meta, describe, human_bytes
from asyncdist.errors import ClosedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from asyncdist.executor.work import Work
from asyncdist.transport.matching import Receive
from asyncdist.transport.mesh import Mesh

__all__ = ["ANY_SOURCE", "RecvArrayWork", "RecvWork", "SendWork"]

ANY_SOURCE: Final = -1


class _PairWork(Work[Any]):
    """What sends and receives share: an own deadline, whose expiry concerns nobody but this pair."""

    __slots__ = ("_mesh", "_on_end", "_peer", "_timer", "_where")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        nbytes: int,
        mesh: Mesh,
        peer: int,
        where: str,
        on_end: Callable[[_PairWork], None],
    ) -> None:
        super().__init__(loop, operation, nbytes)
        self._mesh = mesh
        self._peer = peer
        self._where = where
        self._timer: asyncio.TimerHandle | None = None
        self._on_end = on_end

    def expire_after(self, timeout_s: float) -> None:
        """Bound the operation; called once, right after posting."""
        if not self._done:
            self._timer = self._loop.call_later(timeout_s, self._expire, timeout_s)

    def _expire(self, timeout_s: float) -> None:
        raise NotImplementedError

    def _timeout_error(self, timeout_s: float) -> CollectiveTimeoutError:
        missing = () if self._peer == ANY_SOURCE else (self._peer,)
        return CollectiveTimeoutError(f"{self._where}: {self.operation} did not end within {timeout_s:g} s", missing)

    def _break_pair(self, timeout_s: float) -> None:
        error = self._timeout_error(timeout_s)
        self._fail(error)
        self._mesh.break_pair(self._peer, error)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super()._end()
        self._on_end(self)

    def message_failed(self, token: object, error: BaseException) -> None:
        """The transport gave the message up."""
        if self._done:
            return
        if isinstance(error, PeerLostError):
            explained = PeerLostError(f"{self._where}: {error}", error.rank)
            explained.__cause__ = error
            error = explained
        self._fail(error)


class SendWork(_PairWork):
    """A send; done when its buffer may be reused."""

    __slots__ = ("flat",)

    flat: Flat

    def message_sent(self, token: object) -> None:
        """The buffer may be reused."""
        if not self._done:
            self._finish(None)

    def message_received(self, token: object, receive: Receive) -> None:
        """Never called."""
        raise AssertionError("a send receives nothing")

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never called."""
        raise AssertionError("a send receives nothing")

    def _expire(self, timeout_s: float) -> None:
        self._break_pair(timeout_s)


class RecvWork(_PairWork):
    """A receive into an array; its result is the source rank."""

    __slots__ = ("_array", "_flat", "_number", "_withdraw_when_abandoned", "receive")

    receive: Receive

    def bind(self, array: Array, number: Callable[[int], int], withdraw_when_abandoned: bool) -> None:
        """Set where the message goes, how its source is numbered for the caller, and what cancelling the last waiter
        does."""
        self._array = array
        self._flat = Flat(array, writable=True)
        self._number = number
        self._withdraw_when_abandoned = withdraw_when_abandoned

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Lend the bytes the message goes to, or refuse it."""
        dtype, shape = self._described(source, meta, nbytes)
        array = self._array
        if dtype != array.dtype or nbytes > array.nbytes:
            raise CollectiveMismatchError(
                f"{self._where}: rank {source} sent {describe(dtype, shape)}, but the receive buffer is "
                f"{describe(array.dtype, array.shape)}; the message is dropped, the pair stays usable"
            )
        return self._flat.octets[:nbytes]

    def _described(self, source: int, meta: bytes, nbytes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        try:
            dtype, shape = decode_meta(meta)
        except ValueError as error:
            raise CollectiveMismatchError(f"{self._where}: rank {source} sent a message with {error}") from error
        elements = 1
        for extent in shape:
            elements *= extent
        if elements * dtype.itemsize != nbytes:
            raise CollectiveMismatchError(
                f"{self._where}: rank {source} describes {describe(dtype, shape)}, but sent {nbytes} bytes"
            )
        return dtype, shape

    def message_sent(self, token: object) -> None:
        """Never called."""
        raise AssertionError("a receive sends nothing")

    def message_received(self, token: object, receive: Receive) -> None:
        """The message is in its place."""
        if not self._done:
            self.complete(receive)

    def complete(self, receive: Receive) -> None:
        """End well: the message of `receive` is in its place."""
        self._flat.write_back()
        self.nbytes = receive.nbytes
        assert receive.source is not None  # set by the transport before it reports
        self._source = self._number(receive.source)
        self._finish(self._outcome())

    def _outcome(self) -> Any:
        return self._source

    def cancel(self) -> bool:
        """Withdraw the receive if no message has matched it; True if it was withdrawn. No message is lost."""
        if self._done or not self._mesh.withdraw(self.receive):
            return False
        self._retrieved = True
        self._fail(ClosedError(f"{self._where}: {self.operation} was withdrawn"))
        return True

    def _abandoned(self) -> None:
        if self._withdraw_when_abandoned:
            self.cancel()

    def _expire(self, timeout_s: float) -> None:
        if self._mesh.withdraw(self.receive):
            self._fail(self._timeout_error(timeout_s))
        else:
            assert self.receive.source is not None  # matched
            self._peer = self.receive.source
            self._break_pair(timeout_s)


class RecvArrayWork(RecvWork):
    """A receive of an array of the sender's shape and dtype; its result is the array."""

    __slots__ = ("_max_bytes",)

    def bind_new(self, max_bytes: int, number: Callable[[int], int]) -> None:
        """Set the largest message accepted, in bytes, and how the source is numbered for the caller."""
        self._max_bytes = max_bytes
        self._number = number
        self._withdraw_when_abandoned = True

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Allocate the array the message describes."""
        dtype, shape = self._described(source, meta, nbytes)
        if nbytes > self._max_bytes:
            raise CollectiveMismatchError(
                f"{self._where}: rank {source} sent {describe(dtype, shape)}, {human_bytes(nbytes)}, above max_bytes="
                f"{human_bytes(self._max_bytes)}; the message is dropped, the pair stays usable"
            )
        self._array = np.empty(shape, dtype)
        self._flat = Flat(self._array, writable=True)
        return self._flat.octets

    def _outcome(self) -> Any:
        return self._array
