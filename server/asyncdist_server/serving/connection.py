"""One client's socket on the loop: carries bytes between transport and session, and bounds what a slow client holds.

Which protocol the session speaks is known by the client's first byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

from asyncdist_server.engine.counters import count
from asyncdist_server.engine.replies import SMALL_BYTES
from asyncdist_server.engine.session import TURN_BYTES, Session
from asyncdist_server.serving.config import CLOSE_TIMEOUT_S
from asyncdist_server.serving.sockets import format_address, notice_lost_hosts, unacknowledged_bytes
from asyncdist_server.torch.session import TorchSession
from asyncdist_server.torch.wire import FIRST_BYTE
from asyncdist_server.wire.auth import Refusal

if TYPE_CHECKING:
    from asyncdist_server.journal.group_commit import GroupCommit
    from asyncdist_server.serving.daemon import StoreServer

LONG_READ_BYTES: Final = 64 * 1024
"""After a read of more than this, in the middle of a frame, other clients have their turn."""
HELD_BYTES: Final = 1024 * 1024
"""With more than this waiting for the disk, a client's further requests wait."""
HELD_PART: Final = 4
"""So do those of clients with more than `SMALL_BYTES` of it, where all together have one part in so many of the memory
limit."""


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
        self.host = self._peer = ""
        self._write_paused = False  # by the transport
        self._paused = False  # by it, or by what waits for the disk
        self._read_paused = False
        self._unsaid = False  # whether the session has more to say, and the server knows
        self._opening = True
        self._recognized = self._closing = self._ending = False
        self._given_bytes = 0  # to the transport
        self._sent_before = 0  # when it was looked last whether the client reads
        self._buffered = 0
        self._held: deque[tuple[int, list[bytes]]] = deque()  # output by the commit it waits for
        self._held_bytes = 0
        self._committed = 0  # the last commit that is done, of those waited for
        self._began_s = 0.0  # when the requests arrived whose answers are timed, 0 if none are
        self._ran_before = 0  # requests of the session before those
        self._timed: tuple[int, int, int] | None = None  # their operation, how many, and the commit they wait for

    @property
    def job(self) -> str:
        """The job that the client belongs to, empty before that is known."""
        return self._session.job

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it when there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self.descriptor = transport.get_extra_info("socket").fileno()
        address = transport.get_extra_info("peername")
        self.host = str(address[0]) if address else ""
        self._peer = format_address(address)
        self._session.address = self._peer
        self._transport.set_write_buffer_limits(SMALL_BYTES)
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
        if len(data) > LONG_READ_BYTES and session.buffered and not (self._read_paused or self._ending):
            self._let_others_read()
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
        if buffered > SMALL_BYTES and server.inbound_bytes > server.config.limits.memory_bytes:
            self._session.fail_limit("the daemon holds too much unfinished input")
            self._account()  # nothing is here any more

    def flush(self) -> None:
        """Write what the session has to say, as far as the client reads; see to the rest, its requests or its end."""
        transport = self._transport
        session = self._session
        if transport is None or self._ending:
            return
        given = 0
        while not self._paused:
            output = session.take_output()
            size = sum(map(len, output))
            given += size
            if output and (self._server.gate is None or not self._hold(self._server.gate, output, size)):
                self._send(transport, output, size)
            if given >= TURN_BYTES or not session.has_output:
                break
        if self._began_s and self._timed is None and (given or not self._paused):
            self._time_answers(given)
        more = session.has_output
        if more or self._unsaid:
            self._note_unsaid(more)
        if session.closing and not more and not self._held:
            self._end()
            return
        if session.closing:
            self._end_soon()
        if not self._paused and (more or session.busy):
            self._schedule_turn()
        elif session.busy or self._read_paused != self._paused:
            self._update_reading()

    def _time_answers(self, given: int) -> None:
        session = self._session
        if not given or session.ran == self._ran_before:
            self._began_s = self._server.timed_at = 0.0  # the next turn of this tick may answer something
            return
        commit = self._held[-1][0] if self._held else 0
        self._timed = (session.operation, session.ran - self._ran_before, commit)
        if not self._held:
            self._note_latency()

    def _send(self, transport: asyncio.Transport, pieces: list[bytes], size: int) -> None:
        self._given_bytes += size
        if len(pieces) == 1:
            transport.write(pieces[0])
        else:
            transport.writelines(pieces)

    def _has_output(self) -> None:
        self._server.dirty.append(self)

    def _note_unsaid(self, more: bool) -> None:
        """Have the server know of the replies that wait for the client to read, or that none do."""
        self._unsaid = more
        if more:
            self._server.unsaid.note(self, self._session)  # may cut it off
        else:
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
        self._account_held(size)
        gate.hold(self, number)
        return True

    def _account_held(self, grown_bytes: int) -> None:
        server = self._server
        self._held_bytes += grown_bytes
        server.held_bytes += grown_bytes
        scarce = server.held_bytes > server.config.limits.memory_bytes // HELD_PART
        much = self._held_bytes > (SMALL_BYTES if scarce else HELD_BYTES)
        self._paused = self._write_paused or much

    def release(self, number: int) -> None:
        """Write what had to wait for the commits up to `number`."""
        self._committed = number
        if self._timed is not None and self._timed[2] <= number:
            self._note_latency()
        self._send_released()

    def _send_released(self) -> None:
        """Write what waits for no commit any more, as far as the client reads."""
        transport, held = self._transport, self._held
        if transport is None or self._ending:
            return
        was_paused = self._paused
        while held and held[0][0] <= self._committed and not self._write_paused:
            pieces = held.popleft()[1]
            size = sum(map(len, pieces))
            self._account_held(-size)
            self._send(transport, pieces, size)
        if (was_paused and not self._paused) or self._session.closing:
            self._schedule_turn()

    # ---- long requests and slow readers

    def _schedule_turn(self) -> None:
        self._update_reading()
        self._server.turns.ask(self)

    def take_turn(self) -> None:
        """Go on with what has to be said, then with the requests that have arrived."""
        if self._transport is None or self._ending:
            return
        if self._held:
            self._send_released()
        session = self._session
        if not (self._paused or session.closing or session.has_output):
            session.resume(self._loop.time())
            self._account()
        self.flush()
        self._server.settle()

    def _let_others_read(self) -> None:
        """Read on in the next turn: where a client sends much, uvloop reads many times before it looks at others."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._read_paused = True
        self._server.turns.ask(self)

    def _update_reading(self) -> None:
        """Read exactly while all that was read has been run and the client reads its replies."""
        if self._transport is None or self._ending:
            return
        pause = self._paused or self._session.busy
        if pause and not self._read_paused:
            self._transport.pause_reading()
        elif self._read_paused and not pause:
            self._transport.resume_reading()
        self._read_paused = pause

    def pause_writing(self) -> None:
        """The client reads more slowly than it asks: say and run nothing more, and watch that it reads at all."""
        self._write_paused = self._paused = True
        self._update_reading()
        if self._timer is None and not self._ending:
            self._watch_stall()

    def resume_writing(self) -> None:
        """The client has read what it was given."""
        self._write_paused = False
        self._account_held(0)
        self._schedule_turn()

    def _watch_stall(self) -> None:
        assert self._transport is not None
        self._sent_before = self._given_bytes - self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._server.config.stall_timeout_s, self._check_stall)

    def _check_stall(self) -> None:
        self._timer = None
        if self._transport is not None and self._write_paused:
            if self._given_bytes - self._transport.get_write_buffer_size() > self._sent_before:
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

    def _end_soon(self) -> None:
        """Close once all is said, or without the rest if the client reads nothing of it in time."""
        if not self._closing:
            self._closing = True
            self._cancel_timer()
            self._watch_last_words()

    def _watch_last_words(self) -> None:
        self._sent_before = self._given_bytes
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._check_last_words)

    def _check_last_words(self) -> None:
        if self._given_bytes > self._sent_before or not self._write_paused:
            self._watch_last_words()  # it reads, or waits for the disk
        else:
            self._timer = None
            self._end()

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
        """End the connection because the daemon stops; replies already made are sent, waiting clients are told."""
        self._session.say_stopping()
        self._session.close(self._loop.time())
        said_all = not self._held and not self._session.has_output
        if self._transport is not None and said_all and not self._transport.get_write_buffer_size():
            self._ending = True
            self._cancel_timer()
            self._transport.close()  # there is no last message that a reset could lose
            return
        self._cancel_timer()
        self._closing = True  # it may read as long as the daemon waits for all
        self.flush()

    def abort(self) -> None:
        """Cut the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        """Close: a client that stopped sending is leaving or gone; no client half-closes to go on reading."""
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
        if self._opening and not self._ending:
            self._session.end_unproven()
            self._note_end()
        if not self._opening:
            count(self._server.engine.counters.closed, self._session.protocol)
        self._held.clear()
        self._account_held(-self._held_bytes)
        self._cancel_timer()
        self._session.close(self._loop.time())
        self._server.inbound_bytes -= self._buffered
        self._buffered = 0
        self._server.forget(self)
        self._server.settle()
