"""The endpoint of a process: a thread that answers whoever asks what the ranks of the process do.

The thread sleeps until somebody asks. It is no part of the event loop, so that it answers while that computes, sleeps
or is blocked. Whoever asks proves the token, by the handshake of the store (`wire.auth`) with a key of its own; or
connects by Unix socket as the same user, who can read the environment and the memory of this process anyway. What is
asked for is the handshake's context, so that the proof covers it. The answer is a length and JSON:

    NOW      a list of documents, of what is under way and what ended last, without tasks
    WAITS    the same, with tasks
    ALL      a list of documents, of all that is remembered
    STOPPED  `stopped 4711`: whether that process of this host is stopped
    NETWORK  as ALL, with whom each rank reaches
    SPEEDS   the same, of whoever has them send each other samples then
    SPEED    as NOW, with how fast bytes come from the endpoint of another rank: `speed 10.0.0.7 4711`
    SAMPLE   `sample 4711`: so many bytes, for that

What takes seconds is found out by a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, Final

from asyncdist.concurrency.loop import Place, close_in_forked_child
from asyncdist.concurrency.process import is_stopped
from asyncdist.concurrency.trace import info
from asyncdist.inspect.dumps import document
from asyncdist.inspect.recorder import RECORDER, GroupFacts, Recorded
from asyncdist_server.serving.sockets import peer_credentials
from asyncdist_server.wire.auth import MAX_HANDSHAKE_BYTES, AuthenticationError, ServerHandshake

NOW: Final = b"now"
WAITS: Final = b"waits"
ALL: Final = b"all"
STOPPED: Final = b"stopped "
NETWORK: Final = b"network"
SPEEDS: Final = b"network speeds"
SPEED: Final = b"speed "
SAMPLE: Final = b"sample "
NAME: Final = "asyncdist-inspect-"
"""How the names of Unix sockets of endpoints begin: whoever is on the host finds them by that."""
THREAD: Final = "asyncdist inspect"
PURPOSE: Final = "inspect"
"""Of the key that is proven."""
LENGTH: Final = struct.Struct(">Q")

MAX_ASKERS: Final = 16
"""Connections at a time that are answered; others wait in the kernel's queue."""
MAX_HALF_OPEN: Final = 64
"""Connections that have not proven the token yet; the next replaces the oldest."""
PROOF_LIMIT_S: Final = 2.0
"""How long a connection may take for its proof."""
ANSWER_LIMIT_S: Final = 10.0
"""How long an answer may take to be read."""
DIAL_S: Final = 2.0
"""How long a dial may take: one segment that is lost is sent again after a second."""
SAMPLE_S: Final = 8.0
"""How long a sample may take: 4 Mbit/s."""
SAMPLE_BYTES: Final = 4 << 20
"""Of the longest sample: a third of a second at 100 Mbit/s."""
TURN_S: Final = 0.05
"""How long the event loop has to turn before it is said to be late."""
PAUSE_S: Final = 0.1
"""Before the next look where descriptors or memory ran out."""

_STOP_WAIT_S: Final = 1.0


class _Asker:
    """One connection, and what it is still to read."""

    def __init__(self, sock: socket.socket, token: str | None) -> None:
        self.sock = sock
        self.handshake = ServerHandshake(token, purpose=PURPOSE)
        self.said = memoryview(b"")
        self.thinking = False
        """Whether a thread finds the answer."""
        self.until_s = monotonic() + PROOF_LIMIT_S

    def step(self, answer: Callable[[_Asker, bytes], None]) -> bool:
        """Take what has come, and say what can be said. Returns whether to go on."""
        try:
            if not self.said:
                data = self.sock.recv(MAX_HANDSHAKE_BYTES)
                if not data or self.thinking:
                    return False
                self.say(self.handshake.receive(data))
                if self.handshake.done:
                    self.until_s = monotonic() + ANSWER_LIMIT_S
                    answer(self, self.handshake.context)
            self.said = self.said[self.sock.send(self.said) :]
        except (BlockingIOError, InterruptedError):
            return True
        except AuthenticationError as error:
            with contextlib.suppress(OSError):
                self.sock.send(error.farewell)
            return False
        return bool(self.said) or self.thinking or not self.handshake.done

    def say(self, data: bytes) -> None:
        self.said = memoryview(bytes(self.said) + data)


