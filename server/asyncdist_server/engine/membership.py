"""Who takes part in a job: rounds, epochs and ranks. No clock and no I/O, times are passed in.

Members join with a name and a lease. A round is complete when at least `least` members wait for it, every living
member of the previous round among them, and either `most` wait or no new member came for `settle_s`. It gets the next
epoch. Ranks: members of the previous round keep their order and come first, so that rank 0 is one who has the job's
state as long as anybody has it; then the new ones in the order of their names (numbers in names count as numbers).

A name belongs to one member. Who joins under the name of a member whose connection is lost takes its place at once, and
waits while that one lives. A round that waits for nobody but members whose connections are lost waits `AWAY_S` for
them, however long their leases last: a client that lives has made its connection anew by then.

A job can be seen in the keys under `job/<job>/`. `members/<name>` is there from a member's first join until it leaves
or is lost; it is bound to the member's lease, and its value is the lease's number. `epoch` is the last round, as
msgpack [epoch, [name...]]. So a watch of `members/` tells of arrivals, departures (deleted) and losses (expired), and a
store that kept its keys knows its jobs again. The members' leases hold the prefix: all of it goes `JOB_LINGER_S` after
the last member.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgpack

from asyncdist_server.engine.timers import Timed
from asyncdist_server.wire.key_text import shown
from asyncdist_server.wire.messages import (
    CANCELLED,
    EVENT_DELETE,
    EVENT_EXPIRE,
    INVALID,
    JOIN,
    LEASE_LOST,
    LIMIT,
    OK,
    TIMEOUT,
    Names,
)

if TYPE_CHECKING:
    from asyncdist_server.engine.clients import Client, Reply
    from asyncdist_server.engine.leases import Lease
    from asyncdist_server.engine.namespace import Namespace
    from asyncdist_server.engine.state import StoreState
    from asyncdist_server.engine.waiters import Waiter

JOB_LINGER_S: Final = 30.0
"""How long a job without members is remembered: a launcher that starts all of them again finds its epoch and keys."""
AWAY_S: Final = 0.5
"""How long a round waits for a member whose connection is lost: its client connects anew within milliseconds."""
MAX_EPOCH: Final = 2**62
"""The largest that is believed when it is found among the keys: what follows still fits into a message."""
MAX_NAMES_BYTES: Final = 4 * 1024 * 1024
"""All names of a job's members together: each member is told all of them. 64 bytes for each of the most members."""
NAME_OVERHEAD_BYTES: Final = 5
"""What msgpack may add to a name."""
JOB_BYTES: Final = 1200
"""What a job costs besides its keys, its hold and its history."""
_DIGITS: Final = re.compile(rb"([0-9]+)")


def prefix_of(job: bytes) -> bytes:
    """Return what the keys of `job` begin with."""
    return b"job/" + job + b"/"


def name_order(name: bytes) -> list[Any]:
    """Return what names are sorted by: `node-2` comes before `node-10`, whatever the length of the numbers."""
    parts = _DIGITS.split(name)
    return [(len(part.lstrip(b"0")), part.lstrip(b"0")) if index % 2 else part for index, part in enumerate(parts)]


class Settling(Timed):
    """The time in which a round waits for more than the least number of members, or for lost ones to come back."""

    __slots__ = ("_job",)

    def __init__(self, job: Job, deadline: float) -> None:
        super().__init__(job.namespace, deadline)
        self._job = job

    def fire(self, now: float) -> None:
        """No other member came."""
        self._job.settled(now)


class Namesakes:
    """Joins under the name of a member that lives, first come first served; satisfies `waiters.WaitPlace`."""

    __slots__ = ("_job", "_name", "requests")

    def __init__(self, job: Job, name: bytes) -> None:
        self._job = job
        self._name = name
        self.requests: dict[Waiter, tuple[Any, ...]] = {}

    def add(self, waiter: Waiter) -> None:
        """Let a request wait, which is still to be noted."""
        self.requests[waiter] = ()
        waiter.waits_in = self

    def discard(self, waiter: Waiter) -> None:
        """Forget one."""
        del self.requests[waiter]
        waiter.waits_in = None
        if not self.requests:
            del self._job.namesakes[self._name]

    def give_up(self, waiter: Waiter) -> None:
        """Nothing: it was no member."""

    def missing(self) -> list[bytes]:
        """Return the name."""
        return [self._name]

    def explain(self) -> str:
        """Return whose the name is."""
        return self._job.tell_holder(self._name)


