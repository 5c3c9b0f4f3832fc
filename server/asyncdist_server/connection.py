"""One client's socket on the loop: carries bytes between transport and session, and bounds what a slow client holds.

Which protocol the session speaks is known by the client's first byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

from asyncdist_server.auth import Refusal
from asyncdist_server.client_socket import format_address, notice_lost_hosts
from asyncdist_server.config import CLOSE_TIMEOUT_S
from asyncdist_server.counters import count
from asyncdist_server.session import Session
from asyncdist_server.torch_session import TorchSession
from asyncdist_server.torch_wire import FIRST_BYTE
from asyncdist_server.unacknowledged import unacknowledged_bytes
from asyncdist_server.unsent import SMALL_REPLY_BYTES

if TYPE_CHECKING:
    from asyncdist_server.daemon import StoreServer
    from asyncdist_server.group_commit import GroupCommit

WRITE_HIGH_BYTES: Final = 1024 * 1024
"""With more than this unsent, a client's further requests wait: it must read first."""
WRITE_LOW_BYTES: Final = 256 * 1024
"""Its requests are run again once no more than this is unsent."""


class Connection(asyncio.Protocol):
    """The shell around one `Session`. The server owns it from `connection_made` to `connection_lost`."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._session: Session | TorchSession = Session(
            server.engine, server.token, self._has_output, server.encoder, server.former_token
        )
        self._transport: asyncio.Transport | None = None
        self.descriptor = -1
        self._timer: asyncio.TimerHandle | None = None  # handshake, stall or close, whichever runs
        self._peer = ""
        self._write_paused = False  # by the transport
        self._lacks_room = False  # as other clients have too much to read
        self._paused = False  # by these, or by what waits for the disk
        self._read_paused = False
        self._opening = True
        self._turn_due = self._recognized = self._ending = False
        self._given_bytes = 0  # to the transport
        self._sent_before = 0
        self._buffered = 0
        self._held: deque[tuple[int, list[bytes]]] = deque()  # output by the commit it waits for
        self._held_bytes = 0
        self._began_s = 0.0  # when the requests arrived whose answers are timed, 0 if none are
        self._ran_before = 0  # requests of the session before those
        self._timed: tuple[int, int, int] | None = None  # their operation, how many, and the commit they wait for

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it when there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self.descriptor = transport.get_extra_info("socket").fileno()
        self._peer = format_address(transport.get_extra_info("peername"))
        self._session.address = self._peer
        self._transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        notice_lost_hosts(transport.get_extra_info("socket"))
        if not self._server.admit(self):
            self.refuse(Refusal.TOO_MANY_CONNECTIONS)
            return
        self._timer = self._loop.call_later(self._server.config.handshake_timeout_s, self.refuse, Refusal.TIMEOUT)

    def data_received(self, data: bytes) -> None:
        """Run what arrived, answer it in one write, and wake others."""
        session = self._session
        if session.closing:
            return  # what comes after the last message is read only to let the client read that message
        if not self._recognized:
            self._recognize(data[0])
            session = self._session
        server = self._server
        now = self._loop.time()
        if now != server.timed_at:
            self._time_turn(now)
        session.receive(data, now)
        if self._opening and session.open:
            self._opening = False
            self._cancel_timer()
            server.opened(self)
            count(server.engine.counters.opened, session.protocol)
        if session.buffered != self._buffered:
            self._account()
        self.flush()
        server.settle()
        if server.busy_poll is not None:
            server.busy_poll.answered()

    def _recognize(self, first_byte: int) -> None:
        """Take a torch client for what it is; all else is for the native session to judge."""
        self._recognized = True
        if first_byte == FIRST_BYTE and self._transport is not None:
            namespace = self._server.torch_namespace(self._transport.get_extra_info("sockname"), self._peer)
            if namespace is not None:
                self._session = TorchSession(namespace, self._has_output, self._peer)

    def _time_turn(self, now: float) -> None:
        """See how long the requests take that have arrived, unless earlier ones are being timed.

        Done for one turn in each tick of the loop's clock, a millisecond on uvloop: it costs nothing under load.
        """
        self._server.timed_at = now
        if self._timed is None and (not self._began_s or not self._session.has_output):
            self._began_s = perf_counter()
            self._ran_before = self._session.ran

    def _note_latency(self) -> None:
        """Note how long the requests took that were timed: their answers are on their way now."""
        assert self._timed is not None
        operation, requests, _ = self._timed
        self._server.engine.counters.latencies[operation].observe(perf_counter() - self._began_s, requests)
        self._timed = None
        self._began_s = 0.0

    def _account(self) -> None:
        """Keep the server's sum of unprocessed bytes, and close if that exceeds its memory and much is here."""
        buffered = self._session.buffered
        server = self._server
        server.inbound_bytes += buffered - self._buffered
        self._buffered = buffered
        if buffered > SMALL_REPLY_BYTES and server.inbound_bytes > server.config.limits.memory_bytes:
            self._session.fail_limit("the daemon holds too much unfinished input")
            self._account()  # nothing is here any more

    def flush(self) -> None:
        """Write what the session has to say, then go on with its waiting requests or close."""
        transport = self._transport
        session = self._session
        if transport is None or self._ending:
            return
        if self._lacks_room or (self._paused and not session.closing):
            self._server.unsaid.note(self, session)
        elif self._server.unsent.may_say(self, session.reply_bytes):
            self._write_output(transport)
        else:
            self._lacks_room = self._paused = True
            self._update_reading()
            self._server.unsaid.note(self, session)

    def _write_output(self, transport: asyncio.Transport) -> None:
        session = self._session
        output = session.take_output()
        size = sum(map(len, output))
        self._server.unsent.wrote(self, size)
        if output and (self._server.gate is None or not self._hold(self._server.gate, output, size)):
            self._send(transport, output, size)
        if self._began_s and self._timed is None:
            if not output or session.ran == self._ran_before:
                self._began_s = self._server.timed_at = 0.0  # the next turn of this tick may answer something
            else:
                commit = self._held[-1][0] if self._held else 0
                self._timed = (session.operation, session.ran - self._ran_before, commit)
                if not self._held:
                    self._note_latency()
        if session.closing:
            if not self._held:
                self._end()
        elif session.busy and not self._paused:
            self._schedule_turn()
        elif session.busy or self._read_paused != self._paused:
            self._update_reading()

    def _send(self, transport: asyncio.Transport, pieces: list[bytes], size: int) -> None:
        self._given_bytes += size
        if len(pieces) == 1:
            transport.write(pieces[0])
        else:
            transport.writelines(pieces)

    def _has_output(self) -> None:
        self._server.dirty.append(self)

    @property
    def unsent_bytes(self) -> int:
        """What was made for the client and is not sent."""
        return self._held_bytes + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    def go_on(self) -> None:
        """Say what had to wait until others have read theirs."""
        self._lacks_room = False
        self._update_paused()
        if self._transport is not None and not self._ending and (not self._paused or self._session.closing):
            self._write_output(self._transport)
            self._server.settle()

    def _update_paused(self) -> None:
        self._paused = self._write_paused or self._lacks_room or self._held_bytes > WRITE_HIGH_BYTES
        if not self._paused:
            self._server.unsaid.forget(self)

    # ---- output that waits for the disk

    def _hold(self, gate: GroupCommit, output: list[bytes], size: int) -> bool:
        """Keep `output` back if it tells of changes that are not on the disk; torch's clients never wait."""
        session = self._session
        if not isinstance(session, Session) or not session.awaits_commits:
            return False
        number = gate.needed()
        if not number and not self._held:
            return False
        number = number or self._held[-1][0]
        self._held.append((number, output))
        self._held_bytes += size
        self._paused |= self._held_bytes > WRITE_HIGH_BYTES
        gate.hold(self, number)
        return True

    def release(self, number: int) -> None:
        """Write what had to wait for the commits up to `number`."""
        held = self._held
        was_paused = self._paused
        pieces: list[bytes] = []
        while held and held[0][0] <= number:
            pieces += held.popleft()[1]
        size = sum(map(len, pieces))
        self._held_bytes -= size
        self._update_paused()
        if self._transport is None or self._ending:
            return
        self._send(self._transport, pieces, size)
        if self._timed is not None and self._timed[2] <= number:
            self._note_latency()
        if self._session.closing:
            if not held:
                self._end()
        elif was_paused and not self._paused:
            self._schedule_turn()

    # ---- long requests and slow readers

    def _schedule_turn(self) -> None:
        self._update_reading()
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._transport is None or self._session.closing or self._paused:
            return
        self._session.resume(self._loop.time())
        self._account()
        self.flush()
        self._server.settle()

    def _update_reading(self) -> None:
        """Read exactly while all that was read has been run and the client reads its replies."""
        if self._transport is None:
            return
        pause = self._paused or self._session.busy
        if pause and not self._read_paused:
            self._transport.pause_reading()
        elif self._read_paused and not pause:
            self._transport.resume_reading()
        self._read_paused = pause

    def pause_writing(self) -> None:
        """The client reads more slowly than it asks: run nothing more for it, and watch that it reads at all."""
        self._write_paused = self._paused = True
        self._update_reading()
        if not self._opening and not self._ending:
            self._watch_stall()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_paused = False
        self._update_paused()
        if not self._opening and not self._ending:
            self._cancel_timer()
            self._schedule_turn()

    def hurry(self) -> None:
        """Others wait until there is room: watch that the client reads at all."""
        if self._timer is None and not self._opening and not self._ending:
            self._watch_stall()

    def _watch_stall(self) -> None:
        assert self._transport is not None
        self._sent_before = self._given_bytes - self._transport.get_write_buffer_size()
        self._cancel_timer()
        self._timer = self._loop.call_later(self._server.config.stall_timeout_s, self._check_stall)

    def _check_stall(self) -> None:
        self._timer = None
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        if self._write_paused or (unread > SMALL_REPLY_BYTES and self._server.unsent.waiting):
            if self._given_bytes - unread > self._sent_before:
                self._watch_stall()
            else:
                self.drop("does not read its replies")

    # ---- endings

    def refuse(self, refusal: Refusal, detail: str = "") -> None:
        """Close because of what the client is; it is told as far as it can be, `detail` is for the log."""
        self._session.refuse(refusal, detail)
        self.flush()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop(self, reason: str) -> None:
        """Cut the connection without a last word: the client would not read it."""
        if self._transport is not None:
            count(self._server.engine.counters.dropped, "slow")
            self._tell("connection_dropped", f"it {reason}")
            self._ending = True
            self._cancel_timer()
            self._judge_output(unread=True)
            self._transport.abort()

    def _end(self) -> None:
        """Close after what is written has been read; the client's next bytes must not turn that into a reset."""
        transport = self._transport
        if transport is None or self._ending:
            return
        self._ending = True
        self._note_end()
        self._cancel_timer()
        self._session.close(self._loop.time())
        if not self._server.begin_ending(self):
            transport.abort()
            return
        if self._read_paused:
            self._read_paused = False
            transport.resume_reading()
        try:
            transport.write_eof()
        except (OSError, RuntimeError):
            transport.abort()  # the client is gone already
            return
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, transport.abort)

    def _note_end(self) -> None:
        """Count and log why the daemon ends the connection, unless the client asked for it."""
        session, counters = self._session, self._server.engine.counters
        if session.error:
            count(counters.refused if self._opening else counters.dropped, session.cause or "protocol")
            self._tell("connection_refused" if self._opening else "connection_dropped", session.error)

    def _tell(self, event: str, reason: str) -> None:
        session = self._session
        self._server.events.warning(event, peer=self._peer, job=session.job or None, rank=session.rank, reason=reason)

    def stop(self) -> None:
        """End the connection because the daemon stops; replies already made are still sent, and who waits is told."""
        self._session.say_stopping()
        self._session.close(self._loop.time())
        said_all = not self._held and not self._session.has_output
        if self._transport is not None and said_all and not self._transport.get_write_buffer_size():
            self._ending = True
            self._cancel_timer()
            self._transport.close()  # there is no last message that a reset could lose
            return
        self.flush()

    def abort(self) -> None:
        """Cut the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        """Close: a client that stopped sending is leaving or gone, nobody half-closes to go on reading."""
        self._judge_output(unread=self._transport is not None and self._transport.get_write_buffer_size() > 0)
        return False

    def _judge_output(self, unread: bool) -> None:
        """Note of a torch client, as those confirm nothing, if it cannot have read what it was sent last."""
        if isinstance(self._session, TorchSession) and (unread or unacknowledged_bytes(self.descriptor)):
            self._session.popped.unread = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Withdraw the client from the engine."""
        if exc is not None:
            self._judge_output(unread=isinstance(exc, ConnectionError))
        self._transport = None
        if not self._opening:
            count(self._server.engine.counters.closed, self._session.protocol)
        self._held.clear()
        self._held_bytes = 0
        self._cancel_timer()
        self._session.close(self._loop.time())
        self._server.inbound_bytes -= self._buffered
        self._buffered = 0
        self._server.forget(self)
        self._server.settle()
