"""The store itself: a state machine without socket, clock or loop.

    engine = StoreEngine(incarnation, Limits())
    client = engine.open("job-1", deliver)                     # deliver(reply) is called for blocked requests, later
    engine.request(client, (1, SET, b"key", b"value"), now)    # (1, OK, None)
    engine.request(client, (2, GET, b"other", None), now)      # None: blocked; deliver((2, OK, value)) comes later
    engine.request(client, (3, CANCEL, 2), now)                # deliver((2, CANCELLED, ...)), returns (3, OK, True)
    engine.next_deadline(), engine.expire(now)                 # the caller's timer, for time-outs
    engine.close(client, now)                                  # withdraws what it still waits for

Requests, replies and what each operation means are those of `messages`; requests are tuples (id, operation,
arguments...). `now` is any clock that never goes back, in seconds. A request that breaks the contract (wrong shape or
types) raises `ProtocolError` and changes nothing; one that exceeds a limit or makes no sense gets an error reply and
changes nothing. Every change is complete when `request` returns: `deliver` of other clients is called from inside, and
must not call the engine. Where a key wakes a great many, what most of them are answered is decided then, and `expire`,
which is due at once, delivers it. All calls come from one thread.

A client that retries after losing its connection opens with its `client_id` and the ids it will retry; whoever
carries its bytes calls `frames_sent` and `acknowledge`, as `messages` says. In-process callers leave the id out and
need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from asyncdist_server.engine.changes import ChangeLog
from asyncdist_server.engine.clients import Client, Reply
from asyncdist_server.engine.coordination import COORDINATION
from asyncdist_server.engine.counters import DISCONNECTED, REPLAYED, Counters
from asyncdist_server.engine.leases import STALL_S
from asyncdist_server.engine.namespace import Namespace, Share
from asyncdist_server.engine.operations import OPERATIONS, Request, malformed
from asyncdist_server.engine.state import StoreState
from asyncdist_server.engine.timers import in_whole_ms, left_s
from asyncdist_server.wire.messages import (
    CLIENT_LINGER_S,
    INVALID,
    LIMIT,
    MAX_REQUEST_ID,
    MUTATIONS,
    REFUSED,
    HelloRefused,
    Limits,
    ProtocolError,
)

__all__ = ["Client", "Reply", "Request", "StoreEngine"]


def _deliver_to_nobody(reply: Reply) -> None:
    """Stand for the connection of a client that has none."""


class StoreEngine:
    """All namespaces, clients and blocked requests of one store; see the module's docstring for how it is driven."""

    def __init__(self, incarnation: bytes, limits: Limits | None = None, first_revision: int = 0) -> None:
        self.incarnation = incarnation
        self.limits = limits or Limits()
        self._state = StoreState(self.limits, first_revision)
        self._state.describe = self.status
        self._state.every_client = self.all_clients
        self.share_of: Callable[[str], Share | None] = lambda name: None
        """Says which share of the memory a namespace of that name has a part of. To be set before there are any."""
        self.describe_server: Callable[[], dict[str, Any]] = dict
        self._state.namespaces = self._namespaces = dict[str, Namespace]()
        self._changes: ChangeLog | None = None
        self._connected: dict[bytes, Client] = {}
        self._away: dict[bytes, tuple[float, Client]] = {}  # in the order they are to be forgotten
        operations = {**OPERATIONS, **COORDINATION}
        self.counters = self._state.counters = Counters(operations)
        # Entries are (function, length of the request, whether its reply must be remembered for a retry, its results).
        self._operations = {
            code: (run, size, code in MUTATIONS, self.counters.results[code])
            for code, (run, size) in operations.items()
        }

    def tell_time(self, clock: Callable[[], float]) -> None:
        """Have leases begin at what `clock` says where that is later than the `now` of a call.

        For callers that take `now` from an event loop, where it is the time at which a turn began.
        """
        self._state.clock = clock

    @property
    def memory_bytes(self) -> int:
        """Bytes charged for keys, values, queues, blocked requests and remembered replies."""
        return self._state.memory_bytes

    @property
    def state(self) -> StoreState:
        """What the operations share; for the journal and for what brings a store back from it."""
        return self._state

    @property
    def namespaces(self) -> Mapping[str, Namespace]:
        """All namespaces that hold something or have a client, by name."""
        return self._namespaces

    @property
    def waiter_count(self) -> int:
        """Blocked requests of all clients."""
        return self._state.waiter_count

    # ---- clients

    def open(
        self,
        namespace: str,
        deliver: Callable[[Reply], None],
        *,
        client_id: bytes | None = None,
        pending: tuple[int, ...] = (),
        on_superseded: Callable[[], None] | None = None,
        now: float = 0.0,
    ) -> Client:
        """Return a handle for a client of `namespace`.

        With a `client_id`, replies to mutations are remembered for retries; if that client was here before,
        `Client.resumed` is true and those of `pending` are kept. An older connection of it is closed first and
        `on_superseded` called. Raises `HelloRefused` if the id belongs to a client of another namespace.
        """
        before: Client | None = None
        if client_id is not None:
            before = self.client(client_id)
            if before is not None and before.namespace.name != namespace:
                raise HelloRefused(REFUSED, "this client id belongs to a client of another namespace")
        home = self._namespaces.get(namespace)
        if home is None:
            home = self._new_namespace(namespace)
        home.clients += 1
        client = Client(home, client_id, deliver, on_superseded, self.limits)
        self._state.clients[client] = None
        if client_id is None:
            return client
        if before is not None:
            if client_id in self._connected:
                tell = before.on_superseded  # closing lets go of it
                self.close(before, now)
                if tell is not None:
                    tell()
            replay = before.replies_to_resume(pending)
            self._forget(client_id)
            self._state.remember(client.resume(replay, before.taken))
        self._connected[client_id] = client
        if home.changes is not None and self._changes is not None:
            client.changes = self._changes
            self._changes.client_came(client_id, namespace)
            if before is not None:
                client.keep_items(before.taken)
        if home.bound:
            self._state.leases.client_came(client)
        return client

    def _new_namespace(self, name: str) -> Namespace:
        home = self._namespaces[name] = Namespace(name, self.share_of(name))
        if self._changes is not None:
            home.changes = self._changes.of(name)
        return home

    def close(self, client: Client, now: float) -> None:
        """Withdraw what `client` waits for, without replies. Unless it said goodbye it may come back for a while.

        A second call does nothing.
        """
        if client.closed:
            return
        self.frames_sent(client, 0)  # what it was not sent may stay for long: it is charged from now on
        client.closed = True
        # A client that is remembered must not keep its connection alive, with all that it has read and not run.
        client.deliver, client.on_superseded = _deliver_to_nobody, None
        self._state.now = now
        del self._state.clients[client]
        for waiter in list(client.blocked.values()):
            self._state.unblock(waiter)
            self.counters.finished(waiter.operation, DISCONNECTED, now - waiter.since)
        if client.namespace.bound:
            self._state.leases.client_went(client, client.leaving or client.client_id is None, now)
        client.namespace.clients -= 1
        if client.client_id is not None and self._connected.get(client.client_id) is client:
            del self._connected[client.client_id]
            while len(self._away) >= self.limits.connections:
                self.give_up(next(iter(self._away)))
            self._away[client.client_id] = (now + CLIENT_LINGER_S, client)
            if client.leaving:
                self.give_up(client.client_id)
        self._drop_unused(client.namespace)

    def client(self, client_id: bytes) -> Client | None:
        """Return the client of that id, connected or away, None if it is not known."""
        found = self._connected.get(client_id)
        if found is None and client_id in self._away:
            found = self._away[client_id][1]
        return found

    def note_changes(self, changes: ChangeLog) -> None:
        """Note from now on in `changes` what changes. To be called before the first client comes."""
        self._changes = changes
        for namespace in self._namespaces.values():
            namespace.changes = changes.of(namespace.name)

    def restore_namespace(self, name: str) -> Namespace:
        """Return the namespace of that name, to be filled with what a journal says."""
        return self._namespaces.get(name) or self._new_namespace(name)

    def restore_client(
        self,
        client_id: bytes,
        namespace: str,
        replies: dict[int, Reply],
        taken: dict[int, bytes],
        since: float,
        now: float,
    ) -> None:
        """Remember a client from before a restart as if it had gone when the store was `since` seconds old.

        `replies` are those that it may ask for again; `taken` says from which queues they took items that it is not
        known to have. Those gone for longest come first.
        """
        home = self._namespaces.get(namespace) or Namespace(namespace)
        client = Client(home, client_id, _deliver_to_nobody, None, self.limits)
        client.closed = True
        client.idle_since = since
        client.changes = self._changes
        # A client's requests get items of a queue in the order of their ids; the journal may have told it otherwise.
        self._state.remember(client.resume(replies, {number: (taken[number], True) for number in sorted(taken)}))
        self._away[client_id] = (now + left_s(CLIENT_LINGER_S, since, self._state.age_at(now)), client)

    def give_up(self, client_id: bytes) -> None:
        """Forget a client that does not come back. Items that it is not known to have are put back where they were."""
        _, client = self._away[client_id]
        items = client.unacknowledged_items()
        self._forget(client_id)
        if items:
            if self._changes is not None:
                self._changes.let_go(client_id, client.taken)
            home = self._namespaces.get(client.namespace.name) or self._new_namespace(client.namespace.name)
            for key, item in reversed(items):
                self._state.enqueue(home, key, item, at_head=True)

    def _forget(self, client_id: bytes) -> None:
        _, client = self._away.pop(client_id)
        self._state.remember(-client.remembered_bytes)
        if self._changes is not None:
            self._changes.client_forgotten(client_id)

    def acknowledge(self, client: Client, received: int) -> None:
        """Note that `client` has read its first `received` reply frames; `ProtocolError` if that cannot be."""
        freed = client.acknowledge(received)
        if freed:
            self._state.remember(-freed)

    def frames_sent(self, client: Client, count: int, all_of_them: bool = True) -> None:
        """Note that `count` frames of replies were given to `client`, and whether all replies so far are in frames."""
        if not client.closed:
            grown = client.frames_sent(count, all_of_them)
            if grown:
                self._state.remember(grown)

    def _drop_unused(self, namespace: Namespace) -> None:
        if namespace.unused and self._namespaces.get(namespace.name) is namespace:
            del self._namespaces[namespace.name]
            if self._changes is not None:
                self._changes.namespace_dropped(namespace.name)

    def clear(
        self,
        namespace: str,
        prefixes: list[bytes] | None = None,
        accept: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Remove all keys and queues of `namespace`, or those that `StoreState.clear` says. Wakes no client."""
        home = self._namespaces.get(namespace)
        if home is not None:
            self._state.clear(home, prefixes, accept)
            self._drop_unused(home)

    # ---- requests

    def request(self, client: Client, request: Request, now: float) -> Reply | None:
        """Run one request and return its reply, or None if it is blocked. Raises `ProtocolError`."""
        if type(request) is not tuple or len(request) < 2:
            raise ProtocolError("a request must be an array of an id, an operation and its arguments")
        request_id, operation = request[0], request[1]
        if type(request_id) is not int or not 0 < request_id <= MAX_REQUEST_ID:
            raise ProtocolError("a request id must be an integer in 1..2**63-1")
        try:
            run, size, remember, results = self._operations[operation]
        except (KeyError, TypeError):
            raise ProtocolError("unknown operation") from None
        if type(operation) is not int:  # what compares equal to one
            raise ProtocolError("unknown operation")
        if len(request) != size:
            raise malformed(request)
        if remember and client.read_only:
            results[INVALID] += 1
            return request_id, INVALID, f"clients like this one may only read the namespace {client.namespace.name}"
        self._state.now = now
        if client.must_look_up and remember:
            reply, freed = client.take_replay(request_id)
            self._state.remember(-freed)
            if reply is not None:
                results[REPLAYED] += 1
                return reply
            if client.remembered > self.limits.in_flight:
                results[LIMIT] += 1
                return request_id, LIMIT, f"more than {self.limits.in_flight} replies were not acknowledged"
        reply = run(self._state, client, request, now)
        if reply is not None:
            results[reply[1]] += 1
            if remember and client.unsent is not None:
                client.note_reply(reply)
        return reply

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next, in whole milliseconds; None if nothing is due ever."""
        if self._state.woken:
            return self._state.now
        deadlines, timers = self._state.deadlines, self._state.timers
        soonest = deadlines.next() if deadlines.heap else None
        if timers.heap:
            timed = timers.next()
            if timed is not None and (soonest is None or timed < soonest):
                soonest = timed
        if self._away:
            forget_at = next(iter(self._away.values()))[0]
            if soonest is None or forget_at < soonest:
                soonest = forget_at
        return None if soonest is None else in_whole_ms(soonest)

    def expire(self, now: float, late_s: float = 0.0) -> None:
        """Answer the blocked requests whose time is over with TIMEOUT, end leases, forget clients that stayed away.

        `late_s` is by how much the call comes later than it was asked for. If that is long, the caller was stopped, and
        a client that kept a lease alive meanwhile, or came back, gets a chance to be heard.
        """
        self._state.now = now
        self._state.wake_more()
        if late_s > STALL_S:
            self._spare(late_s, now)
        while (timed := self._state.timers.take_due(now)) is not None:
            timed.fire(now)
            self._drop_unused(timed.namespace)
        for namespace in self._state.leases.clear_ended():
            self._drop_unused(namespace)
        self._state.expire(now)
        while self._away:
            client_id, (forget_at, _) = next(iter(self._away.items()))
            if forget_at > now:
                break
            self.give_up(client_id)

    def _spare(self, late_s: float, now: float) -> None:
        self._state.age_offset_s -= late_s  # no client was served meanwhile
        for namespace in self._namespaces.values():
            self._state.leases.spare(namespace, late_s, now)
        self._state.recorder.spare(late_s, now)
        least = now + min(late_s, CLIENT_LINGER_S)
        self._away = {who: (max(forget_at, least), client) for who, (forget_at, client) in self._away.items()}

    def renew_leases(self, now: float) -> None:
        """Give every lease its time again, after the store was away and has come back with its state."""
        for namespace in self._namespaces.values():
            self._state.leases.renew_all(namespace, now)

    def all_clients(self) -> Iterator[Client]:
        """Give the clients that are connected, then those that are away for a while; to be looked at only."""
        yield from self._state.clients
        for _, client in self._away.values():
            yield client

    def status(self) -> dict[str, Any]:
        """Return what STATUS answers: how much the store holds, and what the server around it has to say."""
        return {
            "incarnation": self.incarnation.hex(),
            **self.statistics(),
            "memory_limit_bytes": self.limits.memory_bytes,
            **self.describe_server(),
        }

    def statistics(self) -> dict[str, int]:
        """Return how much the store holds at this moment."""
        return {
            "namespaces": len(self._namespaces),
            "keys": sum(len(namespace.values) for namespace in self._namespaces.values()),
            "queues": sum(len(namespace.queues) for namespace in self._namespaces.values()),
            "clients": sum(namespace.clients for namespace in self._namespaces.values()),
            "clients_away": len(self._away),
            "waiters": self.waiter_count,
            "leases": self._state.leases.count,
            "memory_bytes": self.memory_bytes,
        }