class Job:
    """The members of one job, and the round that is being formed; satisfies `waiters.WaitPlace`."""

    __slots__ = (
        "_settling",
        "_state",
        "absent",
        "epoch",
        "leases",
        "least",
        "most",
        "name",
        "names_bytes",
        "namesakes",
        "namespace",
        "prefix",
        "ranks",
        "settle_s",
        "waiting",
    )

    def __init__(self, state: StoreState, namespace: Namespace, name: bytes) -> None:
        self._state = state
        self.namespace = namespace
        self.name = name
        self.prefix = prefix_of(name)
        self.least = self.most = 0
        self.settle_s = 0.0
        self.epoch = 0
        self.names_bytes = 0  # of `leases`, as a message has them
        self.ranks: dict[bytes, int] = {}  # of those members of the last round that live
        self.absent: set[bytes] = set()  # those of them that do not wait: to look for one at each join takes long
        self.leases: dict[bytes, Lease] = {}  # of everyone who came and has not gone
        self.waiting: dict[bytes, Waiter] = {}  # for the next round, in the order they came
        self.namesakes: dict[bytes, Namesakes] = {}  # by name, the clients that wait for it
        self._settling: Settling | None = None
        self._recall()

    def _recall(self) -> None:
        """Take up what the keys say, after the store came back with them. Anybody may have written them."""
        values, leased = self.namespace.values, self.namespace.leased
        try:
            epoch, names = msgpack.unpackb(values.get(self.prefix + b"epoch", b""))
        except (ValueError, TypeError):
            return
        if type(epoch) is not int or type(names) is not list or not 0 <= epoch <= MAX_EPOCH:
            return
        self.epoch = epoch
        start = self.prefix + b"members/"
        hold = self.namespace.holds.get(self.prefix)
        holders = () if hold is None else hold.leases  # as every member's lease is one
        ranks = {name: rank for rank, name in enumerate(names) if type(name) is bytes}
        for key in [key for key in self.namespace.keys_under(start) if leased.get(key) in holders]:
            name = key[len(start) :]
            self._take_in(name, leased[key])
            if name in ranks:
                self.ranks[name] = ranks[name]
                self.absent.add(name)

    # ---- what waiters need of the place they wait in

    def add(self, waiter: Waiter) -> None:
        """Let a member wait for the next round."""
        assert type(waiter.argument) is bytes
        self.waiting[waiter.argument] = waiter
        self.absent.discard(waiter.argument)
        waiter.waits_in = self

    def discard(self, waiter: Waiter) -> None:
        """Count a member as not waiting: its connection broke, or it gets its answer."""
        assert type(waiter.argument) is bytes
        del self.waiting[waiter.argument]
        waiter.waits_in = None
        if waiter.argument in self.ranks:
            self.absent.add(waiter.argument)
        if len(self.waiting) < self.least or waiter.argument in self.ranks:
            self._stop_settling()

    def give_up(self, waiter: Waiter) -> None:
        """A member whose join was cancelled or timed out has left."""
        assert type(waiter.argument) is bytes
        lease = self.leases.get(waiter.argument)
        if lease is not None:
            self.lose(lease, EVENT_DELETE, self._state.now)

    def missing(self) -> list[bytes]:
        """Return who the round waits for: living members of the last one, else how many."""
        absent = [name for name in self.ranks if name not in self.waiting]
        return absent or [b"%d more members" % max(self.least - len(self.waiting), 1)]

    def explain(self) -> str:
        """Return nothing: `missing` says it."""
        return ""

    # ---- coming and going

    def join(self, client: Client, request: tuple[Any, ...], lease: Lease, now: float) -> Reply | None:
        """Let a member wait for the next round, and complete that if it was the one missing."""
        name = request[3]
        if self.leases.get(name, lease) is not lease:
            return self._wait_for_name(client, request, lease, now)
        if refusal := self._enter(request, lease):
            return refusal
        reply = self._state.block(client, request[0], JOIN, (self.name,), 0, request[-1], now, self, name)
        if reply is not None:
            self.lose(lease, EVENT_DELETE, now)
            return reply
        self.advance(now)
        return None

    def _enter(self, request: tuple[Any, ...], lease: Lease, always: bool = False) -> Reply | None:
        """Make a member of the client that asks, if it is none yet; returns why not.

        With `always` no full store is a reason.
        """
        state = self._state
        request_id, _, _, name, least, most, settle_ms, _, _ = request
        if not self.leases:
            self.least, self.most = least, most
        if why := self._objection(name, least, most, lease):
            return request_id, INVALID, why
        self.settle_s = settle_ms / 1000
        key = self.prefix + b"members/" + name
        if name not in self.leases:
            if refused := self._refuse_name(name):
                return request_id, LIMIT, refused
            if refused := state.put(self.namespace, key, b"%d" % lease.lease_id, always=always):
                return request_id, LIMIT, refused
            if refused := state.leases.hold(lease, self.prefix, JOB_LINGER_S):
                state.remove(self.namespace, key)
                return request_id, LIMIT, refused
            state.leases.attach(lease, key)
            self._take_in(name, lease)
        self._own_hold()
        return None

    def _own_hold(self) -> None:
        """Have the job end with the hold of its prefix."""
        hold = self.namespace.holds[self.prefix]
        if hold.job is not self:
            hold.job = self
            hold.changed()

    # ---- names that are taken

    def _wait_for_name(self, client: Client, request: tuple[Any, ...], lease: Lease, now: float) -> Reply | None:
        """Let a request wait until the member of that name has gone; one whose connection is lost goes at once."""
        request_id, _, _, name, least, most, _, _, timeout_ms = request
        holder = self.leases[name]
        if len(self.leases) > 1 and (why := self._objection(name, least, most, lease)):
            return request_id, INVALID, why
        self._own_hold()
        line = self.namesakes.setdefault(name, Namesakes(self, name))
        reply = self._state.block(client, request_id, JOIN, (self.name,), 0, timeout_ms, now, line, name)
        if reply is None:
            line.requests[client.blocked[request_id]] = request
            if holder.deserted:
                self._state.leases.end(holder, EVENT_EXPIRE, now)
            return None
        if not line.requests:
            del self.namesakes[name]
        return (request_id, TIMEOUT, self.tell_holder(name)) if reply[1] == TIMEOUT else reply

    def _admit_namesake(self, name: bytes) -> None:
        """Let the first in that waits for a name which is free now."""
        while name not in self.leases and (line := self.namesakes.get(name)) is not None:
            waiter, request = next(iter(line.requests.items()))
            lease = self.namespace.leases.get(request[7])
            refusal: Reply | None = (request[0], LEASE_LOST, "there is no such lease (any more)")
            if lease is not None:
                refusal = self._enter(request, lease, always=True)  # it takes the room that another left
            if refusal is not None:
                self._state.finish(waiter, refusal)
                continue
            line.discard(waiter)
            self.add(waiter)

    def tell_holder(self, name: bytes) -> str:
        """Return which process has `name`, since when, and what to do about it."""
        lease = self.leases[name]
        clients = self._state.every_client()
        told = [part for each in clients if each.identity == lease.owner for part in (each.name, each.address) if part]
        where = f" ({', '.join(told)})" if told else ""
        return (
            f"another process{where} is the member {shown(name)}, for {self._state.now - lease.since:.0f} s by now; "
            "take another name, or take that member out with `expel`"
        )

    def _take_in(self, name: bytes, lease: Lease) -> None:
        self.leases[name] = lease
        lease.jobs[self] = name
        self.names_bytes += len(name) + NAME_OVERHEAD_BYTES

    def _refuse_name(self, name: bytes) -> str:
        """Return why there is no room for one more name in what all members are told."""
        names_bytes = self.names_bytes + len(name) + NAME_OVERHEAD_BYTES
        allowed = min(MAX_NAMES_BYTES, self._state.reply_bytes)
        if names_bytes <= allowed:
            return ""
        return f"the names of its members have {names_bytes} bytes, allowed are {allowed}"

    def _objection(self, name: bytes, least: int, most: int, lease: Lease) -> str:
        who = shown(name)
        if self.least == 0:
            self.least, self.most = least, most  # recalled from keys, which do not say
        if (least, most) != (self.least, self.most):
            return f"the job has {self.least} to {self.most} members, {who} expects {least} to {most}"
        if lease.jobs.get(self, name) != name:
            return f"{who} joins with the lease of the member {shown(lease.jobs[self])}"
        waits = name in self.waiting and self.leases[name] is lease
        return f"{who} waits for the next round already" if waits else ""

    def lose(self, lease: Lease, kind: int, now: float) -> None:
        """Take out the member that `lease` stands for; `kind` says whether it left or was lost."""
        state = self._state
        name = lease.jobs.pop(self)
        del self.leases[name]
        self.names_bytes -= len(name) + NAME_OVERHEAD_BYTES
        self.ranks.pop(name, None)
        self.absent.discard(name)
        if name in self.waiting:
            waiter = self.waiting[name]
            outcome = (CANCELLED, "it left") if kind == EVENT_DELETE else (LEASE_LOST, "the lease has expired")
            state.finish(waiter, (waiter.request_id, *outcome))
        state.remove(self.namespace, self.prefix + b"members/" + name, kind)
        hold = self.namespace.holds.get(self.prefix)
        if hold is not None and lease.holds.pop(hold, 0) is None:
            hold.release(lease, now)
        self._admit_namesake(name)
        self.advance(now)

    def end(self) -> None:
        """Forget the job; its keys go too."""
        self._stop_settling()
        for lease in self.leases.values():
            lease.jobs.pop(self, None)
        self._state.recorder.history(self.namespace, self.prefix + b"members/").pinned = False
        self._state.memory_bytes -= JOB_BYTES
        del self.namespace.jobs[self.name]

    # ---- rounds

    def advance(self, now: float) -> None:
        """Complete the round, or begin or stop waiting for more members, as things are now."""
        waiting = len(self.waiting)
        if waiting < self.least or self.absent:
            self._stop_settling()
            absent = (self.leases[name] for name in self.absent)
            if waiting >= self.least and all(lease.deserted for lease in absent):
                lost_at = max(self.leases[name].deserted_at for name in self.absent)
                self._settle_until(max(now, lost_at + AWAY_S))
        elif waiting >= self.most or not self.settle_s:
            self.complete()
        elif self._settling is None:
            self._settle_until(now + self.settle_s)

    def _settle_until(self, deadline: float) -> None:
        self._settling = Settling(self, deadline)
        self._state.timers.arm(self._settling)

    def settled(self, now: float) -> None:
        """No other member came; those that were waited for are lost unless their connections are there again."""
        self._stop_settling()
        lost = [lease for lease in map(self.leases.__getitem__, sorted(self.absent)) if lease.deserted]
        for lease in lost:
            self._state.leases.end(lease, EVENT_EXPIRE, now)
        if not lost and not self.absent:
            self.complete()

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._state.timers.end(self._settling)
            self._settling = None

    def complete(self) -> None:
        """Begin the next epoch with those who wait; spare ones go on waiting."""
        self._stop_settling()
        state = self._state
        old = sorted((name for name in self.waiting if name in self.ranks), key=self.ranks.__getitem__)
        new = [name for name in self.waiting if name not in self.ranks][: self.most - len(old)]
        members = Names(old + sorted(new, key=name_order))
        self.epoch += 1
        self.ranks = {name: rank for rank, name in enumerate(members)}
        # Even if the store is full: an epoch that is not among the keys would be given again after a restart.
        state.put(self.namespace, self.prefix + b"epoch", msgpack.packb((self.epoch, members)), always=True)
        for rank, name in enumerate(members):
            waiter = self.waiting[name]
            state.finish(waiter, (waiter.request_id, OK, (self.epoch, rank, members, state.revision)))


def find_job(state: StoreState, namespace: Namespace, name: bytes) -> Job | str:
    """Return the job of that name, which begins now if there is none, or why it may not."""
    job = namespace.jobs.get(name)
    if job is None:
        members = prefix_of(name) + b"members/"
        if refused := state.refuse_key(members) or state.refuse_growth(JOB_BYTES + state.recorder.cost(members)):
            return refused
        job = namespace.jobs[name] = Job(state, namespace, name)
        state.memory_bytes += JOB_BYTES
        # One that is there already is not seen by that: the journal would have to be told.
        (namespace.histories.get(members) or state.recorder.history(namespace, members)).pinned = True
    return job
