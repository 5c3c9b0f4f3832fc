"""What a store does, in the plainest terms: dicts and lists, looked through from end to end every time.

Each method runs one request at one instant and returns what its reply must be, None for one that waits; `late` are the
replies that others get because of it, `changes` what a watcher of everything must be told, in order.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import msgpack

from asyncdist_server.engine.membership import AWAY_S, JOB_LINGER_S
from asyncdist_server.wire import messages as m

__all__ = ["StoreModel", "Waiting"]

INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass
class Waiting:
    """A request that waits."""

    client: int
    request_id: int
    operation: int
    keys: tuple[bytes, ...]
    deadline: float
    lease: int = 0
    member: bytes = b""
    entered: bool = False  # of a join: as a member, and not in line for the name of one


@dataclasses.dataclass
class LeaseModel:
    """Ends at `ends`, infinity while the client it is bound to is there."""

    ttl_s: float
    ends: float
    client: int | None


@dataclasses.dataclass
class HoldModel:
    """Ends at `ends`, infinity while a lease holds the prefix."""

    leases: set[int]
    linger_s: float
    ends: float = math.inf


class JobModel:
    """One job with fixed bounds."""

    def __init__(self, least: int, most: int, settle_s: float) -> None:
        self.least, self.most, self.settle_s = least, most, settle_s
        self.epoch = 0
        self.members: dict[bytes, int] = {}  # who came, and by which lease
        self.last_round: list[bytes] = []  # those of the last round that have not gone
        self.completes_at = math.inf
        self.gives_up_at = math.inf  # those of `last_round` whose connections are lost, as only they do not wait


class StoreModel:
    """One namespace."""

    PREFIX = b"job/j/"

    def __init__(self, job: JobModel) -> None:
        self.now = 0.0
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waiting: list[Waiting] = []
        self.leases: dict[int, LeaseModel] = {}
        self.bound: dict[bytes, int] = {}
        self.holds: dict[bytes, HoldModel] = {}
        self.job = job
        self.late: list[tuple[int, tuple[Any, ...]]] = []
        self.changes: list[tuple[int, bytes, bytes]] = []
        self.token: Callable[[int], int] = lambda request_id: 0
        """Returns the fencing token of the reply to a request, which the engine chooses."""

    # ---- keys

    def present(self, operation: int, key: bytes) -> bool:
        """Whether a reader finds the key."""
        return key in self.values or (operation == m.WAIT and key in self.queues)

    def read(self, operation: int, keys: tuple[bytes, ...]) -> Any:
        """What a reader that waits no more is told."""
        if operation == m.GET:
            return self.values[keys[0]]
        return None if operation == m.WAIT else [self.values[key] for key in keys]

    def finish(self, waiter: Waiting, code: int, value: Any) -> None:
        """Answer a request that waits."""
        self.waiting.remove(waiter)
        self.late.append((waiter.client, (waiter.request_id, code, value)))
        if waiter.entered and (len(self.members_waiting()) < self.job.least or waiter.member in self.job.last_round):
            self.job.completes_at = math.inf  # also where another of that name comes at once

    def wake_readers(self) -> None:
        """Answer every reader whose keys are there at this moment."""
        for waiter in list(self.waiting):
            if waiter.operation in (m.GET, m.WAIT, m.MULTI_GET) and all(
                self.present(waiter.operation, key) for key in waiter.keys
            ):
                self.finish(waiter, m.OK, self.read(waiter.operation, waiter.keys))

    def put(self, key: bytes, value: bytes, lease: int | None = None, *, keep: bool = False) -> None:
        """Store a value, bound to a lease, to none, or as it was."""
        self.values[key] = value
        if not keep:
            self.bound.pop(key, None)
        self.changes.append((m.EVENT_SET, key, value))
        self.wake_readers()
        if lease is not None:
            self.bound[key] = lease

    def remove(self, key: bytes, kind: int = m.EVENT_DELETE) -> bool:
        """Remove a value; if somebody waits for the lock of that name, it is theirs."""
        if self.values.pop(key, None) is None:
            return False
        self.bound.pop(key, None)
        self.changes.append((kind, key, b""))
        for waiter in [each for each in self.waiting if each.operation == m.LOCK and each.keys == (key,)]:
            if key not in self.values and waiter in self.waiting:
                if waiter.lease in self.leases:
                    token = self.token(waiter.request_id)
                    self.finish(waiter, m.OK, token)
                    self.put(key, b"%d" % token, waiter.lease)
                else:
                    self.finish(waiter, m.LEASE_LOST, "there is no such lease (any more)")
        return True

    def add(self, key: bytes, amount: int) -> int | None:
        """Return the sum, None if there is none."""
        match = re.match(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)", self.values.get(key, b"0"))
        if match is None or int(match[1]) not in INT64 or int(match[1]) + amount not in INT64:
            return None
        self.put(key, b"%d" % (int(match[1]) + amount), keep=True)
        return int(match[1]) + amount

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """As torch's store answers."""
        current = self.values.get(key)
        if current != expected and not (current is None and not expected):
            return expected if current is None else current
        self.put(key, desired)
        return desired

    def push(self, key: bytes, item: bytes, at_head: bool) -> None:
        """Give an item to who waits longest, else keep it."""
        for waiter in self.waiting:
            if waiter.operation == m.QUEUE_POP and waiter.keys == (key,):
                self.finish(waiter, m.OK, item)
                return
        self.queues.setdefault(key, []).insert(0 if at_head else len(self.queues[key]), item)
        self.wake_readers()

    def pop(self, key: bytes) -> bytes | None:
        """Take the oldest item."""
        if key not in self.queues:
            return None
        item = self.queues[key].pop(0)
        if not self.queues[key]:
            del self.queues[key]
        return item

    def clear(self, prefix: bytes = b"") -> int:
        """Remove all values and queues that begin so; return how many."""
        keys = [key for key in self.values if key.startswith(prefix)]
        queues = [key for key in self.queues if key.startswith(prefix)]
        for key in keys:
            self.remove(key)
        for key in queues:
            self.queues.pop(key, None)
        return len(keys) + len(queues)

    # ---- leases

    def end_lease(self, number: int, kind: int) -> None:
        """End a lease and what hangs on it."""
        del self.leases[number]
        for name in [name for name, lease in self.job.members.items() if lease == number]:
            self.lose(name, kind)
        for key in [key for key, lease in self.bound.items() if lease == number]:
            self.remove(key, kind)
        for hold in self.holds.values():
            self.release(hold, number)

    def release(self, hold: HoldModel, lease: int) -> None:
        """A lease holds a prefix no longer."""
        if lease in hold.leases:
            hold.leases.remove(lease)
            if not hold.leases:
                hold.ends = self.now + hold.linger_s

    def hold(self, prefix: bytes, lease: int, linger_s: float) -> None:
        """Let a lease hold a prefix."""
        hold = self.holds.setdefault(prefix, HoldModel(set(), 0.0))
        hold.leases.add(lease)
        hold.linger_s = max(hold.linger_s, linger_s)
        hold.ends = math.inf

    def client_went(self, client: int, for_good: bool) -> None:
        """A connection is lost."""
        for waiter in [each for each in self.waiting if each.client == client]:
            self.waiting.remove(waiter)  # nobody is told
            if waiter.operation == m.JOIN:
                self.settle()
        for number, lease in list(self.leases.items()):
            if lease.client == client:
                if for_good:
                    self.end_lease(number, m.EVENT_DELETE)
                else:
                    lease.ends = self.now + lease.ttl_s
                    if any(self.members_waiting(name) for name, holder in self.job.members.items() if holder == number):
                        self.end_lease(number, m.EVENT_EXPIRE)
                    self.settle()

    def client_came(self, client: int) -> None:
        """And made anew."""
        for lease in self.leases.values():
            if lease.client == client:
                lease.ends = math.inf

    # ---- jobs

    def members_waiting(self, for_name: bytes | None = None) -> list[Waiting]:
        """Who waits for the next round, or to have the name of a member."""
        joins = [waiter for waiter in self.waiting if waiter.operation == m.JOIN]
        if for_name is None:
            return [each for each in joins if each.entered]
        return [each for each in joins if each.member == for_name and not each.entered]

    def join(self, waiter: Waiting) -> str:
        """Let a member wait for the next round; returns why not."""
        job, name, lease = self.job, waiter.member, waiter.lease
        holder = job.members.get(name, lease)
        if holder != lease:
            if lease in job.members.values():
                return "lease"
            self.waiting.append(waiter)
            if self.deserted(self.leases[holder]):
                self.end_lease(holder, m.EVENT_EXPIRE)
            return ""
        if any(number == lease and other != name for other, number in job.members.items()):
            return "lease"
        if any(other.member == name for other in self.members_waiting()):
            return "waits"
        if name not in job.members:
            self.put(self.PREFIX + b"members/" + name, b"%d" % lease, lease)
            self.hold(self.PREFIX, lease, JOB_LINGER_S)
            job.members[name] = lease
        waiter.entered = True
        self.waiting.append(waiter)
        self.settle()
        return ""

    def lose(self, name: bytes, kind: int) -> None:
        """A member has gone."""
        job = self.job
        waiters = [waiter for waiter in self.members_waiting() if waiter.member == name]
        lease = job.members.pop(name)
        job.last_round = [each for each in job.last_round if each != name]
        for waiter in waiters:
            told = (m.CANCELLED, "it left") if kind == m.EVENT_DELETE else (m.LEASE_LOST, "the lease has expired")
            self.finish(waiter, *told)
        self.remove(self.PREFIX + b"members/" + name, kind)
        if lease in self.leases or kind != m.EVENT_SET:
            self.release(self.holds[self.PREFIX], lease)
        for waiter in self.members_waiting(name):
            if name not in job.members:
                self.waiting.remove(waiter)
                if waiter.lease not in self.leases:
                    why = m.LEASE_LOST, "there is no such lease (any more)"
                    self.late.append((waiter.client, (waiter.request_id, *why)))
                elif other := [each for each, number in job.members.items() if number == waiter.lease]:
                    why = m.INVALID, f"{name.decode()} joins with the lease of the member {other[0].decode()}"
                    self.late.append((waiter.client, (waiter.request_id, *why)))
                else:
                    self.join(waiter)
        self.settle()

    def settle(self) -> None:
        """See whether the round is complete, or when it will be."""
        job, waiting = self.job, [each.member for each in self.members_waiting()]
        job.gives_up_at = math.inf
        if len(waiting) < job.least or self.absent():
            job.completes_at = math.inf
            absent = [self.leases[job.members[name]] for name in self.absent()]
            if len(waiting) >= job.least and all(map(self.deserted, absent)):
                job.gives_up_at = max(lease.ends - lease.ttl_s for lease in absent) + AWAY_S
        elif len(waiting) >= job.most or not job.settle_s:
            self.complete()
        else:
            job.completes_at = min(job.completes_at, self.now + job.settle_s)

    def absent(self) -> list[bytes]:
        """Members of the last round that do not wait for the next."""
        waiting = [each.member for each in self.members_waiting()]
        return [name for name in self.job.last_round if name not in waiting]

    def deserted(self, lease: LeaseModel) -> bool:
        """Whether it is bound to a connection that is lost."""
        return lease.client is not None and lease.ends < math.inf

    def complete(self) -> None:
        """Begin the next epoch."""
        job = self.job
        job.completes_at = math.inf
        waiting = [each.member for each in self.members_waiting()]
        old = [name for name in job.last_round if name in waiting]
        new = [name for name in waiting if name not in job.last_round][: job.most - len(old)]
        job.last_round = old + sorted(new)
        job.epoch += 1
        self.put(self.PREFIX + b"epoch", msgpack.packb((job.epoch, job.last_round)))
        for waiter in self.members_waiting():
            if waiter.member in job.last_round:
                self.finish(waiter, m.OK, (job.epoch, job.last_round.index(waiter.member), list(job.last_round)))

    # ---- time

    def expire(self) -> None:
        """Let all happen that is due at this moment."""
        for number, lease in list(self.leases.items()):
            if lease.ends <= self.now and number in self.leases:
                self.end_lease(number, m.EVENT_EXPIRE)
        for prefix, hold in list(self.holds.items()):
            if hold.ends <= self.now:
                del self.holds[prefix]
                if prefix == self.PREFIX:
                    self.job.epoch = 0
                self.clear(prefix)
        if self.job.gives_up_at <= self.now:
            self.job.gives_up_at = math.inf
            for number in [self.job.members[name] for name in self.absent()]:
                if self.deserted(self.leases[number]):
                    self.end_lease(number, m.EVENT_EXPIRE)
        if self.job.completes_at <= self.now:
            self.complete()
        for waiter in [each for each in self.waiting if each.deadline <= self.now]:
            self.finish(waiter, m.TIMEOUT, self.missing(waiter))
            if waiter.entered:
                self.lose(waiter.member, m.EVENT_DELETE)

    def missing(self, waiter: Waiting) -> Any:
        """What an expired request is told."""
        if waiter.operation == m.JOIN:
            return None  # looked at by nobody
        if waiter.operation in (m.QUEUE_POP, m.LOCK):
            return list(waiter.keys)
        return [key for key in waiter.keys if not self.present(waiter.operation, key)]
