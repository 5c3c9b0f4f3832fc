"""Which streams of which workers go to files and which to the terminal.

What torchrun's --redirects, --tee, --local-ranks-filter and --duplicate-...-filters say: parsed, with its meaning.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["LogSpec", "Streams", "parse_local_ranks", "parse_needles", "parse_streams"]

_STREAMS: Final = re.compile(r"[0-3]", re.ASCII)
_STREAMS_BY_RANK: Final = re.compile(r"\d{1,4}:[0-3](?:,\d{1,4}:[0-3])*", re.ASCII)
_RANKS: Final = re.compile(r"\d{1,4}(?:,\d{1,4})*", re.ASCII)


class Streams(enum.IntFlag):
    """A worker's standard streams, as torchrun numbers them."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


StreamsByRank = Streams | Mapping[int, Streams]


def parse_streams(text: str) -> StreamsByRank:
    """Parse `0` (none) to `3` (both) for all workers, or `0:1,3:2` by local rank, where the others have none.

    Raises ValueError for anything else, and for a local rank that is named twice.
    """
    text = text.strip()
    if _STREAMS.fullmatch(text):
        return Streams(int(text))
    if not _STREAMS_BY_RANK.fullmatch(text):
        raise ValueError(
            f"{text!r} is neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor these by local rank (0:3,1:2)"
        )
    streams: dict[int, Streams] = {}
    for entry in text.split(","):
        rank, _, number = entry.partition(":")
        if int(rank) in streams:
            raise ValueError(f"{text!r} names local rank {int(rank)} twice")
        streams[int(rank)] = Streams(int(number))
    return streams


def parse_local_ranks(text: str) -> frozenset[int] | None:
    """Parse `0,2`; None, all of them, for an empty text. Raises ValueError for anything else."""
    text = text.replace(" ", "")
    if not text:
        return None
    if not _RANKS.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of local ranks (0,2)")
    return frozenset(int(rank) for rank in text.split(","))


def parse_needles(text: str) -> tuple[str, ...]:
    """Parse a list of texts to look for, separated by commas, where `,,` is a comma. Empty ones are left out."""
    pieces = text.replace(",,", "\0").split(",")  # an argument cannot hold a NUL of its own
    return tuple(piece.replace("\0", ",") for piece in pieces if piece)


@dataclass(frozen=True, slots=True)
class LogSpec:
    """Where output goes. The default: to the terminal, and nothing into files.

    `redirects` go to a file only, `tee` to a file and to the terminal. `log_dir` is where a folder is made for each
    run; without one, and with something to put there, it is made where temporary files are. Of the workers that are
    not in `shown_ranks` (None: all) nothing goes to the terminal. Lines of stdout and of stderr that are teed and
    contain one of `stdout_needles` or `stderr_needles` are also collected in one file for all workers.
    """

    log_dir: str | None = None
    redirects: StreamsByRank = Streams.NONE
    tee: StreamsByRank = Streams.NONE
    shown_ranks: frozenset[int] | None = None
    stdout_needles: tuple[str, ...] = ()
    stderr_needles: tuple[str, ...] = ()

    def teed(self, local_rank: int) -> Streams:
        """Streams of a worker that are copied to a file."""
        return _of(self.tee, local_rank)

    def filed(self, local_rank: int) -> Streams:
        """Streams of a worker that go to a file."""
        return _of(self.redirects, local_rank) | self.teed(local_rank)

    def shown(self, local_rank: int) -> Streams:
        """Streams of a worker that go to the terminal."""
        if self.shown_ranks is not None and local_rank not in self.shown_ranks:
            return Streams.NONE
        return (Streams.ALL & ~self.filed(local_rank)) | self.teed(local_rank)

    @property
    def any_filed(self) -> bool:
        """Whether any worker's stream goes to a file."""
        return any(
            streams if isinstance(streams, Streams) else any(streams.values()) for streams in (self.redirects, self.tee)
        )

    @property
    def filters_nothing(self) -> bool:
        """Whether there are texts to look for, and nothing teed to look at."""
        tee = self.tee if isinstance(self.tee, Streams) else any(self.tee.values())
        return bool(self.stdout_needles or self.stderr_needles) and not tee

    def absent_ranks(self, nproc: int) -> list[int]:
        """The local ranks named here that a node with `nproc` workers has not."""
        named = set(self.shown_ranks or ())
        for streams in (self.redirects, self.tee):
            if not isinstance(streams, Streams):
                named |= set(streams)
        return sorted(rank for rank in named if rank >= nproc)


def _of(streams: StreamsByRank, local_rank: int) -> Streams:
    return streams if isinstance(streams, Streams) else streams.get(local_rank, Streams.NONE)
