"""FileStore: a store in a shared file, for processes that share a file system and no daemon."""

from __future__ import annotations

import asyncio
import math
import os
import random
import secrets
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from asyncdist.concurrency.deadline import Timeout
from asyncdist.concurrency.loop import close_in_forked_child
from asyncdist.concurrency.trace import info
from asyncdist.errors import ClosedError, DistStoreError, StoreTimeoutError
from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S
from asyncdist.store.file_log import FileLog, Record
from asyncdist.store.pipeline import weight
from asyncdist.store.reply import WAITING, Reply, describe, end_quietly, record_wait, settle, timeout_ms
from asyncdist.store.request_store import RequestStore
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages

FIRST_POLL_S: Final = 0.001
MAX_POLL_S: Final = 0.02
"""How often the file is looked at while something waits: at once after a change, then ever more rarely. A look that
finds nothing costs one system call."""

MAX_LOCK_POLL_S: Final = 0.005
"""How often a lock that somebody else holds is tried; it is held for much less than that."""

LOCK_GRACE_S: Final = 1.0
"""How much longer than its time-out, which may be 0, a request waits for the lock."""

MAX_TURN_REQUESTS: Final = 512
"""Most requests done in one turn of the event loop, about 5 ms."""

MAX_TURN_BYTES: Final = 64 * 1024 * 1024
"""A turn also ends once its changes hold this much: they are one record."""

CLOSE_TIMEOUT_S: Final = 2.0
"""How long closing waits for the lock. A file not left by then is reported as stale to the next one who opens it."""

UNLIMITED: Final = 2**62
"""Every process replays the log into its own engine, and all must come to the same result. So no limit may depend on
what differs between processes: their waiters and their memory. Keys and values have the daemon's limits."""


