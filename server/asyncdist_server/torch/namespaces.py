"""What torch clients of one port share, and for how long: their namespace, its jobs, barriers and queues. No I/O.

torch expects a store that lives as long as its job. Here everything that the torch clients of a port have stored is
removed `linger_s` after the last of them left, and so is each job within it that says its name in its keys:

    /torch.rendezvous.<id> and /torch.rendezvous.<id>.<round>/...     the agents of `torchrun --rdzv-id <id>`
    /asyncdist.job.<id>/...                                           PrefixStore("asyncdist.job.<id>", store)

A client belongs to such a job once it has named one of its keys.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.leases import STALL_S
from asyncdist_server.engine.namespace import TORCH_PREFIX, Share
from asyncdist_server.engine.operations import parse_number
from asyncdist_server.engine.timers import in_whole_ms
from asyncdist_server.wire.messages import QUEUE_LEN, SET

if TYPE_CHECKING:
    from asyncdist_server.torch.session import TorchSession

CLAIM_S: Final = 1.0
"""How long a queue's item is kept for the client whose blocking pop it woke. The pop follows within a millisecond;
a client that only wanted to know whether the queue has something must not keep the item from others."""
TORCH_MEMORY_PERCENT: Final = 50
"""What torch's clients, who prove no token, may take of the store's memory: the rest is left to those who do."""
MAX_JOBS: Final = 16
"""Jobs that one connection may name. torchrun's agents name one; all are looked for among all keys when it ends."""

_JOB_KEY: Final = re.compile(rb"/(?:torch\.rendezvous\.|asyncdist\.job\.)[^/]*/?")
JOB_KEY_STARTS: Final = (b"/torch.rendezvous.", b"/asyncdist.job.")
"""What a key must begin with to name a job."""
_ROUND: Final = re.compile(rb"\.[0-9]+/\Z")


def job_of(key: bytes) -> bytes | None:
    """Return the job that `key` names, as it begins, or None.

    A rendezvous' state lies under its id, everything else of it under the id, the number of the round and a slash.
    """
    if not key.startswith(JOB_KEY_STARTS):
        return None
    match = _JOB_KEY.match(key)
    assert match is not None
    start = match[0]
    if not start.endswith(b"/"):
        return start if start.startswith(b"/torch.") else None
    return _ROUND.sub(b"", start).removesuffix(b"/") if start.startswith(b"/torch.") else start[:-1]


class Barrier:
    """Clients that wait for each other: the round under way of one key and size."""

    __slots__ = ("arrived", "key", "waiting", "world_size")

    def __init__(self, key: bytes, world_size: int) -> None:
        self.key = key
        self.world_size = world_size
        self.arrived = 0  # in this round, those who gave up since included
        self.waiting: dict[tuple[TorchSession, int], None] = {}


class TorchNamespace:
    """What the torch clients of one port share beyond keys and queues, which are the engine's.

    Barriers are not torch's counters: a round ends when `world_size` callers wait at the same moment, so that a key
    serves any number of rounds, and a client that gave up or died is not counted. The number of all arrivals is still
    to be read under the key, as torch's server has it, from the end of the round on.

    A blocking pop is two requests of torch, a wait and a pop. An item that ends a wait is kept for that client until
    its next request, at most `CLAIM_S`, so that no other client's pop can come between.
    """

    def __init__(self, namespaces: TorchNamespaces, name: str) -> None:
        self.engine = namespaces.engine
        self.name = name
        self._namespaces = namespaces
        self._members: dict[bytes, set[TorchSession]] = {}  # by job; the whole port is job b""
        self._barriers: dict[tuple[bytes, int], Barrier] = {}
        self._queue_waiters: dict[bytes, dict[tuple[TorchSession, int], None]] = {}
        self._claims: dict[bytes, dict[TorchSession, None]] = {}

    def take_input(self, grown_bytes: int) -> bool:
        """Note by how much the input grew that is not yet run; false if that is more than torch's clients may have."""
        self._namespaces.input_bytes += grown_bytes
        return self._namespaces.input_bytes <= self._namespaces.share.limit_bytes

    # ---- lifetime

    def enter(self, session: TorchSession, job: bytes = b"") -> None:
        """Count `session` as a client of the port, or of one job in it."""
        self._members.setdefault(job, set()).add(session)
        self._namespaces.keep(self, job)

    def leave(self, session: TorchSession, jobs: tuple[bytes, ...], now: float) -> None:
        """Take `session` out of all of its jobs; what one without clients stored is removed, after the linger time."""
        abandoned = []
        for job in jobs:
            members = self._members[job]
            members.discard(session)
            if not members:
                del self._members[job]
                abandoned.append(job)
        self._namespaces.abandon(self, abandoned, now)

    def remove(self, jobs: set[bytes]) -> None:
        """Remove what the clients of `jobs` stored."""
        if b"" in jobs:
            self.engine.clear(self.name)
        else:
            self.engine.clear(self.name, list(jobs), lambda key: job_of(key) in jobs)

    # ---- barriers

    def arrive(self, session: TorchSession, key: bytes, world_size: int, now: float) -> Barrier | None:
        """Return the barrier that `session` must wait for; None if it was the last, and all others go on now."""
        barrier = self._barriers.get((key, world_size))
        if barrier is None:
            barrier = self._barriers[key, world_size] = Barrier(key, world_size)
        barrier.arrived += 1
        if len(barrier.waiting) + 1 < world_size:
            return barrier
        del self._barriers[key, world_size]
        self._publish(session, barrier)
        for waiting, request_id in list(barrier.waiting):
            waiting.release(request_id, now)
        return None

    def give_up(self, session: TorchSession, request_id: int, barrier: Barrier) -> None:
        """Take `session`, which no longer waits, out of `barrier`."""
        barrier.waiting.pop((session, request_id), None)
        place = barrier.key, barrier.world_size
        if not barrier.waiting and self._barriers.get(place) is barrier:
            del self._barriers[place]
            self._publish(session, barrier)

    def _publish(self, session: TorchSession, barrier: Barrier) -> None:
        """Add the arrivals of a round that is over to the number under its key."""
        before = parse_number(session.client.namespace.values.get(barrier.key, b"0"))
        if before is not None:
            session.ask(SET, barrier.key, b"%d" % (before + barrier.arrived))

    # ---- queues

    def free_items(self, session: TorchSession, key: bytes) -> int:
        """Return how many items of a queue `session` may pop: those not kept for another client."""
        claims = self._claims.get(key, ())
        _, _, length = session.ask(QUEUE_LEN, key)
        return int(length) - len(claims) + (session in claims)

    def wait_for_item(self, session: TorchSession, request_id: int, key: bytes) -> None:
        """Put `session` in line for the next item of a queue."""
        self._queue_waiters.setdefault(key, {})[session, request_id] = None

    def stop_waiting(self, session: TorchSession, request_id: int, key: bytes) -> None:
        """Take `session` out of that line."""
        line = self._queue_waiters.get(key)
        if line is not None:
            line.pop((session, request_id), None)
            if not line:
                del self._queue_waiters[key]

    def claim(self, session: TorchSession, key: bytes, now: float) -> None:
        """Keep an item of a queue for `session`."""
        self._claims.setdefault(key, {})[session] = None
        self._namespaces.note_claim(session, now)

    def give_back(self, session: TorchSession, key: bytes, now: float) -> None:
        """Keep it no longer, and offer it to others if it is still there."""
        claims = self._claims.get(key)
        if claims is not None and session in claims:
            del claims[session]
            if not claims:
                del self._claims[key]
            self._namespaces.forget_claim(session)
            self.offer(session, key, now)

    def offer(self, session: TorchSession, key: bytes, now: float) -> None:
        """Let as many clients go on that wait for an item as there are free items; `session` asks on their behalf."""
        while (line := self._queue_waiters.get(key)) and self.free_items(session, key) > 0:
            waiting, request_id = next(iter(line))
            waiting.release(request_id, now)
            waiting.take_claim(key, now)


