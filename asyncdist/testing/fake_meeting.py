"""Where the ranks of a fake communicator meet: in one process directly, or through one process's Unix socket.

A slot is an operation's place in the order. The meeting collects what the ranks bring to a slot, and gives all of it to
every rank once all ranks that take part have come with the same words. As with NCCL, all ranks wait for ever if one
rank has other words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

import msgpack

DUPLICATE: Final = "ncclInvalidUsage: Duplicate GPU detected : ranks {} and {} both on CUDA device {}"


@dataclass(slots=True)
class Slot:
    """One operation's contributions by rank."""

    expected: tuple[int, ...]
    words: dict[int, str] = field(default_factory=dict)
    contributions: dict[int, bytes] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    @property
    def agreed(self) -> bool:
        """Whether all ranks have come with the same words."""
        return len(self.words) == len(self.expected) and len(set(self.words.values())) == 1


class Meeting(ABC):
    """One communicator, from its ranks' side."""

    size: int
    failure: str = ""
    """Why no rank can use it."""

    violations: list[str]

    @abstractmethod
    def join(self, rank: int, device_id: str) -> None:
        """Join; the meeting is `complete` once all ranks have joined."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether all ranks have joined."""

    @abstractmethod
    def bring(self, slot: str, rank: int, expected: Sequence[int], words: str, contribution: bytes) -> None:
        """Bring `words` and `contribution` to a slot in which the ranks `expected` take part.

        Here and in `take` the receiver of a message has its rank plus `size`, as the sender may be the same rank.
        """

    @abstractmethod
    def take(self, slot: str, rank: int) -> dict[int, bytes] | None:
        """All contributions of a slot, once to each rank; None until all are there."""

    def leave(self) -> None:  # noqa: B027 - nothing to do where there is no connection
        """Give up what the meeting holds for this rank."""


@contextlib.contextmanager
def _closing_under(lock: threading.Lock, connection: Connection[Any, Any]) -> Iterator[None]:
    """Close `connection` at the end of the block, while no other thread sends on it."""
    try:
        yield
    finally:
        with lock:
            connection.close()


class LocalMeeting(Meeting):
    """All ranks are in this process. `changed` is called when an operation may have become ready."""

    def __init__(self, size: int, changed: Callable[[], None], *, multi_rank_gpu: bool = False) -> None:
        self.size = size
        self.violations = []
        self._changed = changed
        self._multi_rank_gpu = multi_rank_gpu
        self._devices: dict[int, str] = {}
        self._slots: dict[str, Slot] = {}
        self._lock = threading.Lock()

    def join(self, rank: int, device_id: str) -> None:
        with self._lock:
            if rank in self._devices:
                self.failure = f"ncclInvalidArgument: rank {rank} joined twice"
            for other, device in self._devices.items():
                if device == device_id and not self._multi_rank_gpu and not self.failure:
                    self.failure = DUPLICATE.format(other, rank, device_id)
            self._devices[rank] = device_id
        self._changed()

    @property
    def complete(self) -> bool:
        return len(self._devices) == self.size

    def bring(self, slot: str, rank: int, expected: Sequence[int], words: str, contribution: bytes) -> None:
        with self._lock:
            place = self._slots.setdefault(slot, Slot(tuple(expected)))
            place.words[rank] = words
            place.contributions[rank] = contribution
            if len(set(place.words.values())) > 1:
                said = ", ".join(f"rank {who}: {what}" for who, what in sorted(place.words.items()))
                self.violations.append(f"operation {slot}: {said}")

    def take(self, slot: str, rank: int) -> dict[int, bytes] | None:
        with self._lock:
            place = self._slots.get(slot)
            if place is None or not place.agreed or not self.complete or self.failure:
                return None
            place.taken.add(rank)
            if len(place.taken) == len(place.expected):
                del self._slots[slot]
            return place.contributions


