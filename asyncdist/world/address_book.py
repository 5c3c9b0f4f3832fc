"""AddressBook: where the ranks of a world listen. A rank that has a whole one needs no store to reach the others.

Of a small world the decision that it has formed brings the whole book. Of a large one that would be as many answers of
the store as there are pairs of ranks; there the rank that took the decision has it, and the ranks pass it on to each
other in pieces, along a tree whose root that rank is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from asyncdist.transport.addresses import PeerAddress

TOLD_AT_ONCE_BYTES: Final = 64 << 10
"""Largest book that each rank gets from the store: that of some 500 ranks, as an address takes about 120 bytes. The
store then sends 30 MB in all, within the second that so many ranks take to join; of four times as many, 500 MB."""
PIECE_BYTES: Final = 32 << 10
"""Of addresses in one control message, unless one alone is larger: with its address of at most 4 KiB more, and what is
around it, it fits a control frame of 64 KiB."""
FAN_OUT: Final = 8
"""Ranks that one rank passes the book on to: 4,096 ranks are reached in four steps, and none connects to many more
than a collective would make it."""


class AddressBook:
    """What this rank knows of the addresses of a world; they are kept as they travel, and read when they are used."""

    def __init__(self, world_size: int, packed: Sequence[bytes] = ()) -> None:
        """`packed`: those of ranks 0, 1, and so on."""
        self._packed: list[bytes] = [*packed, *[b""] * (world_size - len(packed))]
        self._unknown = world_size - len(packed)

    @property
    def complete(self) -> bool:
        """Whether no address is missing."""
        return not self._unknown

    @property
    def told_at_once(self) -> bool:
        """Whether the store tells each rank the whole book."""
        return sum(map(len, self._packed)) <= TOLD_AT_ONCE_BYTES

    def packed(self) -> list[bytes]:
        """All addresses by rank, as they travel."""
        return self._packed

    def hosts(self) -> list[str]:
        """The host of each rank. Raises RemoteProtocolError for what is no address."""
        return [PeerAddress.from_bytes(packed).host_id for packed in self._packed]

    def get(self, rank: int) -> PeerAddress | None:
        """The address of `rank`, None if it is not known. Raises RemoteProtocolError if it is none."""
        packed = self._packed[rank]
        return PeerAddress.from_bytes(packed) if packed else None

    def learn(self, first: int, packed: Sequence[bytes]) -> None:
        """Take the addresses of ranks `first`, `first + 1` and so on, which are in the world."""
        for rank, address in enumerate(packed, first):
            self._unknown -= bool(address) and not self._packed[rank]
            self._packed[rank] = address

    def pieces(self) -> Iterator[tuple[int, list[bytes]]]:
        """The book in pieces: the first rank of each, and the addresses from there on."""
        first, piece, nbytes = 0, list[bytes](), 0
        for rank, address in enumerate(self._packed):
            if nbytes + len(address) > PIECE_BYTES and piece:
                yield first, piece
                first, piece, nbytes = rank, [], 0
            piece.append(address)
            nbytes += len(address)
        yield first, piece


def children_of(rank: int, root: int, world_size: int) -> list[int]:
    """Ranks that `rank` passes the book on to."""
    place = (rank - root) % world_size
    places = range(FAN_OUT * place + 1, min(FAN_OUT * (place + 1), world_size - 1) + 1)
    return [(root + child) % world_size for child in places]


def parent_of(rank: int, root: int, world_size: int) -> int:
    """The rank that `rank` has the book from; itself at the root."""
    place = (rank - root) % world_size
    return (root + (place - 1) // FAN_OUT) % world_size if place else rank