class FileStore(RequestStore):
    """A store in the file `file_name`, shared by processes of one host, or of several over a coherent file system.

    The first process creates the file (mode 0600), each process is counted in it, and the last to `close` removes it.
    With `world_size` the file is removed only after so many have joined, so that one may leave before another comes.
    A store that is dropped without `close`, or whose program ends, leaves if the file's lock is free at that moment.

    Opening fails at once with DistStoreError, and leaves the file as it is, if the directory is missing or not
    writable, if the file is something else, or if a process that joined it is gone without leaving it: a new run must
    not read the keys of an old one. Changes of other processes are noticed by polling, within about 20 ms.
    """

    lookout: ClassVar[None] = None

    def __init__(
        self, file_name: str | os.PathLike[str], world_size: int = -1, *, timeout: Timeout = DEFAULT_STORE_TIMEOUT_S
    ) -> None:
        super().__init__(timeout)
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"world_size must be int, not {type(world_size).__name__}")
        self._log = FileLog(file_name, world_size)
        self._leave_at_exit = weakref.finalize(self, self._log.leave_at_exit)
        self._engine = StoreEngine(
            secrets.token_bytes(messages.INCARNATION_BYTES),
            messages.Limits(waiters=UNLIMITED, memory_bytes=UNLIMITED),
        )
        self._replayer = self._engine.open("", lambda answer: None)  # whose requests the log holds; it never waits
        self._reader = self._engine.open("", self._on_answer)
        self._last_id = 0
        self._queue: deque[Reply] = deque()  # issued and not yet begun, in call order
        self._pops: dict[bytes, dict[Reply, None]] = {}  # waiting for an item, by queue, in the order they came
        self._waiting: dict[int, Reply] = {}  # waiting for keys, in the engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf
        self._poll_s = FIRST_POLL_S
        self._closed = False
        close_in_forked_child(self)
        try:
            if self._log.try_lock():  # almost always free; otherwise joining is the first thing the loop does
                self._join()
        except BaseException:
            self.close_after_fork()
            raise

    def __repr__(self) -> str:
        return f"FileStore({self._log.path!r})"

    def clone(self) -> FileStore:
        """See `Store.clone`; the file is removed once the clone is closed too."""
        if self._closed:
            raise ClosedError(f"{self!r} is closed")
        return FileStore(self.path, timeout=self._timeout_s)

    @property
    def path(self) -> str:
        """The file."""
        return self._log.path

    # ---- requests

    def _request(
        self,
        operation: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        size_bytes: int = 0,
        kind: type[Reply] = Reply,
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")
        loop = self._own_loop()
        self._last_id += 1
        request = (self._last_id, operation, *arguments)
        if operation in WAITING:
            request = (*request, timeout_ms(timeout_s))
        reply = kind(loop=loop)
        reply.owner = self
        reply.request = request
        record_wait(reply, loop)
        reply.deadline = math.inf if timeout_s is None else loop.time() + timeout_s
        self._queue.append(reply)
        self._run_at(0.0)
        return reply

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(f"{self!r} belongs to another event loop")
        return loop

    def withdraw(self, reply: Reply) -> None:
        """Take a cancelled request back."""
        if self._waiting.pop(reply.request[0], None) is not None:
            self._last_id += 1
            self._engine.request(self._reader, (self._last_id, messages.CANCEL, reply.request[0]), 0.0)
        elif reply in self._pops.get(reply.request[2], ()):
            self._forget_pop(reply)
        # one still in the queue is skipped when its turn comes

    def _give_back(self, reply: Reply) -> None:
        if not self._closed:
            self._request(messages.QUEUE_RETURN, (reply.request[2], reply.result()), self._timeout_s)

    # ---- the turn: everything happens here, between two looks at the file

    def _run_at(self, at: float) -> None:
        """Have `_turn` run at the loop's time `at` (0 for as soon as possible), or earlier if that is planned."""
        assert self._loop is not None
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_soon(self._turn) if at <= 0 else self._loop.call_at(at, self._turn)
        self._timer_at = at

    def _turn(self) -> None:
        assert self._loop is not None
        self._timer = None
        self._timer_at = math.inf
        try:
            progress = self._work()
        except DistStoreError as error:
            self._fail(str(error))
            return
        except OSError as error:
            self._fail(f"{self!r} cannot be used any more: {error}")
            return
        now = self._loop.time()
        self._engine.expire(now)
        self._expire(now)
        if self._queue and progress:
            self._run_at(0.0)
        elif self._queue or self._pops or self._waiting:
            longest_s = MAX_LOCK_POLL_S if self._queue else MAX_POLL_S
            self._poll_s = FIRST_POLL_S if progress else min(1.5 * self._poll_s, longest_s)
            next_look = now + self._poll_s * random.uniform(0.7, 1.0)
            self._run_at(min(next_look, self._engine.next_deadline() or math.inf))

    def _work(self) -> bool:
        """Take in what others wrote and do what is queued; return whether anything happened."""
        if not self._needs_lock():
            return self._serve_reads(self._replay(self._log.read(locked=False)))
        if not self._log.try_lock():
            return False
        try:
            if not self._log.joined:
                self._join()
                return self._log.joined
            progress = self._replay(self._log.read(locked=True))
            return self._serve_all() or progress
        finally:
            self._log.unlock()

    def _needs_lock(self) -> bool:
        return (
            not self._log.joined
            or any(reply.request[1] in messages.MUTATIONS for reply in self._queue)
            or any(map(self._has_items, self._pops))
        )

    def _join(self) -> None:
        """Become a member; the lock is held, and is given back."""
        try:
            self._replay(self._log.join())
        finally:
            self._log.unlock()

    def _replay(self, records: Sequence[Record]) -> bool:
        for record in records:
            self._apply(record)
        return bool(records)

    def _apply(self, record: Record) -> tuple[int, int, Any]:
        """Make a change, recorded or about to be, in this process's copy of the data."""
        self._last_id += 1
        try:
            answer = self._engine.request(self._replayer, (self._last_id, *record), 0.0)
        except messages.ProtocolError as error:
            raise DistStoreError(f"{self!r} holds a record this version does not understand: {error}") from error
        assert answer is not None, "only changes that never wait are recorded"
        return answer

    def _serve_reads(self, progress: bool) -> bool:
        for _ in range(min(len(self._queue), MAX_TURN_REQUESTS)):
            reply = self._queue.popleft()
            progress = True
            if not reply.done():
                self._read(reply)
        return progress

    def _serve_all(self) -> bool:
        """Do what is queued, in order, and take items for pops; then write the changes as one. The lock is held."""
        records: list[Record] = []
        outcomes: list[tuple[Reply, int, Any]] = []
        progress = False
        size_bytes = 0
        for _ in range(min(len(self._queue), MAX_TURN_REQUESTS)):
            if size_bytes > MAX_TURN_BYTES:
                break
            reply = self._queue.popleft()
            size_bytes += weight(reply.request)
            progress = True
            operation = reply.request[1]
            if reply.done():
                continue
            if operation == messages.QUEUE_POP:
                self._pops.setdefault(reply.request[2], {})[reply] = None  # behind those that have waited longer
            elif operation in messages.MUTATIONS:
                record = reply.request[1:]
                _, code, value = self._apply(record)
                outcomes.append((reply, code, value))
                if code == messages.OK:
                    records.append(record)
            else:
                self._read(reply)
        for key in list(self._pops):
            while key in self._pops and self._has_items(key):
                reply = next(iter(self._pops[key]))
                record = (messages.QUEUE_POP, key, 0)
                records.append(record)
                outcomes.append((reply, *self._apply(record)[1:]))
                self._forget_pop(reply)
                progress = True
        try:
            if records:
                self._log.append(records)
        except (DistStoreError, OSError) as error:
            for reply, _, _ in outcomes:
                reply.set_exception(DistStoreError(str(error)))
            raise
        for reply, code, value in outcomes:
            settle(reply, code, value, repr(self))
        return progress

    def _forget_pop(self, reply: Reply) -> None:
        """Let one that waits for an item wait no longer."""
        key = reply.request[2]
        del self._pops[key][reply]
        if not self._pops[key]:
            del self._pops[key]

    def _has_items(self, key: bytes) -> bool:
        self._last_id += 1
        answer = self._engine.request(self._reader, (self._last_id, messages.QUEUE_LEN, key), 0.0)
        return answer is not None and bool(answer[2])

    def _read(self, reply: Reply) -> None:
        assert self._loop is not None
        self._waiting[reply.request[0]] = reply
        answer = self._engine.request(self._reader, reply.request, self._loop.time())
        if answer is not None:
            self._on_answer(answer)

    def _on_answer(self, answer: tuple[int, int, Any]) -> None:
        reply = self._waiting.pop(answer[0], None)
        if reply is not None:
            settle(reply, answer[1], answer[2], repr(self))

    def _expire(self, now: float) -> None:
        """End the pops that got nothing in time, and what could not begin because the lock was held all the time."""
        for reply in [reply for pops in self._pops.values() for reply in pops if reply.deadline <= now]:
            self._forget_pop(reply)
            settle(reply, messages.TIMEOUT, [reply.request[2]], repr(self))
        for reply in [reply for reply in self._queue if reply.deadline <= now and not reply.done()]:
            if reply.request[1] not in WAITING or now > reply.deadline + LOCK_GRACE_S:
                text = f"{self!r}: {describe(reply.request)}: the file was locked by another process all the time"
                reply.set_exception(StoreTimeoutError(text))

    # ---- endings

    def _fail(self, why: str) -> None:
        """The file cannot be used any more: end everything."""
        for reply in self._everything():
            if not reply.done():
                reply.set_exception(DistStoreError(why))
        self._closed = True
        self._leave_at_exit()

    def _everything(self) -> list[Reply]:
        pending = [*self._queue, *(reply for pops in self._pops.values() for reply in pops), *self._waiting.values()]
        self._queue.clear()
        self._pops.clear()
        self._waiting.clear()
        return pending

    async def close(self) -> None:
        """Write what is queued and leave the file; the last one removes it. Waiting verbs raise `ClosedError`."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._leave()
        finally:
            self._leave_at_exit()
            for reply in self._everything():
                if not reply.done():
                    end_quietly(reply, ClosedError(f"{self!r} was closed"))

    async def _leave(self) -> None:
        """Get the lock, write what is queued and leave."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_TIMEOUT_S
        pause_s = FIRST_POLL_S
        while not self._log.try_lock():
            if loop.time() >= deadline:
                info("%r could not be left: another process holds its lock", self)
                return
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_POLL_S)
        try:
            if self._log.joined:
                self._replay(self._log.read(locked=True))
                while any(reply.request[1] in messages.MUTATIONS and not reply.done() for reply in self._queue):
                    self._serve_all()
                self._log.leave()
        except (DistStoreError, OSError) as error:
            info("%r could not be left: %s", self, error)
        finally:
            self._log.unlock()

    def close_after_fork(self) -> None:
        """Close this process's copy of the file without leaving it; for a forked child."""
        self._closed = True
        self._leave_at_exit.detach()
        self._log.abandon()
