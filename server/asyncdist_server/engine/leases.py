"""Leases: keys and holds that live as long as a client keeps a lease alive. No clock and no I/O, times are passed in.

A lease ends `ttl_s` after it was last kept alive, or, if it is bound to a connection, `ttl_s` after its client was
lost without coming back; a goodbye ends it at once. With it go the keys set under it, the locks held under it and the
job memberships it stands for. Prefixes it holds go `linger_s` after the last lease that holds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncdist_server.engine.timers import Timed, left_s
from asyncdist_server.wire.messages import EVENT_DELETE, EVENT_EXPIRE, MAX_LEASES

if TYPE_CHECKING:
    from asyncdist_server.engine.clients import Client
    from asyncdist_server.engine.membership import Job
    from asyncdist_server.engine.namespace import Namespace
    from asyncdist_server.engine.state import StoreState

LEASE_BYTES: Final = 900
"""What a lease costs: the object, its table of keys, its entries in tables and heap (measured)."""
LEASED_KEY_BYTES: Final = 150
"""What binding a key to a lease costs: its entries in two tables."""
HOLD_BYTES: Final = 700
"""What holding a prefix costs besides the prefix."""
RETURN_S: Final = 5.0
"""Least time of a lease bound to a connection when the daemon has come back. Its client was not gone, and tries to
connect again every two seconds at most."""
STALL_S: Final = 0.5
"""A timer that is later than this means that the daemon was stopped, or its host was: what its clients said meanwhile
has arrived and was not read. Clients renew a lease three times in its time, so that shorter stalls do no harm."""


class Lease(Timed):
    """A lease. Its deadline is None while it is bound to a connection that is there."""

    __slots__ = ("_state", "holds", "idle_since", "jobs", "keys", "lease_id", "owner", "since", "ttl_s")

    def __init__(
        self, state: StoreState, namespace: Namespace, lease_id: int, ttl_s: float, owner: bytes | Client | None
    ) -> None:
        super().__init__(namespace)
        self._state = state
        self.lease_id = lease_id
        self.ttl_s = ttl_s
        self.owner = owner  # None: a lease by time only
        self.since = state.now
        self.keys: dict[bytes, None] = {}
        self.holds: dict[Hold, None] = {}
        self.jobs: dict[Job, bytes] = {}
        # How old the store was when a daemon came back that nobody has told since that the lease is needed; else None.
        self.idle_since: float | None = None

    @property
    def deserted(self) -> bool:
        """Whether the connection that it is bound to was there since the daemon began, and is lost."""
        return self.owner is not None and self.deadline is not None and self.idle_since is None

    @property
    def deserted_at(self) -> float:
        """When that connection was lost; 0.0 unless it is."""
        return 0.0 if self.deadline is None else self.deadline - self.ttl_s

    def postpone(self, now: float) -> None:
        """Let the lease end `ttl_s` after `now`, which may be a while ago where there is a clock that knows better."""
        clock = self._state.clock
        if clock is not None:
            now = max(now, clock())
        self._end_after(self.ttl_s, now)

    def resume(self, now: float) -> None:
        """Let the lease end after what is left of its time, now that the daemon is back."""
        state = self._state
        if state.clock is not None:
            now = max(now, state.clock())
        time_s = self.ttl_s if self.owner is None else max(self.ttl_s, RETURN_S)
        self._end_after(time_s if self.idle_since is None else left_s(time_s, self.idle_since, state.age_at(now)), now)

    def _end_after(self, time_s: float, now: float) -> None:
        self.deadline = now + time_s
        self._state.timers.arm(self)

    def vouched(self) -> None:
        """Note that a client keeps the lease alive, for the journal if the journal does not know."""
        if self.idle_since is not None:
            self.idle_since = None
            if self.namespace.changes is not None:
                self.namespace.changes.lease(self.lease_id)

    def fire(self, now: float) -> None:
        """No client kept the lease alive in time."""
        self._state.leases.end(self, EVENT_EXPIRE, now)


class Hold(Timed):
    """A prefix whose keys go when no lease holds it any more."""

    __slots__ = ("_state", "idle_since", "job", "leases", "linger_s", "prefix")

    def __init__(self, state: StoreState, namespace: Namespace, prefix: bytes) -> None:
        super().__init__(namespace)
        self._state = state
        self.prefix = prefix
        self.leases: set[Lease] = set()
        self.linger_s = 0.0
        self.job: Job | None = None  # the job that ends with it
        self.idle_since: float | None = None  # as of a lease, of a prefix that no lease held even then

    def release(self, lease: Lease, now: float) -> None:
        """Note that `lease` no longer holds the prefix."""
        self.leases.discard(lease)
        self.changed_for(lease)
        if not self.leases:
            self.linger(now)

    def linger(self, now: float) -> None:
        """Let the prefix go when its time to linger is over, from `now` on or from before a restart."""
        since = self.idle_since
        left = self.linger_s if since is None else left_s(self.linger_s, since, self._state.age_at(now))
        self.deadline = now + left
        self._state.timers.arm(self)

    def changed(self) -> None:
        """Note for the journal that something here is not as it was, but for who holds it."""
        if self.namespace.changes is not None:
            self.namespace.changes.hold(self.prefix)

    def changed_for(self, lease: Lease) -> None:
        """Note for the journal that `lease` holds the prefix now, or no longer."""
        if self.namespace.changes is not None:
            self.namespace.changes.holder(self.prefix, lease.lease_id)

    def fire(self, now: float) -> None:
        """No lease holds the prefix again: have `Leases.clear_ended` remove everything under the prefix."""
        state = self._state
        state.timers.end(self)
        del self.namespace.holds[self.prefix]
        self.changed()
        state.memory_bytes -= HOLD_BYTES + len(self.prefix)
        if self.job is not None:
            self.job.end()
        state.leases.ended_prefixes.setdefault(self.namespace, []).append(self.prefix)


class Leases:
    """The leases and holds of all namespaces of a store. A method that can be refused returns why, or an empty text."""

    __slots__ = ("_state", "count", "ended_prefixes")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.count = 0
        self.ended_prefixes: dict[Namespace, list[bytes]] = {}  # whose keys are still there

    def grant(self, client: Client, lease_id: int, ttl_s: float, bound: bool, now: float) -> str:
        """Make a lease; one that is `bound` lives as long as the connection of `client`, and `ttl_s` beyond."""
        namespace = client.namespace
        if self.count >= MAX_LEASES:
            return f"there are {self.count} leases, allowed are {MAX_LEASES}"
        if refused := self._state.refuse_growth(LEASE_BYTES):
            return refused
        lease = Lease(self._state, namespace, lease_id, ttl_s, client.identity if bound else None)
        self._state.memory_bytes += LEASE_BYTES
        self.count += 1
        namespace.leases[lease_id] = lease
        if bound:
            namespace.bound.setdefault(client.identity, {})[lease] = None
        else:
            lease.postpone(now)
        if namespace.changes is not None:
            namespace.changes.lease(lease_id)
        return ""

    def client_came(self, client: Client) -> None:
        """Stop the clocks of the leases bound to a client that is there again."""
        for lease in client.namespace.bound.get(client.identity, ()):
            lease.deadline = None
            lease.vouched()

    def client_went(self, client: Client, for_good: bool, now: float) -> None:
        """Start the clocks of the leases bound to `client`, or end them if it cannot come back."""
        for lease in list(client.namespace.bound.get(client.identity, ())):
            if for_good:
                self.end(lease, EVENT_DELETE, now)
            else:
                lease.postpone(now)
                if any(name in job.namesakes for job, name in lease.jobs.items()):
                    self.end(lease, EVENT_EXPIRE, now)
                for job in list(lease.jobs):
                    job.advance(now)

    def renew_all(self, namespace: Namespace, now: float) -> None:
        """Give every lease its full time again: the daemon was away, not those who vouch for them.

        A lease that was not kept alive since an earlier restart only has what was left of it.
        """
        for lease in namespace.leases.values():
            lease.resume(now)

    def spare(self, namespace: Namespace, late_s: float, now: float) -> None:
        """Let nothing end for as long as the daemon did not run, up to its own time: it may have been kept alive."""
        for lease in namespace.leases.values():
            if lease.deadline is not None:
                lease.deadline = max(lease.deadline, now + min(late_s, lease.ttl_s))
        for hold in namespace.holds.values():
            if hold.deadline is not None:
                hold.deadline = max(hold.deadline, now + min(late_s, hold.linger_s))

    def attach(self, lease: Lease, key: bytes) -> None:
        """Bind a key that exists to `lease`, instead of another one."""
        leased = lease.namespace.leased
        self.detach(lease.namespace, key)
        leased[key] = lease
        lease.keys[key] = None
        if lease.namespace.changes is not None:
            lease.namespace.changes.key(key)
        self._state.memory_bytes += LEASED_KEY_BYTES

    def detach(self, namespace: Namespace, key: bytes) -> None:
        """Make `key` one that no lease ends."""
        lease = namespace.leased.pop(key, None)
        if lease is not None:
            del lease.keys[key]
            if namespace.changes is not None:
                namespace.changes.key(key)
            self._state.memory_bytes -= LEASED_KEY_BYTES

    def detach_all(self, namespace: Namespace, keys: list[bytes]) -> None:
        """Take those of `keys`, which are gone, from their leases."""
        leased = namespace.leased
        found = list(filter(leased.__contains__, keys))
        for key in found:
            del leased.pop(key).keys[key]
        self._state.memory_bytes -= LEASED_KEY_BYTES * len(found)

    def hold(self, lease: Lease, prefix: bytes, linger_s: float) -> str:
        """Let `lease` hold `prefix`; the longest time to linger that was asked for counts."""
        namespace = lease.namespace
        hold = namespace.holds.get(prefix)
        if hold is None:
            if refused := self._state.refuse_key(prefix) or self._state.refuse_growth(HOLD_BYTES + len(prefix)):
                return refused
            hold = namespace.holds[prefix] = Hold(self._state, namespace, prefix)
            self._state.memory_bytes += HOLD_BYTES + len(prefix)
            hold.changed()
        if linger_s > hold.linger_s:
            hold.linger_s = linger_s
            hold.changed()
        hold.leases.add(lease)
        hold.deadline = hold.idle_since = None
        lease.holds[hold] = None
        hold.changed_for(lease)
        return ""

    def clear_ended(self) -> list[Namespace]:
        """Remove everything under the prefixes that no lease holds again; returns the namespaces they were in.

        At most one look at each namespace, however many prefixes end: hundreds of jobs may, at the same moment.
        """
        ended, self.ended_prefixes = self.ended_prefixes, {}
        for namespace, prefixes in ended.items():
            self._state.clear(namespace, prefixes)
        return list(ended)

    def end(self, lease: Lease, kind: int, now: float) -> None:
        """End `lease` and all that hangs on it; `kind` is what watchers are told of its keys."""
        state, namespace = self._state, lease.namespace
        state.timers.end(lease)
        del namespace.leases[lease.lease_id]
        if namespace.changes is not None:
            namespace.changes.lease(lease.lease_id)
        self.count -= 1
        state.memory_bytes -= LEASE_BYTES
        if lease.owner is not None:
            bound = namespace.bound[lease.owner]
            del bound[lease]
            if not bound:
                del namespace.bound[lease.owner]
        for job in list(lease.jobs):
            job.lose(lease, kind, now)
        state.remove_all(namespace, list(lease.keys), kind)
        for hold in list(lease.holds):
            hold.release(lease, now)
