"""Signals: short records between the members of a group, one ordered stream per pair and tag.

A receive is always posted for every member, so records never pile up in the transport, and nothing has to be posted for
each of them: a signal costs one message and one callback.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from asyncdist.errors import ClosedError, DistError, RemoteProtocolError
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import COLLECTIVE, pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

__all__ = ["Record", "Signals"]

SIGNAL_MARK: Final = 0x3A3A_3A3A_3A3A_3A3A
"""Set apart from the group's own id, so that dropping an operation of the group leaves records alone."""

_RECORD: Final = struct.Struct("<HHIIIQ")


class Record(NamedTuple):
    """`kind` is the user's, and says what the other fields mean."""

    kind: int
    stage: int = 0
    sequence: int = 0
    chunk: int = 0
    fingerprint: int = 0
    nbytes: int = 0


class Signals:
    """One tag's streams. `heard(member, record)` and `lost(member, error)` are called with group ranks.

    `lost` is called once per member at most, and nothing is heard of it afterwards. Records may come before `open`
    returns. A member that has closed its side is not listened to any more: see `hush`.
    """

    def __init__(
        self,
        mesh: BaseMesh,
        group_id: int,
        ranks: tuple[int, ...],
        rank: int,
        tag: int,
        heard: Callable[[int, Record], object],
        lost: Callable[[int, BaseException], object],
    ) -> None:
        self._mesh = mesh
        self._ranks = ranks
        self._rank = rank
        self._key = pack_key(group_id ^ SIGNAL_MARK, tag, 0, 0, COLLECTIVE)
        self._heard = heard
        self._lost = lost
        self._buffers = [bytearray(_RECORD.size) for _ in ranks]
        self._receives: dict[int, Receive] = {}
        self._gone: set[int] = set()
        self._hushed: set[int] = set()

    def open(self) -> None:
        """Listen to all other members; they are connected to if they are not."""
        others = [rank for member, rank in enumerate(self._ranks) if member != self._rank]
        self._mesh.connect(others)
        for member in range(len(self._ranks)):
            if member != self._rank:
                self._listen(member)

    def tell(self, members: Iterable[int], record: Record) -> None:
        """Send `record` to `members`, without ourselves and without ranks that are gone."""
        payload = memoryview(_RECORD.pack(*record))
        for member in members:
            if member == self._rank or member in self._gone:
                continue
            try:
                self._mesh.post_send(self._ranks[member], SendOp(self._key, payload, b"", self, member))
            except DistError as error:
                self.message_failed(member, error)

    def hush(self, member: int) -> None:
        """Nothing more will come from `member`, or is to be heard: take its receive back. It still can be told."""
        self._hushed.add(member)
        receive = self._receives.pop(member, None)
        if receive is not None:
            self._mesh.withdraw(receive, self._ranks[member])

    def _listen(self, member: int) -> None:
        """Post the next receive; what has come already is heard at once."""
        while member not in self._gone and member not in self._hushed:
            receive = Receive(self._key, memoryview(self._buffers[member]), self, member)
            self._receives[member] = receive
            try:
                if not self._mesh.post_receive(self._ranks[member], receive):
                    return
            except DistError as error:
                self.message_failed(member, error)
                return
            self._take(member)

    def _take(self, member: int) -> None:
        self._receives.pop(member, None)
        record = Record(*_RECORD.unpack(self._buffers[member]))
        try:
            self._heard(member, record)
        except RemoteProtocolError as error:
            self._mesh.break_pair(self._ranks[member], error)

    # What the transport reports; the token is the member.

    def message_sent(self, token: Any) -> None:
        """Records are copied when they are posted."""

    def message_received(self, token: Any, receive: Receive) -> None:
        """A record is here."""
        if token not in self._gone and token not in self._hushed:
            self._take(token)
            self._listen(token)

    def message_failed(self, token: Any, error: BaseException) -> None:
        """The member is gone, or the mesh is closed."""
        if token not in self._gone:
            self._gone.add(token)
            self._receives.pop(token, None)
            if token not in self._hushed:
                self._lost(token, error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never called: every receive names its target."""
        raise ClosedError("receives of records have targets")
