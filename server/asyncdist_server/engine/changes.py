"""What changed in a store since it was last asked, for the journal. No clock and no I/O.

The engine only notes *that* something changed; what it is now is looked up when a batch is taken (`batch`), so that a
key that is set a hundred times meanwhile is written once. Namespaces outside the journal (torch's) have no `changes`
at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncdist_server.engine.history import Event

Reply = tuple[int, int, object]


class NamespaceChanges:
    """What changed in one namespace, and where in the journal its keys were written last."""

    __slots__ = (
        "appended",
        "bounds",
        "events",
        "histories",
        "holders",
        "holds",
        "homes",
        "items",
        "keys",
        "leases",
        "log",
        "name",
        "queues",
        "touched",
    )

    def __init__(self, log: ChangeLog, name: str) -> None:
        self.log = log
        self.name = name
        self.touched = False
        self.keys: set[bytes] = set()
        self.appended: dict[bytes, int] = {}  # how much of each value was there before
        self.queues: set[bytes] = set()
        self.items: dict[tuple[bytes, int], bytes] = {}
        self.leases: set[int] = set()
        self.holds: set[bytes] = set()
        self.holders: set[tuple[bytes, int]] = set()
        self.histories: set[bytes] = set()
        self.events: list[tuple[bytes, Event]] = []
        # These two stay from batch to batch: the batch that holds a key's newest record, and the numbers of the first
        # item of each queue and of the one after the last.
        self.homes: dict[bytes, int] = {}
        self.bounds: dict[bytes, tuple[int, int]] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing would be missed if this object were made anew."""
        return not (self.touched or self.homes or self.bounds)

    def _touch(self) -> None:
        self.touched = True
        self.log.dirty = True
        self.log.touched.append(self)

    def key(self, key: bytes) -> None:
        """Note that a key was set, deleted, or bound to another lease."""
        self.keys.add(key)
        if not self.touched:
            self._touch()

    def many_keys(self, keys: list[bytes]) -> None:
        """Note of `keys`, one at least, what `key` notes of each."""
        self.keys.update(keys)
        if not self.touched:
            self._touch()

    def appended_to(self, key: bytes, start: int) -> None:
        """Note that the value of `key` goes on behind its first `start` bytes, which are as they were."""
        if key in self.keys or key not in self.homes:
            self.key(key)
        else:
            self.appended.setdefault(key, start)
            if not self.touched:
                self._touch()

    def pushed(self, key: bytes, item: bytes, at_head: bool) -> None:
        """Note that `item` was queued."""
        head, tail = self.bounds.get(key, (0, 0))
        if at_head:
            head -= 1
        else:
            tail += 1
        self.items[key, head if at_head else tail - 1] = item
        self._bound(key, head, tail)

    def popped(self, key: bytes) -> None:
        """Note that the first item of a queue was taken."""
        head, tail = self.bounds[key]
        self.items.pop((key, head), None)
        self._bound(key, head + 1, tail)

    def cleared(self, key: bytes) -> None:
        """Note that a queue was removed."""
        self._bound(key, 0, 0)

    def _bound(self, key: bytes, head: int, tail: int) -> None:
        if head < tail:
            self.bounds[key] = head, tail
        else:
            del self.bounds[key]
        self.queue(key)

    def queue(self, key: bytes) -> None:
        """Note that the bounds of a queue changed."""
        self.queues.add(key)
        if not self.touched:
            self._touch()

    def said_again(self, key: bytes, number: int, item: bytes) -> None:
        """Note that an item is to be written once more."""
        self.items[key, number] = item
        if not self.touched:
            self._touch()

    def lease(self, lease_id: int) -> None:
        """Note that a lease was granted or has ended."""
        self.leases.add(lease_id)
        if not self.touched:
            self._touch()

    def hold(self, prefix: bytes) -> None:
        """Note that a hold, or the job it stands for, changed, but for who holds it."""
        self.holds.add(prefix)
        if not self.touched:
            self._touch()

    def holder(self, prefix: bytes, lease_id: int) -> None:
        """Note that a lease holds a prefix now, or no longer."""
        self.holders.add((prefix, lease_id))
        if not self.touched:
            self._touch()

    def history(self, prefix: bytes) -> None:
        """Note that a history began, ended, or forgot its oldest event."""
        self.histories.add(prefix)
        if not self.touched:
            self._touch()

    def event(self, prefix: bytes, event: Event) -> None:
        """Note what the history of `prefix` now remembers."""
        self.events.append((prefix, event))
        if not self.touched:
            self._touch()


class ChangeLog:
    """What changed in all namespaces of a store, and which replies its clients may ask for again."""

    __slots__ = ("_excluded_prefix", "clients", "dirty", "known", "late", "namespaces", "replies", "taken", "touched")

    def __init__(self, excluded_prefix: str) -> None:
        self._excluded_prefix = excluded_prefix
        self.namespaces: dict[str, NamespaceChanges] = {}
        self.touched: list[NamespaceChanges] = []
        self.clients: dict[bytes, str | None] = {}  # a client's namespace, None if the client is forgotten
        self.known: set[bytes] = set()  # clients of which the journal knows
        self.replies: dict[bytes, list[Reply]] = {}
        # Of the replies that carry an item of a queue, by request id: the queue where it goes back if the client is
        # lost, None if it does no longer.
        self.taken: dict[bytes, dict[int, bytes | None]] = {}
        self.dirty = False
        """Whether anything changed that must be in the journal before a client learns of it."""
        self.late = False
        """Whether anything changed for which no answer waits. It is in the journal before the next answer, and soon if
        there is none."""

    def of(self, name: str) -> NamespaceChanges | None:
        """Return where changes of a namespace are noted, None if it is not in the journal."""
        if name.startswith(self._excluded_prefix):
            return None
        found = self.namespaces.get(name)
        if found is None:
            found = self.namespaces[name] = NamespaceChanges(self, name)
        return found

    def namespace_dropped(self, name: str) -> None:
        """Note that the engine has forgotten a namespace; nothing of it is left but what is still to be written."""
        found = self.namespaces.get(name)
        if found is not None and found.empty:
            del self.namespaces[name]

    def client_came(self, client_id: bytes, namespace: str) -> None:
        """Note that a client is to be known from now on."""
        if client_id not in self.known:
            self.known.add(client_id)
            self.clients[client_id] = namespace
            self.dirty = True

    def client_forgotten(self, client_id: bytes) -> None:
        """Note that a client is not to be known any more. No answer waits for that to be written."""
        if client_id in self.known:
            self.known.discard(client_id)
            self.clients[client_id] = None

    def reply(self, client_id: bytes, reply: Reply) -> None:
        """Note a reply that is remembered for a retry."""
        replies = self.replies.get(client_id)
        if replies is None:
            self.replies[client_id] = [reply]
        else:
            replies.append(reply)
        self.dirty = True

    def took(self, client_id: bytes, request_id: int, key: bytes) -> None:
        """Note, beside its reply, that a request took an item of the queue `key`."""
        self.taken.setdefault(client_id, {})[request_id] = key

    def let_go(self, client_id: bytes, request_ids: Iterable[int]) -> None:
        """Note that the items of these replies stay with the client, are back in their queue, or have none any more."""
        self.taken.setdefault(client_id, {}).update(dict.fromkeys(request_ids))
        self.late = True
