"""Control messages: what ranks tell each other beside the data.

On the wire a message is a msgpack list: its kind, then its fields in the order in which they stand here. Texts and
lists are cut so that any message fits a control frame. What comes from a peer is hostile: `decode` raises
RemoteProtocolError for anything but a message whose ranks, tags and numbers are within bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, TypeAlias

import msgpack

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.addresses import MAX_ADDRESS_BYTES

__all__ = [
    "MAX_RANKS_NAMED",
    "MAX_TEXT",
    "Abort",
    "Addresses",
    "Check",
    "Clock",
    "Closed",
    "ControlMessage",
    "GroupMessage",
    "Made",
    "Mismatch",
    "Probe",
    "Ran",
    "Refused",
    "Shrink",
    "Status",
    "decode",
]

MAX_TEXT: Final = 4096
"""Characters of a reason sent to others: a long message, and with the ranks well below a control frame's 64 KiB."""
MAX_RANKS_NAMED: Final = 4096
"""Missing ranks sent to others; nobody reads more of them."""
_MAX_TAGS: Final = 1 << 32
"""In keys of messages tags have 32 bits."""
_MAX_NUMBERS: Final = 1 << 63
"""Operations and groups are counted without end; msgpack goes no further."""

_Shape: TypeAlias = tuple[type | tuple[type, ...], ...]


@dataclass(frozen=True)
class ControlMessage:
    """A message of `KIND`, whose fields have the types in `SHAPE`."""

    KIND: ClassVar[str]
    SHAPE: ClassVar[_Shape]

    def encode(self) -> bytes:
        """The message as it travels."""
        parts = [_bounded(getattr(self, field.name)) for field in fields(self)]
        payload: bytes = msgpack.packb([self.KIND, *parts])
        return payload

    def is_valid(self, world_size: int) -> bool:
        """Whether the fields are within bounds."""
        raise NotImplementedError


@dataclass(frozen=True)
class GroupMessage(ControlMessage):
    """About a group."""

    group_id: int


@dataclass(frozen=True)
class OperationMessage(GroupMessage):
    """About a place in the order of a group's collectives."""

    tag: int
    sequence: int

    def is_valid(self, world_size: int) -> bool:
        return _below(_MAX_TAGS, self.tag) and _below(_MAX_NUMBERS, self.sequence)


@dataclass(frozen=True)
class Abort(GroupMessage):
    """The group is aborted; `kind` is one of asyncdist.group.abort_reasons."""

    KIND = "abort"
    SHAPE = (int, str, str, (int, type(None)), list)
    kind: str
    text: str
    rank: int | None
    missing: list[int]

    def is_valid(self, world_size: int) -> bool:
        named = self.missing if self.rank is None else [*self.missing, self.rank]
        return all(_below(world_size, rank) for rank in named)


@dataclass(frozen=True)
class Refused(OperationMessage):
    """`rank` refused that collective at the call."""

    KIND = "refused"
    SHAPE = (int, int, int, int, str)
    rank: int
    text: str

    def is_valid(self, world_size: int) -> bool:
        return super().is_valid(world_size) and _below(world_size, self.rank)


@dataclass(frozen=True)
class Probe(OperationMessage):
    """Have you issued that collective?"""

    KIND = "probe"
    SHAPE = (int, int, int)


@dataclass(frozen=True)
class Status(OperationMessage):
    """The answer: ISSUED, or one of ABSENCES (`asyncdist.world.world`)."""

    KIND = "status"
    SHAPE = (int, int, int, str)
    state: str


@dataclass(frozen=True)
class Mismatch(OperationMessage):
    """The two ranks differ there: this rank runs `text`. If `asked`, what does the other one run?"""

    KIND = "mismatch"
    SHAPE = (int, int, int, str, bool)
    text: str
    asked: bool


@dataclass(frozen=True)
class Check(OperationMessage):
    """This rank has issued that: the answer to a probe, or part of a full check."""

    KIND = "check"
    SHAPE = (int, int, int, str, str)
    terms: str
    shown: str


