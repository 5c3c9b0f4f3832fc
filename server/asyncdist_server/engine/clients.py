"""What the engine knows of each client: its namespace, its blocked requests, and the replies it may ask for again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from asyncdist_server.engine.changes import ChangeLog
from asyncdist_server.engine.namespace import Namespace
from asyncdist_server.engine.waiters import Waiter
from asyncdist_server.wire.messages import MAX_REQUEST_ID, Limits, Names, ProtocolError

Reply = tuple[int, int, Any]

REPLY_BYTES: Final = 320
"""What a remembered reply costs besides a value in it: the tuple, its id, its place in a list (measured)."""
TURN_WORK_BYTES: Final = 8 * 1024 * 1024
"""A turn of a client ends when its requests have copied so much: it takes about as long as many small ones."""
KEY_WORK_BYTES: Final = 256
"""A key that is looked at counts as this many bytes copied: it takes about as long."""


class Client:
    """One connected client (or in-process handle) of the engine.

    `deliver` is called with each reply that did not come at once, from within whatever engine call completed it; it
    must not call the engine. `on_superseded` is called when the same client id connects anew.
    """

    __slots__ = (
        "_acknowledged",
        "_frames",
        "_frames_sent",
        "address",
        "blocked",
        "changes",
        "client_id",
        "closed",
        "deliver",
        "idle_since",
        "in_flight",
        "leaving",
        "max_keys",
        "must_look_up",
        "name",
        "namespace",
        "on_superseded",
        "rank",
        "read_only",
        "remembered",
        "remembered_bytes",
        "replay",
        "resumed",
        "taken",
        "unsent",
        "unsent_bytes",
        "work_bytes",
    )

    def __init__(
        self,
        namespace: Namespace,
        client_id: bytes | None,
        deliver: Callable[[Reply], None],
        on_superseded: Callable[[], None] | None,
        limits: Limits,
    ) -> None:
        self.namespace = namespace
        self.client_id = client_id
        self.deliver = deliver
        self.on_superseded = on_superseded
        self.in_flight = limits.in_flight
        self.max_keys = limits.items  # in one request
        self.read_only = False  # mutations are refused
        self.resumed = False
        self.leaving = False  # said goodbye: not to be remembered
        self.closed = False
        self.idle_since: float | None = None  # of one not seen since a restart: how old the store was then
        self.name = ""  # these three are for people
        self.rank: int | None = None
        self.address = ""
        self.work_bytes = 0  # bytes of work of its long requests; reset by its connection at each turn
        self.blocked: dict[int, Waiter] = {}
        # Replies to mutations: not yet in a frame (None: this client never retries), and by the frame they went in.
        self.unsent: list[Reply] | None = None if client_id is None else []
        self.unsent_bytes = 0
        self._frames: deque[tuple[int, int, list[Reply]]] = deque()
        self._frames_sent = 0
        self._acknowledged = 0
        self.remembered = 0
        self.remembered_bytes = 0
        self.replay: dict[int, Reply] = {}
        # Of those that carry an item of a queue, by request id: the queue, and whether the item may go back there.
        self.taken: dict[int, tuple[bytes, bool]] = {}
        self.must_look_up = False
        """Whether a request may have been answered before, or too many replies are remembered."""
        self.changes: ChangeLog | None = None  # None: nothing of this client is in the journal

    @property
    def identity(self) -> bytes | Client:
        """What says that a later connection is of the same client; the object itself where there is no later one."""
        return self if self.client_id is None else self.client_id

    def note_taken(self, request_id: int, key: bytes) -> None:
        """Note, before its reply, that a request took an item of the queue `key`."""
        if self.unsent is not None:
            self.taken[request_id] = key, True
            self.unsent_bytes += len(key)

    def note_reply(self, reply: Reply) -> None:
        """Remember the reply to a mutation until the client is known to have it."""
        if self.unsent is not None:
            self.unsent.append(reply)
            if type(reply[2]) is bytes or type(reply[2]) is tuple:
                self.unsent_bytes += value_bytes(reply[2])
            if self.changes is not None and self.client_id is not None:
                self.changes.reply(self.client_id, reply)
                if reply[0] in self.taken:
                    self.changes.took(self.client_id, reply[0], self.taken[reply[0]][0])

    def frames_sent(self, count: int, all_of_them: bool = True) -> int:
        """Note that `count` new frames were given to the client, and whether all replies so far are in frames.

        Returns by how many bytes the memory for remembered replies grew. Replies of several frames count for the last
        one, which keeps them a little longer than needed and never too short.
        """
        self._frames_sent += count
        replies = self.unsent
        if not replies or not all_of_them:
            return 0
        grown = self.unsent_bytes + REPLY_BYTES * len(replies)
        self._frames.append((self._frames_sent, grown, replies))
        self.unsent = []
        self.unsent_bytes = 0
        self.remembered += len(replies)
        self.remembered_bytes += grown
        if self.remembered > self.in_flight:
            self.must_look_up = True
        return grown

    def acknowledge(self, received: int) -> int:
        """Forget the replies in the first `received` frames of this connection; returns the bytes this frees.

        Raises `ProtocolError` if so many were never sent or the count goes back.
        """
        if received == self._acknowledged:
            return 0
        if not self._acknowledged < received <= self._frames_sent:
            raise ProtocolError(
                f"{received} reply frames acknowledged, after {self._acknowledged} and with {self._frames_sent} sent"
            )
        self._acknowledged = received
        frames = self._frames
        freed = 0
        while frames and frames[0][0] <= received:
            _, frame_bytes, replies = frames.popleft()
            freed += frame_bytes
            self.remembered -= len(replies)
            if self.taken:
                self._let_go([reply[0] for reply in replies if self.taken.pop(reply[0], None) is not None])
        self.remembered_bytes -= freed
        self.must_look_up = bool(self.replay) or self.remembered > self.in_flight
        return freed

    def take_replay(self, request_id: int) -> tuple[Reply | None, int]:
        """Return the reply a retried request got on an earlier connection, if it did, and the bytes this frees.

        The reply is about to be sent, and so remembered, again.
        """
        reply = self.replay.pop(request_id, None)
        freed = 0
        if reply is not None:
            freed = self._reply_bytes(reply)
            self.remembered -= 1
            self.remembered_bytes -= freed
            if request_id in self.taken:
                self.unsent_bytes += len(self.taken[request_id][0])
            self.note_reply(reply)
        self.must_look_up = bool(self.replay) or self.remembered > self.in_flight
        return reply, freed

    def replies_to_resume(self, pending: tuple[int, ...]) -> dict[int, Reply]:
        """Return what is remembered of the requests `pending`."""
        wanted = set(pending)
        found = {reply[0]: reply for reply in self.replay.values() if reply[0] in wanted}
        for _, _, replies in self._frames:
            found.update((reply[0], reply) for reply in replies if reply[0] in wanted)
        found.update((reply[0], reply) for reply in self.unsent or () if reply[0] in wanted)
        return found

    def oldest_remembered(self, most: int) -> int:
        """Return the lowest id among the remembered replies, 0 if there may be lower ones.

        Those of earlier connections, and more than `most`, are not looked through.
        """
        if self.replay or self.remembered + len(self.unsent or ()) > most:
            return 0
        lowest = min(self.unsent)[0] if self.unsent else MAX_REQUEST_ID
        for _, _, replies in self._frames:
            first = min(replies)[0]
            if first < lowest:
                lowest = first
        return lowest

    def unacknowledged_items(self) -> list[tuple[bytes, bytes]]:
        """Return queue and item of each pop whose reply the client is not known to have, oldest first."""
        if not self.taken:
            return []
        found = self.replies_to_resume(tuple(self.taken))
        return [(key, found[request_id][2]) for request_id, (key, there) in self.taken.items() if there]

    def forget_items(self, belongs: Callable[[bytes], bool]) -> None:
        """Note that the queues for whose name `belongs` is true are gone: nothing goes back there."""
        gone = [request_id for request_id, (key, there) in self.taken.items() if there and belongs(key)]
        for request_id in gone:
            self.taken[request_id] = self.taken[request_id][0], False
        self._let_go(gone)

    def keep_items(self, request_ids: Iterable[int]) -> None:
        """Note that the items that earlier connections took stay with the client, but for those of `request_ids`."""
        self._let_go([request_id for request_id in request_ids if request_id not in self.taken])

    def _let_go(self, request_ids: list[int]) -> None:
        """Have the journal know that the items of these replies are not to be put back."""
        if request_ids and self.changes is not None and self.client_id is not None:
            self.changes.let_go(self.client_id, request_ids)

    def resume(self, replay: dict[int, Reply], taken: dict[int, tuple[bytes, bool]]) -> int:
        """Take over the replies of an earlier connection; returns the bytes they need."""
        self.resumed = True
        self.replay = replay
        self.taken = {request_id: where for request_id, where in taken.items() if request_id in replay}
        self.remembered = len(replay)
        self.remembered_bytes = sum(map(self._reply_bytes, replay.values()))
        self.must_look_up = bool(replay)
        return self.remembered_bytes

    def _reply_bytes(self, reply: Reply) -> int:
        key, _ = self.taken.get(reply[0], (b"", False))
        return REPLY_BYTES + value_bytes(reply[2]) + len(key)


def value_bytes(value: object) -> int:
    """Return how much data the value of a reply holds."""
    if type(value) is bytes or type(value) is str:
        return len(value)
    if type(value) is Names:
        return value.size_bytes
    if type(value) is list or type(value) is tuple:
        return sum(map(len if only_bytes(value) else value_bytes, value))
    return 0


def only_bytes(values: Sequence[object]) -> bool:
    """Return whether there is nothing but byte strings, of which there may be a great many."""
    return set(map(type, values)) == {bytes}
