"""Work: the handle of one operation under way.

A Work is future-like but not a Future: any number of tasks may await it, each gets a waiter of its own, and
cancelling one of them neither cancels the operation nor disturbs the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import Context, copy_context
from datetime import timedelta
from time import monotonic
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from asyncdist.arrays.host import human_bytes
from asyncdist.concurrency.deadline import timeout_seconds
from asyncdist.concurrency.spin import Spins
from asyncdist.errors import WaitTimeoutError
from asyncdist.inspect.recorder import ENDED, ISSUED, NOTE, Entry
from asyncdist.transport.protocol.operations import anew

T = TypeVar("T")


class Listener(Protocol):
    """Who hands a Work's end over to another thread."""

    def work_ended(self) -> None:
        """The Work has ended; called at that moment, from wherever it did. Must not raise."""


class DeviceTail(Protocol):
    """The end of an operation on the GPU."""

    def queued(self, events: Sequence[Any]) -> None:
        """The operation is on the GPU's queues; `events` are recorded after it."""

    def wait(self, stream: Any) -> None:
        """See `Work.wait_stream`."""

    def when_queued(self, callback: Callable[[], object]) -> None:
        """Call it on the loop once there is something on the GPU to wait for; now, if there is."""


class Work(Generic[T]):
    """An operation of a group, issued when the call returned.

    `await work` gives the result (the output array; the source rank for `recv`) or raises what went wrong, an exception
    of its own each time. It may be awaited never, once or many times, by any task of the group's event loop. Until it
    is done, the arrays it was given belong to the operation: do not write to them.
    """

    _issued_at: tuple[str, int, str | None]
    """File, line and module of the call; only of those that are watched."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_done",
        "_error",
        "_issued_at",
        "_listener",
        "_loop",
        "_result",
        "_retrieved",
        "_source",
        "_spinner",
        "_waiters",
        "entry",
        "nbytes",
        "on_device",
        "operation",
        "sequence",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, operation: str, nbytes: int = 0, sequence: int | None = None
    ) -> None:
        self._loop = loop
        self.operation = operation
        self.nbytes = nbytes
        self.sequence = sequence
        self._done = False
        self._retrieved = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._source: int | None = None
        self._spinner: Spins | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        self._callbacks: list[tuple[Callable[[Work[T]], object], Context]] | None = None
        self._listener: Listener | None = None
        self.entry: Entry | None = None
        """What the recorder has of it, if it has."""
        self.on_device: DeviceTail | None = None
        """Of an operation on GPU arrays: where it ends on its stream."""

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._done

    is_completed = done

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._done and self._error is None

    def result(self) -> T:
        """Return the result or raise what went wrong; asyncio.InvalidStateError while the operation is under way."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        self._retrieved = True
        if self._error is not None:
            raise anew(self._error)
        return self._result  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None; asyncio.InvalidStateError while the operation is under way."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        self._retrieved = True
        return self._error

    def source_rank(self) -> int:
        """Return the rank a receive got its message from, numbered as in the call that posted it.

        Raises RuntimeError for anything but a completed receive.
        """
        if self._source is None:
            raise RuntimeError(f"{self!r} has no source rank: it is not a completed receive")
        return self._source

    @property
    def duration(self) -> float | None:
        """Seconds from the call to the end; None until it has ended, and of a Work that stands for several."""
        entry = self.entry
        return None if entry is None or entry[ENDED] is None else entry[ENDED] - entry[ISSUED]

    @property
    def where(self) -> str:
        """The beginning of every message about this operation."""
        return self.operation if self.sequence is None else f"{self.operation} #{self.sequence}"

    def waiting_for(self) -> tuple[int, ...]:
        """Global ranks that a collective has not heard from, as far as this rank knows."""
        return ()

    def late(self, timeout_s: float) -> WaitTimeoutError:
        """What `wait` raises when its time is up."""
        ranks = self.waiting_for()
        text = f"{self.where}: did not end within {timeout_s:g} s (the operation goes on)"
        return WaitTimeoutError(text + (f"; it waits for rank {', '.join(map(str, ranks))}" if ranks else ""))

    def add_done_callback(self, callback: Callable[[Work[T]], object], *, context: Context | None = None) -> None:
        """Call `callback(work)` from the event loop once the operation has ended; soon, if it already has.

        It is called in `context`, by default a copy of the current one, as with an asyncio Future.
        """
        context = copy_context() if context is None else context
        if self._done:
            self._retrieved |= self._error is None
            self._loop.call_soon(callback, self, context=context)
        elif self._callbacks is None:
            self._callbacks = [(callback, context)]
        else:
            self._callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[Work[T]], object]) -> int:
        """Forget all `callback`s that have not been scheduled; return how many. With it `asyncio.wait` takes Works."""
        kept = [one for one in self._callbacks or () if one[0] != callback]
        removed = len(self._callbacks or ()) - len(kept)
        self._callbacks = kept or None
        return removed

    def cancel(self) -> bool:
        """Withdraw a send or receive that has not matched; True if it was, and awaiting it raises ClosedError.

        Every other operation has peers that count on it already and cannot be withdrawn: False.
        """
        return False

    def cancelled(self) -> bool:
        """False, as cancelling a Work's waiters never cancels it, and one that was withdrawn has an exception."""
        return False

    def __await__(self) -> Generator[Any, None, T]:
        spinner = self._spinner
        if not self._done and (spinner is None or not spinner.look(self)):
            waiter = self._loop.create_future()
            waiters = self._waiters
            if waiters is None:
                waiters = self._waiters = [waiter]
            else:
                waiters.append(waiter)
            try:
                yield from waiter
            except BaseException as error:  # cancelled, or of another event loop, which asyncio refuses
                waiters.remove(waiter)
                if not waiters and isinstance(error, asyncio.CancelledError):
                    if not self.done():  # since the waiter was made
                        self._abandoned()
                    elif not self._retrieved and self._error is None:
                        self._unnoticed()
                    elif not self._retrieved:
                        self._untold()
                raise
            if spinner is not None:
                spinner.woken()
        elif spinner is not None and spinner.turn_due():
            try:
                yield
            except asyncio.CancelledError:
                if not self._retrieved and not self._waiters:
                    self._unnoticed()
                raise
        self._retrieved = True
        if self._error is not None:
            raise anew(self._error)
        return self._result  # type: ignore[return-value]

    async def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the operation has ended; True, or raise what went wrong.

        `timeout` (seconds or a timedelta) bounds only the waiting: WaitTimeoutError leaves the operation as it is, and
        so does cancelling. Without one this is `await work`, whose cancelling may withdraw a `send` or `recv`. Raises
        RuntimeError on another event loop than the group's.
        """
        timeout_s = timeout_seconds(timeout, None)
        if timeout_s is None or self._done:
            await self
            return True
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(f"{self!r} was awaited on another event loop than its group was made on")
        waiter = self._loop.create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(waiter)  # as to go withdraws nothing, it is not cancelled like those of `await`
        except TimeoutError:
            if not self._has_ended():  # nor in the turn of the loop in which the time was up
                raise self.late(timeout_s) from None
        except asyncio.CancelledError:
            if self._waiters == [waiter] and self._error is not None and not self._retrieved:
                self._untold()
            raise
        finally:
            self._waiters.remove(waiter)
        self.result()
        return True

    def wait_stream(self, stream: Any = None) -> None:
        """Let what is queued on `stream` from now on wait for an operation on GPU arrays; the CPU does not wait.

        `stream` is a stream of cupy or torch, or a CUDA handle; by default the caller's current one (of torch for
        torch's tensors: name it there). Raises what went wrong if the operation has failed; asyncio.InvalidStateError
        if it is not queued on the GPU yet: `await work.enqueued()` first; RuntimeError for operations on host arrays,
        and on paths through the host's memory, whose results are on no stream before they are complete.
        """
        if self._done:
            self.result()
        elif self.on_device is None:
            raise RuntimeError(f"{self!r} is no operation on GPU arrays: await it")
        else:
            self.on_device.wait(stream)

    async def enqueued(self) -> None:
        """Wait until the operation is queued on the GPU, or has ended; it may be pending there. Never raises for it."""
        if not self._done and self.on_device is not None:
            queued = asyncio.Event()
            self.add_done_callback(lambda _work: queued.set())
            self.on_device.when_queued(queued.set)
            await queued.wait()

    def _has_ended(self) -> bool:
        """Whether it is done, or would be if the loop had turned."""
        return self._done

    def _abandoned(self) -> None:
        """The last waiter was cancelled; messages that may be withdrawn override this."""

    def _unnoticed(self) -> None:
        """All waiters were cancelled before anybody was told of its success; such receives override this too."""

    def _untold(self) -> None:
        """All waiters were cancelled before anybody was told of its failure; a group's own Works override this."""

    def _finish(self, result: T | None) -> None:
        self._result = result
        if self._callbacks is not None:
            self._retrieved = True  # they will be told, whatever becomes of those who wait
        self._end()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if self.entry is not None:
            self.entry[NOTE] = f"{type(error).__name__}: {error}"
        error.__traceback__ = None  # the frames it came through hold arrays; it is raised as one of its own each time
        self._end()

    def _end(self) -> None:
        self._done = True
        if self.entry is not None:
            self.entry[ENDED] = monotonic()
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self._callbacks is not None:
            for callback, context in self._callbacks:
                self._loop.call_soon(callback, self, context=context)
            self._callbacks = None
        listener = self._listener
        if listener is not None:
            self._listener = None  # it refers to us, and our arrays are not to wait for the garbage collector
            listener.work_ended()

    def __repr__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        state = "pending" if not self._done else "done" if self._error is None else f"failed: {self._error}"
        return f"<Work {self.operation}{number} {human_bytes(self.nbytes)} {state}>"