@dataclass(frozen=True)
class Ran(GroupMessage):
    """This rank leaves the world. `words` are tag, sequence, terms and description of what it ran last."""

    KIND = "ran"
    SHAPE = (int, list)
    words: list[Any]

    def is_valid(self, world_size: int) -> bool:
        return all(_is_word(word) for word in self.words)


@dataclass(frozen=True)
class Made(GroupMessage):
    """As group `number` made of this one, this rank has made `made_id` of `ranks`. If `asked`, what has the other?"""

    KIND = "made"
    SHAPE = (int, int, int, str, bool)
    number: int
    made_id: int
    ranks: str
    asked: bool

    def is_valid(self, world_size: int) -> bool:
        return _below(_MAX_NUMBERS, self.number)


@dataclass(frozen=True)
class Closed(GroupMessage):
    """This rank has closed the group, or its parent without making it. If `asked`, say so when you have."""

    KIND = "closed"
    SHAPE = (int, int, bool)
    parent_id: int
    asked: bool

    def is_valid(self, world_size: int) -> bool:
        return True


@dataclass(frozen=True)
class Shrink(GroupMessage):
    """A step of agreement `number` on the survivors of the group; see `asyncdist.group.consensus`."""

    KIND = "shrink"
    SHAPE = (int, int, str, int, list, list)
    number: int
    step: str
    ballot: int
    ranks: list[int]
    lost: list[int]

    def is_valid(self, world_size: int) -> bool:
        ranks = [*self.ranks, *self.lost]
        numbers = all(_below(_MAX_NUMBERS, number) for number in (self.number, self.ballot))
        return numbers and all(_below(world_size, rank) for rank in ranks)


@dataclass(frozen=True)
class Addresses(ControlMessage):
    """Where `first` and the ranks after it listen; see `asyncdist.world.address_book`."""

    KIND = "addresses"
    SHAPE = (int, list)
    first: int
    addresses: list[bytes]

    def is_valid(self, world_size: int) -> bool:
        good = all(isinstance(one, bytes) and 0 < len(one) <= MAX_ADDRESS_BYTES for one in self.addresses)
        last = self.first + len(self.addresses) - 1
        return good and _below(world_size, self.first) and _below(world_size, last)


@dataclass(frozen=True)
class Clock(ControlMessage):
    """What time is it there? The asker's clock when it asked and, in the answer, the other one's, since 1970."""

    KIND = "clock"
    SHAPE = (float, (float, type(None)))
    asked_s: float
    answered_s: float | None

    def is_valid(self, world_size: int) -> bool:
        return math.isfinite(self.asked_s + (self.answered_s or 0.0))


_KINDS: Final[dict[str, type[ControlMessage]]] = {
    kind.KIND: kind
    for kind in (Abort, Refused, Probe, Status, Mismatch, Check, Ran, Made, Closed, Shrink, Addresses, Clock)
}


def decode(rank: int, payload: bytes, world_size: int) -> ControlMessage:
    """The message of `rank`. Raises RemoteProtocolError for anything malformed."""
    try:
        parts: Any = msgpack.unpackb(payload, max_array_len=MAX_RANKS_NAMED, max_map_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"rank {rank} sent a control message that is not msgpack") from error
    kind = _KINDS.get(parts[0]) if isinstance(parts, list) and parts and isinstance(parts[0], str) else None
    if kind is not None and len(parts) == len(kind.SHAPE) + 1 and all(map(isinstance, parts[1:], kind.SHAPE)):
        message = kind(*parts[1:])
        if message.is_valid(world_size):
            return message
        if kind is Addresses:
            raise RemoteProtocolError(f"rank {rank} sent malformed addresses")
    raise RemoteProtocolError(f"rank {rank} sent a malformed control message")


def _bounded(part: Any) -> Any:
    """Cut texts and lists; texts may hold what no UTF-8 can."""
    if isinstance(part, str):
        return part[:MAX_TEXT].encode(errors="backslashreplace").decode()
    return [_bounded(one) for one in part[:MAX_RANKS_NAMED]] if isinstance(part, list) else part


def _is_word(word: Any) -> bool:
    match word:
        case [int(tag), int(number), str(), str()]:
            return _below(_MAX_TAGS, tag) and _below(_MAX_NUMBERS, number)
    return False


def _below(limit: int, value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < limit