class TorchNamespaces:
    """The torch namespaces of a daemon, one per port, and the one timer that they need."""

    def __init__(self, engine: StoreEngine, linger_s: float, memory_percent: int = TORCH_MEMORY_PERCENT) -> None:
        self.engine = engine
        self.share = share = Share(
            engine.limits.memory_bytes * memory_percent // 100, "a daemon's --torch-memory-percent"
        )
        engine.share_of = lambda name: share if name.startswith(TORCH_PREFIX) else None
        self.input_bytes = 0
        """Received from torch's clients and not yet run."""
        self._linger_s = linger_s
        self._by_port: dict[int, TorchNamespace] = {}
        # Both in the order in which they are due.
        self._abandoned: dict[tuple[TorchNamespace, bytes], float] = {}
        self._claims: dict[TorchSession, float] = {}

    def of_port(self, port: int) -> TorchNamespace:
        """Return the namespace of the torch clients that connect to `port`."""
        found = self._by_port.get(port)
        if found is None:
            found = self._by_port[port] = TorchNamespace(self, f"{TORCH_PREFIX}{port}")
        return found

    def keep(self, namespace: TorchNamespace, job: bytes) -> None:
        """Note that a job has a client."""
        self._abandoned.pop((namespace, job), None)

    def abandon(self, namespace: TorchNamespace, jobs: list[bytes], now: float) -> None:
        """Note that jobs have no client any more."""
        if self._linger_s > 0:
            self._abandoned.update({(namespace, job): now + self._linger_s for job in jobs})
        elif jobs:
            namespace.remove(set(jobs))

    def note_claim(self, session: TorchSession, now: float) -> None:
        """Note that an item is kept for `session`, from now on."""
        self._claims[session] = now + CLAIM_S

    def forget_claim(self, session: TorchSession) -> None:
        """Note that no item is kept for `session`."""
        self._claims.pop(session, None)

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next, None if nothing is due ever."""
        if not self._abandoned and not self._claims:
            return None
        soonest = [next(iter(table.values())) for table in (self._abandoned, self._claims) if table]
        return in_whole_ms(min(soonest))

    def expire(self, now: float, late_s: float = 0.0) -> None:
        """Remove what was abandoned long enough ago, and give items back that were not fetched.

        `late_s` is as of `StoreEngine.expire`: the pop of an item, or a job's next client, may have come unheard.
        """
        if late_s > STALL_S:
            self._abandoned = {job: max(due, now + min(late_s, self._linger_s)) for job, due in self._abandoned.items()}
            self._claims = {session: max(due, now + min(late_s, CLAIM_S)) for session, due in self._claims.items()}
        gone: dict[TorchNamespace, set[bytes]] = {}
        while self._abandoned:
            (namespace, job), due = next(iter(self._abandoned.items()))
            if due > now:
                break
            del self._abandoned[namespace, job]
            gone.setdefault(namespace, set()).add(job)
        for namespace, jobs in gone.items():
            namespace.remove(jobs)
        while self._claims:
            session, due = next(iter(self._claims.items()))
            if due > now:
                break
            session.drop_claim(now)
