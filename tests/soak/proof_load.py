"""Concurrent clients that ask a store everything at once and write down what they asked and what they were told."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from linearizability import REFUSED, UNKNOWN, History, Operation

from asyncdist.errors import ClosedError, DistStoreError, QueueEmptyError, StoreTimeoutError
from asyncdist.store import TCPStore

REGISTERS = 3
COUNTERS = 2
LOGS = 2
QUEUES = 2
LOCK_GRACE_S = 60.0
"""Longer than any outage here: no lock is lost unless the data are."""
LOCK_TIMEOUT_S = 60.0
NO_ANSWER = "did not answer in time"
NOT_A_NUMBER = ("add to a value that is not a number", "exceeds the range of int64")
STUCK_S = 120.0
"""No answer for so long: something hangs."""
POP_TIMEOUT_S = 30.0
"""Pops wait across restarts; whoever ends a round feeds the queues until all are served."""
MEAN_PAUSE_S = 0.01
BATCH = 3
CANCELLED_SHARE = 0.03


@dataclass
class Recorded:
    """All that one round of the load has seen, for `proof_audit`."""

    prefix: str
    registers: History = field(default_factory=History)
    queues: History = field(default_factory=History)
    locks: History = field(default_factory=History)
    restarts: list[tuple[float, float]] = field(default_factory=list)
    """From the kill to when the daemon that had lost the data was known to serve."""
    kills: list[float] = field(default_factory=list)
    gone: list[float] = field(default_factory=list)
    """For each kill a time at which all that the killed daemon had said was read, and the next one had said nothing."""
    errors: list[str] = field(default_factory=list)
    """What failed, in words, whether or not it was to be expected."""
    answered: int = 0
    pushed: dict[bytes, bool] = field(default_factory=dict)
    """Items of the queue whose pops are cancelled, and whether the push is known to have been made."""
    popped: list[bytes] = field(default_factory=list)
    sections: int = 0
    """Completed critical sections."""
    unsure_sections: int = 0

    def __post_init__(self) -> None:
        self._wanted = 0
        self._awaited: set[str] = set()
        self._enough: asyncio.Future[None] | None = None

    def note_answer(self, client: str) -> None:
        """Count an operation that ended with a result."""
        self.answered += 1
        self._awaited.discard(client)
        if self._enough is not None and not self._awaited and self.answered >= self._wanted and not self._enough.done():
            self._enough.set_result(None)

    async def more_answers(self, count: int, clients: Iterable[str] = ()) -> None:
        """Wait for `count` more answers, one of them to each of `clients`; TimeoutError if the store hangs."""
        self._wanted = self.answered + count
        self._awaited = set(clients)
        self._enough = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(STUCK_S):
            await self._enough

    @property
    def operations(self) -> int:
        """How many operations were recorded."""
        return sum(len(history.operations) for history in (self.registers, self.queues, self.locks))


class LoadClient:
    """One client under load: mixed operations, some at once, some given up, on a few keys that all clients share."""

    def __init__(
        self, name: str, store: TCPStore, recorded: Recorded, seed: str, *, hasty: bool = False, pushes: int = 2
    ) -> None:
        self.name = name
        self.store = store
        self.recorded = recorded
        self.rng = random.Random(seed)
        self.hasty = hasty
        self.pushes = pushes
        """For every two pops. With two a queue stays short, with three few pops are blocked when the store is lost."""
        self.stopping = False
        self._numbers = itertools.count(1)
        self._asked: set[asyncio.Future[Any]] = set()

    async def run(self) -> None:
        """Ask until `stopping`, then wait for all answers."""
        jobs = [asyncio.create_task(work()) for work in (self._mix, self._mix_queues, self._lock, self._cancel)]
        try:
            await asyncio.gather(*jobs)
            while self._asked:
                await asyncio.wait(self._asked)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def unique(self) -> int:
        """A number that no other client of the round ever uses, with at most 12 digits."""
        return next(self._numbers) * 100 + int(self.name.removeprefix("c"))

    # ---- recording

    def begin(
        self, history: History, key: str, name: str, *arguments: Any, ask: Callable[[str], Awaitable[Any]], write: bool
    ) -> asyncio.Future[Any]:
        """Issue one operation and record it, now and when it ends. Writes of one client keep their order."""
        session = self.name if write and history is self.recorded.registers else None
        operation = history.call(self.name, key, name, *arguments, session=session)
        future = asyncio.ensure_future(ask(f"{self.recorded.prefix}{key}"))
        self._asked.add(future)
        future.add_done_callback(lambda done: self._end(history, operation, done))
        return future

    def _end(self, history: History, operation: Operation, done: asyncio.Future[Any]) -> None:
        self._asked.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            result = done.result()
            operation.result = tuple(result) if isinstance(result, list) else result
        else:
            operation.result = self.outcome(error, operation)
            if operation.name == "pop" and operation.result is UNKNOWN:  # what it takes goes back to the queue
                operation.client = f"{self.name}#{next(self._numbers)}"
                history.call(operation.client, operation.key, "return").called_at = operation.called_at
        history.returned(operation)
        if operation.result is not UNKNOWN:
            self.recorded.note_answer(self.name)

    def outcome(self, error: BaseException, operation: Operation | str) -> Any:
        """What an error tells about the operation."""
        text = str(error)
        if isinstance(error, QueueEmptyError):
            return None
        if isinstance(error, StoreTimeoutError):
            # Of a wait: the key, or an item, was missing; or the store was away for longer than the wait was to be.
            return UNKNOWN if NO_ANSWER in text else None
        if any(each in text for each in NOT_A_NUMBER):
            return REFUSED
        self.note(error, operation)
        return UNKNOWN

    def note(self, error: BaseException, what: object) -> None:
        """Remember an error; anything that is not one of a store ends the run."""
        if isinstance(error, ClosedError):
            return  # the run has failed, and why is told elsewhere
        if not isinstance(error, DistStoreError):
            raise error
        if not self.hasty:
            self.recorded.errors.append(f"{time.monotonic():.3f} {self.name} {what}: {type(error).__name__}: {error}")

    # ---- what is asked

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / MEAN_PAUSE_S))

    async def _mix(self) -> None:
        """Keys of every kind; up to `BATCH` requests travel at once."""
        asks = (self._register, self._register, self._counter, self._log, self._pair)
        while not self.stopping:
            batch = [self.rng.choice(asks)() for _ in range(self.rng.randint(1, BATCH))]
            if self.rng.random() < CANCELLED_SHARE:
                await self._pause()
                self.rng.choice(batch).cancel()
            await asyncio.wait(batch)
            await self._pause()

    def _register(self) -> asyncio.Future[Any]:
        rng, store, history = self.rng, self.store, self.recorded.registers
        key = f"r{rng.randrange(REGISTERS)}"
        value = b"%d" % self.unique()
        name = rng.choice(("set", "get", "get", "add", "append", "compare_set", "compare_set", "delete", "check"))
        if name == "set":
            return self.begin(history, key, name, value, ask=lambda k: store.set(k, value), write=True)
        if name == "get":
            return self.begin(history, key, name, ask=lambda k: store.get(k, timeout=0), write=False)
        if name == "add":
            return self.begin(history, key, name, 1, ask=lambda k: store.add(k, 1), write=True)
        if name == "append":
            return self.begin(history, key, name, b"7", ask=lambda k: store.append(k, b"7"), write=True)
        if name == "compare_set":
            expected = self._guess(key)
            swap = (expected, value)
            return self.begin(history, key, name, *swap, ask=lambda k: store.compare_set(k, *swap), write=True)
        if name == "delete":
            return self.begin(history, key, name, ask=lambda k: store.delete_key(k), write=True)
        return self.begin(history, key, name, ask=lambda k: store.check([k]), write=False)

    def _guess(self, key: str) -> bytes:
        """A value that the key had lately, or nothing."""
        for operation in reversed(self.recorded.registers.operations[-60:]):
            if operation.key == key and operation.name == "get" and isinstance(operation.result, bytes):
                return operation.result
        return b""

    def _counter(self) -> asyncio.Future[Any]:
        store, history, key = self.store, self.recorded.registers, f"n{self.rng.randrange(COUNTERS)}"
        if self.rng.random() < 0.7:
            return self.begin(history, key, "add", 1, ask=lambda k: store.add(k, 1), write=True)
        return self.begin(history, key, "get", ask=lambda k: store.get(k, timeout=0), write=False)

    def _log(self) -> asyncio.Future[Any]:
        store, history, key = self.store, self.recorded.registers, f"l{self.rng.randrange(LOGS)}"
        token = b"%d," % self.unique()
        if self.rng.random() < 0.7:
            return self.begin(history, key, "append", token, ask=lambda k: store.append(k, token), write=True)
        return self.begin(history, key, "get", ask=lambda k: store.get(k, timeout=0), write=False)

    def _pair(self) -> asyncio.Future[Any]:
        """Two keys that are only written together must never be seen apart."""
        store, history = self.store, self.recorded.registers
        both = (b"%d" % self.unique(),) * 2
        if self.rng.random() < 0.5:
            return self.begin(
                history, "p", "set", both, ask=lambda k: store.multi_set([f"{k}/1", f"{k}/2"], both), write=True
            )
        return self.begin(
            history, "p", "get", ask=lambda k: store.multi_get([f"{k}/1", f"{k}/2"], timeout=0), write=False
        )

    def _push(self, item: bytes) -> Callable[[str], Awaitable[Any]]:
        return lambda key: self.store.queue_push(key, item)

    async def _mix_queues(self) -> None:
        store, rng, history = self.store, self.rng, self.recorded.queues
        while not self.stopping:
            key, item = f"q{rng.randrange(QUEUES)}", b"%d" % self.unique()
            name = rng.choice(("push",) * self.pushes + ("pop", "pop", "len"))
            if name == "push":
                asked = self.begin(history, key, name, item, ask=self._push(item), write=True)
            elif name == "len":
                asked = self.begin(history, key, name, ask=store.queue_len, write=False)
            elif self.hasty:
                continue
            else:
                asked = self.begin(
                    history, key, name, ask=lambda k: store.queue_pop(k, timeout=POP_TIMEOUT_S), write=True
                )
            await asyncio.wait([asked])
            await self._pause()

    async def _cancel(self) -> None:
        """A queue whose pops are given up at any moment: nothing may be lost by that."""
        store, rng, key = self.store, self.rng, f"{self.recorded.prefix}given-up"
        while not self.stopping and not self.hasty:
            item = b"%d" % self.unique()
            self.recorded.pushed[item] = False
            pushing = asyncio.ensure_future(store.queue_push(key, item))
            popping = asyncio.ensure_future(store.queue_pop(key, timeout=2))
            await asyncio.sleep(rng.uniform(0.0, 0.01))
            if rng.random() < 0.5:
                popping.cancel()
            pushed, popped = await asyncio.gather(pushing, popping, return_exceptions=True)
            if isinstance(pushed, Exception):
                self.note(pushed, "push")
            else:
                self.recorded.pushed[item] = True
            if isinstance(popped, bytes):
                self.recorded.popped.append(popped)
            elif isinstance(popped, Exception) and self.outcome(popped, "pop") is UNKNOWN:
                self.recorded.popped.append(b"?")
            await self._pause()

    async def _lock(self) -> None:
        """Count under a lock, by reading and writing: two holders at a time would lose a count."""
        recorded, store = self.recorded, self.store
        while not self.stopping and not self.hasty:
            await asyncio.sleep(self.rng.uniform(0.0, 0.2))
            lock = store.lock(f"{recorded.prefix}lock", grace=LOCK_GRACE_S, timeout=LOCK_TIMEOUT_S)
            holder = f"{self.name}#{next(self._numbers)}"
            acquire = recorded.locks.call(holder, "lock", "acquire")
            try:
                acquire.result = await lock.acquire()
                recorded.locks.returned(acquire)
            except DistStoreError as error:
                recorded.locks.call(holder, "lock", "release")  # it is given up, whenever that is
                self.note(error, "acquire")
                continue
            try:
                await self._critical_section()
            except DistStoreError as error:
                self.note(error, "critical section")
            release = recorded.locks.call(holder, "lock", "release")
            try:
                await lock.release()
                release.result = None
                recorded.locks.returned(release)
            except DistStoreError as error:
                self.note(error, "release")

    async def _critical_section(self) -> None:
        store, history = self.store, self.recorded.registers
        self.recorded.unsure_sections += 1
        reading = self.begin(history, "guarded", "get", ask=lambda k: store.get(k, timeout=0), write=False)
        await asyncio.wait([reading])
        if (error := reading.exception()) is not None and NO_ANSWER in str(error):
            return
        value = b"%d" % (1 + (int(reading.result()) if error is None else 0))
        await self.begin(history, "guarded", "set", value, ask=lambda k: store.set(k, value), write=True)
        self.recorded.unsure_sections -= 1
        self.recorded.sections += 1

    async def feed(self) -> None:
        """Push items until `stopping`, so that every waiting pop ends."""
        while not self.stopping:
            for key in (f"q{number}" for number in range(QUEUES)):
                item = b"%d" % self.unique()
                push = self.begin(self.recorded.queues, key, "push", item, ask=self._push(item), write=True)
                await asyncio.wait([push])
            await asyncio.sleep(MEAN_PAUSE_S)
