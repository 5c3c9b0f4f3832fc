"""Asking: a peer that has stalled keeps messages back until it is asked for them, key by key."""

from __future__ import annotations

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.credit import ReceiveWindow
from asyncdist.transport.protocol.frame import CHANNELS, FLAG_END, MAX_ASKS, POINT_TO_POINT, Kind, pack_header
from asyncdist.transport.protocol.matching import AnySourceTable, ParkingPeer, ReceiveTable
from asyncdist.transport.protocol.output import OutputQueue

__all__ = ["Asking"]


class Asking:
    """The receiving side of one peer's stalls. `stalled`: it keeps messages of some channel back."""

    __slots__ = ("_any_source", "_owner", "_peer_rank", "_queue", "_table", "_windows", "stalled")

    def __init__(
        self,
        peer_rank: int,
        owner: ParkingPeer,
        table: ReceiveTable,
        any_source: AnySourceTable,
        windows: tuple[ReceiveWindow, ...],
        queue: OutputQueue,
    ) -> None:
        self._peer_rank = peer_rank
        self._owner = owner
        self._table = table
        self._any_source = any_source
        self._windows = windows
        self._queue = queue
        self.stalled = False

    def on_stalled(self, key: bytes, stalled: int, number: int) -> None:
        """STALLED: from now on the peer keeps messages back until asked, or no longer does."""
        channel = key[20]
        if channel >= CHANNELS or stalled > 1 or not number:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent a malformed STALLED")
        window = self._windows[channel]
        if stalled == bool(window.stall) or (not stalled and window.stall != number):
            raise RemoteProtocolError(f"rank {self._peer_rank} began or ended a stall twice")
        window.asked.clear()
        window.unasked = window.renewing = False
        window.stall = number if stalled else 0
        self.stalled = any(window.stall for window in self._windows)
        self._queue.drop_asks(channel)
        if channel == POINT_TO_POINT:
            self._any_source.stalled(self._owner, bool(stalled))
        if stalled:
            self._ask_for_all(channel)

    def answered(self, key: bytes) -> None:
        """A message has come because it was asked for: there may be room to ask for others."""
        channel = key[20]
        window = self._windows[channel]
        window.answered(key)
        if window.unasked and len(window.asked) <= MAX_ASKS // 2:
            self._ask_for_all(channel)

    def ask(self, key: bytes) -> bool:
        """A receive for `key` is posted: if the peer is stalled, have it send one. Whether it is told anything."""
        channel = key[20]
        window = self._windows[channel]
        if not window.stall:
            return False
        wanted = self._table.count(key)
        if channel == POINT_TO_POINT:
            wanted += self._any_source.table.count(key)
        asked = window.ask(key, wanted)
        if asked:
            self._queue.push_control(pack_header(Kind.ASK, key=key, message_id=window.stall))
            return True
        return window.unasked and not window.renewing and self._renew(key)

    def _renew(self, key: bytes) -> bool:
        """Have the stall begin anew if most of what was asked for is waited for no more."""
        window = self._windows[key[20]]
        if len(self._table.entries) + len(self._any_source.entries) > MAX_ASKS // 2:
            return False
        window.renewing = True
        self._queue.push_control(pack_header(Kind.ASK, flags=FLAG_END, key=key, message_id=window.stall))
        return True

    def _ask_for_all(self, channel: int) -> None:
        self._windows[channel].unasked = self._windows[channel].renewing = False
        for receive in self._table:
            if receive.key[20] == channel:
                self.ask(receive.key)
        if channel == POINT_TO_POINT:
            for receive in self._any_source.table:
                self.ask(receive.key)