WorkKey: TypeAlias = tuple[int, int]
"""Tag and sequence number of a collective: its place in the order of its group."""


class WorkOwner(Protocol):
    """The group that issued a collective."""

    def where(self, operation: str, sequence: int | None = None) -> str:
        """The beginning of every message about an operation."""

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks an operation under way has not heard from."""

    def untold(self, work: Work[Any]) -> None:
        """Nobody who waited for this Work was told that it has failed."""


class CollectiveWork(Work[Any]):
    """A collective under way. `number` is its sequence number among those of its `tag`, `value` its result to be."""

    __slots__ = ("_owner", "ask_at_s", "deadline_s", "issued_s", "key", "number", "tag", "value")
    issued_s: float
    ask_at_s: float
    """When others are next asked about it; both are set with the deadline."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        nbytes: int,
        tag: int,
        number: int,
        value: Any,
        owner: WorkOwner | None = None,
    ) -> None:
        Work.__init__(self, loop, operation, nbytes, number)
        self.tag = tag
        self.number = number
        self.key: WorkKey = (tag, number)
        self.value = value
        self.deadline_s: float | None = None
        self._owner = owner

    @property
    def where(self) -> str:
        """See Work; of a part of another operation its name alone."""
        return super().where if self._owner is None else self._owner.where(self.operation, self.sequence)

    def waiting_for(self) -> tuple[int, ...]:
        """See Work."""
        return () if self._owner is None or self._done else self._owner.waiting_for(self.tag, self.number)

    def _untold(self) -> None:
        if self._owner is not None:
            self._owner.untold(self)

    def finish(self) -> None:
        """It has ended well, and `value` is its result."""
        self._result = self.value
        if self._waiters is None and self._callbacks is None and self._listener is None:
            self._done = True  # nobody is to be told, as whoever awaits it looks
            if self.entry is not None:
                self.entry[ENDED] = monotonic()
        else:
            self._end()


async def until_ended(works: Iterable[Work[Any]]) -> None:
    """Wait until all `works` have ended, well or not, without asking how; cancelling ends only the waiting."""
    for work in list(works):
        if not work._done:
            ended = asyncio.Event()
            # Not as its user asks: see `asyncdist.group.misuse`.
            Work.add_done_callback(work, lambda _work, ended=ended: ended.set())  # type: ignore[misc]
            await ended.wait()
