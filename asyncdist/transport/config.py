"""Knobs of the transport, read once when a group is initialised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from asyncdist.concurrency.deadline import DEFAULT_TIMEOUT_S
from asyncdist.concurrency.spin import DEFAULT_SPIN_US, spin_us_from_environ
from asyncdist.transport.host_memory import DEFAULT_SHARED_BYTES
from asyncdist.transport.keepalive import DEFAULT_KEEPALIVE_S, keepalive_from_environ
from asyncdist.transport.socket_dir import check_directory

T = TypeVar("T")

TRANSPORTS: Final = ("auto", "shm", "unix", "tcp")
"""Values of ASYNCDIST_TRANSPORT."""
SINGLE_COPY: Final = ("auto", "permit", "off")
"""Values of ASYNCDIST_SINGLE_COPY."""
HUGE_PAGES: Final = ("auto", "off")
"""Values of ASYNCDIST_HUGE_PAGES."""
CONNECT_TIMEOUT_S: Final = 60.0
"""Longest a peer may be out of reach at first, address look-up and retries included. A listener exists before its
address is published, so only a slow network or a dead peer needs more than milliseconds."""
HELLO_TIMEOUT_S: Final = 5.0
"""Longest an accepted socket may take for its hello: its process has just connected, so it is not busy."""
SILENT_TIMEOUT_S: Final = DEFAULT_TIMEOUT_S
"""Longest wait for a peer whose kernel accepts connections but which says nothing. The process exists, so its loop is
busy (loading a model, say): that is for the operation's time-out to judge, not for ours."""
LATE_S: Final = 0.1
"""A timer that fires so late was held up by this very loop, which has not seen either what has come meanwhile."""
MAX_HALF_OPEN: Final = 512
"""Accepted sockets without a hello. Beyond that, connections wait in the kernel's queue, which is what a
burst of honest ranks needs, and a flood of strangers costs at most this many descriptors."""

MAX_STREAMS: Final = 64
"""Connections of a pair: more than any network needs, and each side may hold copies of 4 MiB for each."""


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How a mesh connects. `transport` is one of `TRANSPORTS`; times are in seconds.

    `local_ranks` is how many ranks share the host's cores, as far as that is known. Ranks that connect count as well.
    `ports` are those that ranks may listen on, None for any. A pair of ranks that uses TCP has `streams` connections,
    spread over `interfaces`; both are the same on all ranks. `streams` 0: one for each interface.
    """

    transport: str = "auto"
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    hello_timeout_s: float = HELLO_TIMEOUT_S
    silent_timeout_s: float = SILENT_TIMEOUT_S
    backoff_first_s: float = 0.02
    backoff_limit_s: float = 2.0
    max_half_open: int = MAX_HALF_OPEN
    socket_dir: str = ""
    spin_us: float = DEFAULT_SPIN_US
    shared_bytes: int = DEFAULT_SHARED_BYTES
    arrays_bytes: int | None = None
    single_copy: str = "auto"
    huge_pages: str = "auto"
    keepalive_s: float = DEFAULT_KEEPALIVE_S
    local_ranks: int = 1
    ports: range | None = None
    interfaces: int = 1
    streams: int = 0

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one host may talk through shared memory."""
        return self.transport in ("auto", "shm")

    @property
    def uses_unix(self) -> bool:
        """Whether ranks of one host may connect by Unix socket, which sharing memory needs too."""
        return self.transport != "tcp"

    @property
    def uses_tcp(self) -> bool:
        """Whether ranks may connect by TCP."""
        return self.transport in ("auto", "tcp")

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r}: use one of {', '.join(TRANSPORTS)}")
        if not self.streams:
            object.__setattr__(self, "streams", self.interfaces)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], interfaces: int = 1) -> TransportConfig:
        """Read ASYNCDIST_TRANSPORT and the like; raises ValueError for what cannot be."""
        word = _word_from_environ(environ, "ASYNCDIST_TRANSPORT", TRANSPORTS)
        directory = environ.get("ASYNCDIST_SOCKET_DIR", "").strip() if word != "tcp" else ""
        if directory:
            check_directory(directory)
        return cls(
            transport=word,
            socket_dir=directory,
            spin_us=spin_us_from_environ(environ),
            shared_bytes=_bytes_from_environ(environ, "ASYNCDIST_SHM_BYTES", DEFAULT_SHARED_BYTES),
            arrays_bytes=_bytes_from_environ(environ, "ASYNCDIST_EMPTY_BYTES", None),
            single_copy=single_copy_from_environ(environ),
            huge_pages=_word_from_environ(environ, "ASYNCDIST_HUGE_PAGES", HUGE_PAGES),
            keepalive_s=keepalive_from_environ(environ),
            local_ranks=_local_ranks(environ),
            ports=ports_from_environ(environ),
            interfaces=interfaces,
            streams=_streams_from_environ(environ),
        )


def single_copy_from_environ(environ: Mapping[str, str]) -> str:
    """Read ASYNCDIST_SINGLE_COPY: whether ranks of a host read each other's memory. Raises ValueError."""
    return _word_from_environ(environ, "ASYNCDIST_SINGLE_COPY", SINGLE_COPY)


def _word_from_environ(environ: Mapping[str, str], name: str, words: Sequence[str]) -> str:
    """The word that a variable says, by default the first of `words`."""
    word = environ.get(name, "").strip().lower() or words[0]
    if word not in words:
        raise ValueError(f"{name}={word!r}: use one of {', '.join(words)}")
    return word


def _local_ranks(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_WORLD_SIZE", "").strip()  # the launcher has said so if this is no number
    return int(text) if text.isascii() and text.isdigit() else 1


def ports_from_environ(environ: Mapping[str, str]) -> range | None:
    """Read ASYNCDIST_PORT_RANGE: the ports that may be listened on, None for any. Raises ValueError."""
    text = environ.get("ASYNCDIST_PORT_RANGE", "").strip()
    if not text:
        return None
    first, dash, last = (part.strip() for part in text.partition("-"))
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in (first, last if dash else first)]
    if not 0 < numbers[0] <= numbers[1] < 65536:
        raise ValueError(f"ASYNCDIST_PORT_RANGE={text!r}: give the first and the last port, such as 20000-20099")
    return range(numbers[0], numbers[1] + 1)


def _streams_from_environ(environ: Mapping[str, str]) -> int:
    text = environ.get("ASYNCDIST_STREAMS", "").strip()
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_STREAMS):
        raise ValueError(f"ASYNCDIST_STREAMS={text!r}: give a number of connections from 1 to {MAX_STREAMS}")
    return int(text or 0)


def _bytes_from_environ(environ: Mapping[str, str], name: str, default: T) -> int | T:
    text = environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r}: give a number of bytes")
    return int(text) if text else default