class RemoteMeeting(Meeting):
    """The ranks are in several processes. One of them serves (see `serve`), and this one is connected to it."""

    def __init__(self, address: Path, size: int, changed: Callable[[], None]) -> None:
        self.size = size
        self.violations = []
        self._changed = changed
        self._complete = False
        self._results: dict[tuple[str, int], dict[int, bytes]] = {}
        self._connection: Connection[Any, Any] = Client(str(address), "AF_UNIX")
        self._lock = threading.Lock()
        self._send("size", size)
        threading.Thread(target=self._listen, name="fake NCCL", daemon=True).start()

    def join(self, rank: int, device_id: str) -> None:
        self._send("join", rank, device_id)

    @property
    def complete(self) -> bool:
        return self._complete

    def bring(self, slot: str, rank: int, expected: Sequence[int], words: str, contribution: bytes) -> None:
        self._send("bring", slot, rank, list(expected), words, contribution)

    def take(self, slot: str, rank: int) -> dict[int, bytes] | None:
        return self._results.pop((slot, rank), None)

    def leave(self) -> None:
        # Closing it is for the thread that reads from it.
        with self._lock, contextlib.suppress(OSError):
            descriptor = os.dup(self._connection.fileno())
            with socket.socket(fileno=descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _send(self, *message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the serving process is dead: nothing happens any more
            self._connection.send_bytes(msgpack.packb(message))

    def _listen(self) -> None:
        with _closing_under(self._lock, self._connection), contextlib.suppress(OSError, EOFError):
            while True:
                kind, *fields = msgpack.unpackb(self._connection.recv_bytes(), strict_map_key=False)
                if kind == "complete":
                    self._complete = True
                elif kind == "failure":
                    self.failure = fields[0]
                elif kind == "violation":
                    self.violations.append(fields[0])
                else:
                    self._results[fields[0], fields[1]] = fields[2]
                self._changed()


def serve(address: Path, *, multi_rank_gpu: bool = False) -> Callable[[], None]:
    """Let the ranks of one communicator meet at `address` from now on, in threads of this process.

    Returns a function that ends this: no more ranks can join.
    """
    server = _Server(Listener(str(address), "AF_UNIX", backlog=128), address, multi_rank_gpu)
    threading.Thread(target=server.accept, name="fake NCCL", daemon=True).start()
    return server.close


class _Server:
    """Holds the meeting for all connections."""

    def __init__(self, listener: Listener, address: Path, multi_rank_gpu: bool) -> None:
        self._listener = listener
        self._address = address
        self._closed = False
        self._multi_rank_gpu = multi_rank_gpu
        self._meeting: LocalMeeting | None = None
        self._lock = threading.Lock()
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._told: set[str] = set()

    def accept(self) -> None:
        with self._listener, contextlib.suppress(OSError, EOFError):
            while not self._closed and (self._meeting is None or len(self._connections) < self._meeting.size):
                connection = self._listener.accept()
                threading.Thread(target=self._listen, args=(connection,), name="fake NCCL", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError), Client(str(self._address), "AF_UNIX"):
            pass  # wakes the thread

    def _listen(self, connection: Connection[Any, Any]) -> None:
        with _closing_under(self._lock, connection), contextlib.suppress(OSError, EOFError):
            while True:
                kind, *fields = msgpack.unpackb(connection.recv_bytes())
                with self._lock:
                    self._take(connection, kind, fields)

    def _take(self, connection: Connection[Any, Any], kind: str, fields: list[Any]) -> None:
        if kind == "size":
            if self._meeting is None:
                self._meeting = LocalMeeting(fields[0], lambda: None, multi_rank_gpu=self._multi_rank_gpu)
            return
        if self._meeting is None:
            return
        if kind == "join":
            self._connections[fields[0]] = connection
            self._meeting.join(*fields)
        else:
            self._meeting.bring(*fields)
            self._hand_out(fields[0], fields[2])
        self._tell()

    def _hand_out(self, slot: str, expected: Sequence[int]) -> None:
        assert self._meeting is not None
        results = [(rank, self._meeting.take(slot, rank)) for rank in dict.fromkeys(expected)]
        for rank, contributions in results:
            if contributions is not None:
                self._send(rank % self._meeting.size, "result", slot, rank, contributions)

    def _tell(self) -> None:
        """Send all ranks the news, each once."""
        meeting = self._meeting
        assert meeting is not None
        news = [("violation", text) for text in meeting.violations]
        news += [("failure", meeting.failure)] if meeting.failure else []
        news += [("complete", "")] if meeting.complete else []
        for kind, text in news:
            if kind + text not in self._told:
                self._told.add(kind + text)
                for rank in self._connections:
                    self._send(rank, kind, text)

    def _send(self, rank: int, *message: Any) -> None:
        connection = self._connections.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):  # a dead rank
                connection.send_bytes(msgpack.packb(message))