class Endpoint:
    """Answers on `sockets`, which listen and do not block, until `close`. `on_close` is called then.

    Without a token only this user is answered, by Unix socket.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], token: str | None, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self._sockets = list(sockets)
        self._token = token
        self._on_close = on_close
        self._askers: list[_Asker] = []
        self._turns: dict[asyncio.AbstractEventLoop, _Turn] = {}
        self._wake, self._woken = socket.socketpair()
        self._found: deque[tuple[_Asker, bytes]] = deque()
        """Answers that threads have found."""
        self._closing = False
        close_in_forked_child(self)
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and hang up on who asks. Does nothing in a forked child."""
        if not self._closing:
            self._closing = True
            self._wake.close()
            self._on_close()
            self._thread.join(_STOP_WAIT_S)

    def close_after_fork(self) -> None:
        """In the child there is no such thread, and the connections are the parent's."""
        self._closing = True
        for sock in (*self._sockets, *(asker.sock for asker in self._askers), self._wake, self._woken):
            if (fd := sock.detach()) >= 0:
                os.close(fd)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the program's threads
        pause_s: float | None = None
        while not self._closing:
            try:
                self._look(pause_s)
                pause_s = None
            except OSError as error:  # descriptors or memory ran out
                info("whoever asks what this process does has to wait: %s", error)
                pause_s = PAUSE_S
        for sock in (*self._sockets, *(asker.sock for asker in self._askers), self._woken):
            sock.close()

    def _look(self, pause_s: float | None) -> None:
        """Sleep until somebody asks, or reads, or has taken too long; and do what there is to do."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        answered = sum(asker.handshake.done for asker in self._askers)
        listening = {} if pause_s or answered >= MAX_ASKERS else {sock.fileno(): sock for sock in self._sockets}
        asking = {asker.sock.fileno(): asker for asker in self._askers}
        for descriptor in listening:
            poll.register(descriptor, select.POLLIN)
        for descriptor, asker in asking.items():
            poll.register(descriptor, select.POLLOUT if asker.said else select.POLLIN)
        until_s = [asker.until_s for asker in self._askers] + ([monotonic() + pause_s] if pause_s else [])
        ready = poll.poll(1000 * max(0.0, min(until_s) - monotonic()) if until_s else None)
        if (self._woken.fileno(), select.POLLIN) in ready:
            self._woken.recv(MAX_ASKERS)
        while self._found:
            asker, found = self._found.popleft()
            asker.thinking = False
            asker.say(found)
        for descriptor, _ in ready:
            if descriptor in asking:
                self._go_on_with(asking[descriptor])
        for asker in [asker for asker in self._askers if asker.until_s <= monotonic()]:
            self._drop(asker)
        for descriptor, _ in ready:
            if descriptor in listening:
                self._accept(listening[descriptor])

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        own = sock.family == socket.AF_UNIX and may_ask(sock)
        if own or self._token is not None:
            strangers = [asker for asker in self._askers if not asker.handshake.done]
            if len(strangers) >= MAX_HALF_OPEN:
                self._drop(strangers[0])
            self._askers.append(_Asker(sock, None if own else self._token))
        else:
            sock.close()

    def _go_on_with(self, asker: _Asker) -> None:
        go_on = False
        with contextlib.suppress(OSError):
            go_on = asker.step(self._answer)
        if not go_on:
            self._drop(asker)

    def _drop(self, asker: _Asker) -> None:
        self._askers.remove(asker)
        asker.sock.close()

    def _answer(self, asker: _Asker, question: bytes) -> None:
        found = _tried(lambda: self._find(question))
        if not callable(found):
            asker.say(_packed(found))
            return

        def find() -> None:
            self._found.append((asker, _packed(_tried(found))))
            with contextlib.suppress(OSError):  # it is closed
                self._wake.send(b"!")

        asker.thinking = True
        threading.Thread(target=find, name=THREAD, daemon=True).start()

    def _find(self, question: bytes) -> Any:
        """The answer, or what finds it in a thread."""
        if question.startswith(STOPPED):
            return is_stopped(int(question[len(STOPPED) :]))
        if question.startswith(SAMPLE):
            return bytes(min(int(question[len(SAMPLE) :]), SAMPLE_BYTES))
        worlds = [(facts, group) for facts in list(RECORDER.worlds) if (group := facts.group()) is not None]
        documents = self._documents(NOW if question.startswith(SPEED) else question, worlds)
        if not question.startswith((NETWORK, SPEED)):
            return documents

        def look() -> list[dict[str, Any]]:
            with ThreadPoolExecutor(len(worlds) or 1) as threads:
                networks = threads.map(lambda world: world[1].network(question), worlds)
                return [one | {"network": network} for one, network in zip(documents, networks, strict=True)]

        return look

    def _documents(self, question: bytes, worlds: Sequence[tuple[GroupFacts, Recorded]]) -> list[dict[str, Any]]:
        parts = {"under_way": question in (NOW, WAITS), "with_tasks": question != NOW}
        loops = {group.loop for _, group in worlds}
        now_s = monotonic()
        self._turns = {loop: self._turns.get(loop) or _Turn(loop, now_s) for loop in loops}
        for turn in self._turns.values():
            turn.turned.wait(max(0.0, now_s + TURN_S - monotonic()))
        asked, self._turns = self._turns, {loop: each for loop, each in self._turns.items() if each.turned_s is None}
        found = []
        for facts, group in worlds:
            described = document(facts.rank, "asked", **parts)
            described |= asked[group.loop].described()
            described["job"] = os.environ.get("ASYNCDIST_JOB_ID", "")
            described["threads"].pop(f"{THREAD} ({threading.get_ident()})", None)
            described["world"] = {"id": f"{facts.group_id:016x}", "name": facts.name, "size": len(facts.ranks)}
            found.append(described)
        return found


def extra_s(question: bytes) -> float:
    """How long a process may take to find out what it is asked."""
    return SAMPLE_S if question.startswith((SAMPLE, SPEED)) else DIAL_S if question.startswith(NETWORK) else 0.0


def _tried(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # whatever it is, it is no reason to answer nobody any more
        info("cannot say what this process does: %r", error)
        return []


def _packed(found: Any) -> bytes:
    said = found if isinstance(found, bytes) else json.dumps(found, separators=(",", ":")).encode()
    return LENGTH.pack(len(said)) + said


class _Turn:
    """The next turn of an event loop, asked for now."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        self.turned = threading.Event()
        self.turned_s: float | None = None
        self._asked_s = now_s
        place: Place | None = getattr(loop, "place", None)
        self._thread = place.thread if place else getattr(loop, "_thread_id", None) or threading.main_thread().ident
        self._cpu_s = self._thread_cpu_s()
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(self._now)

    def described(self) -> dict[str, Any]:
        """Whether it has turned, how long that took or takes since, and how much its thread computed meanwhile."""
        turned_s = self.turned_s
        if turned_s is not None:
            return {"loop_turns": True, "loop_late": round(turned_s - self._asked_s, 6)}
        late_s, cpu_s = monotonic() - self._asked_s, self._thread_cpu_s() - self._cpu_s
        return {"loop_turns": False, "loop_late": round(late_s, 6), "loop_cpu": round(cpu_s, 6)}

    def _thread_cpu_s(self) -> float:
        if self._thread not in sys._current_frames():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))

    def _now(self) -> None:
        self.turned_s = monotonic()
        self.turned.set()


def name_of(job: str, world: str, rank: int) -> str:
    """How the name of the Unix socket begins on which that rank is asked: who is silent can be told by it."""
    return f"{NAME}{hashlib.sha256(f'{job}/{world}'.encode()).hexdigest()[:8]}-{rank}-"


def may_ask(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user, which can read the memory of this one.

    One of another container is not, though users have the same numbers there.
    """
    pid, user = peer_credentials(sock)
    if user != os.geteuid():
        return False
    try:
        return sys.platform != "linux" or os.path.samefile(f"/proc/{pid}/ns/pid", "/proc/self/ns/pid")
    except OSError:
        return False
