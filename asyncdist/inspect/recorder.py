"""The recorder: a ring of the newest operations of this process, always on.

To record an operation costs some hundred nanoseconds: a list is made of what is at hand, and nothing is formatted
before somebody asks (`dumps`). An entry holds facts, never arrays, errors, frames or tasks: those would live for as
long as the ring remembers them.

Ranks of one process share the ring, which has room for the operations of each.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from time import monotonic
from types import CodeType, FrameType
from typing import Any, Final, Protocol, TypeAlias
from weakref import ref

__all__ = [
    "ENDED",
    "ENTRIES",
    "ISSUED",
    "NBYTES",
    "NOTE",
    "PEER",
    "RECORDER",
    "SHAPE",
    "Entry",
    "GroupFacts",
    "Recorded",
]

ENTRIES: Final = 2000
"""Operations remembered of each rank: two seconds of a thousand a second, in some 600 KB."""

CODES_KEPT: Final = 256
"""Functions that are known to be the user's, or ours: a program has some dozens that issue operations."""
_OURS: Final = frozenset({"asyncdist", "asyncio", "concurrent", "uvloop"})
_getframe: Final = sys._getframe
# asyncio's own is a function of Python before 3.12, and a message counts nanoseconds.
_current_task: Final[Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]] = (
    asyncio.current_task if sys.version_info >= (3, 12) else vars(asyncio.tasks)["_current_tasks"].get
)

Entry: TypeAlias = list[Any]
"""What is known of one operation, at the places below; the last two of messages and events only.

PLACE: tag and sequence number of a collective, the tag of a message. SHAPE: the `Call.recipe_key` of a collective, the
dtype and shape of a message as they travel, the keys of a store. GROUP: its `GroupFacts`; None of a store. CODE and AT:
the calling line, as code and instruction. TASK: a weak reference to the task, or its name. ISSUED and ENDED: as
`time.monotonic` has it, or None. NOTE: what went wrong, as text; or the group rank that was waited for last, as number.
PEER: a global rank, -1 for any.
"""
PLACE, OPERATION, SHAPE, GROUP, CODE, AT, TASK, ISSUED, ENDED, NOTE, PEER, NBYTES = range(12)


class Recorded(Protocol):
    """What a group says of its operations when somebody asks."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it belongs to."""

    def algorithm_of(self, recipe_key: tuple[Any, ...]) -> str:
        """The algorithm of calls like this one; empty if it is not known."""

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks a collective under way has not heard from."""

    def transport_to(self, rank: int) -> str:
        """What carries the messages to and from global rank `rank`."""


class GroupFacts:
    """What entries know of their group; it does not keep the group alive."""

    __slots__ = ("group", "group_id", "name", "rank", "ranks")

    def __init__(self, rank: int, group_id: int, name: str, ranks: tuple[int, ...], group: Recorded) -> None:
        """`rank` is the global rank of this member."""
        self.rank = rank
        self.group_id = group_id
        self.name = name
        self.ranks = ranks
        self.group = ref(group)


class Recorder:
    """See the module. `record` may be called by any thread."""

    def __init__(self) -> None:
        self.on = True
        """False for measurements of what it costs."""
        self.entries: deque[Entry] = deque(maxlen=ENTRIES)
        self.worlds: list[GroupFacts] = []
        """Those of this process that are open."""
        self.callers: dict[int, CodeType] = {}
        """By address: code that is known to be the user's."""
        self._ours: dict[int, CodeType] = {}

    def message(self, facts: GroupFacts, tag: int, work: Any, meta: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Record a message that is issued now, by who called whom our caller's caller was called by."""
        frame = _getframe(4)
        code, at = frame.f_code, frame.f_lasti
        if id(code) not in self.callers:
            code, at = self.caller(frame)
        task = _current_task(loop)
        name = None if task is None else task.get_name()
        entry = [tag, work.operation, meta, facts, code, at, name, monotonic(), None, None, work.peer, work.nbytes]
        work.entry = entry
        self.entries.append(entry)

    def wait(self, operation: str, keys: Any, loop: asyncio.AbstractEventLoop) -> Entry:
        """Record that the store is asked for what other clients are to do."""
        code, at = self.caller(_getframe(3))
        task = _current_task(loop)
        name = None if task is None else task.get_name()
        entry = [None, operation, keys, None, code, at, name, monotonic(), None, None]
        self.entries.append(entry)
        return entry

    def caller(self, frame: FrameType | None) -> tuple[Any, int]:
        """Code and instruction of the first frame from `frame` on that is not of ours; None where there is none."""
        while frame is not None:
            code = frame.f_code
            if id(code) not in self._ours:
                if id(code) in self.callers:
                    return code, frame.f_lasti
                ours = (frame.f_globals.get("__package__") or "").partition(".")[0] in _OURS
                known = self._ours if ours else self.callers
                if len(known) >= CODES_KEPT:
                    known.clear()
                known[id(code)] = code
                continue
            frame = frame.f_back
        return None, 0

    def event(self, group: GroupFacts, what: str, peer: int | None = None, error: object = None) -> None:
        """Record what has become of a group or a rank."""
        now_s = monotonic()
        text = None if error is None else str(error)
        entry = [None, what, None, group, None, 0, None, now_s, now_s, text, peer, 0]
        self.entries.append(entry)

    def made(
        self, rank: int, group_id: int, name: str, ranks: tuple[int, ...], group: Recorded, *, is_world: bool
    ) -> GroupFacts:
        """A group was made: return what its entries are to know. There is room for each rank of this process."""
        facts = GroupFacts(rank, group_id, name, ranks, group)
        if is_world:
            self.worlds.append(facts)
            self._resize()
        self.event(facts, f"group of {len(ranks)} made")
        return facts

    def closed(self, group: GroupFacts) -> None:
        """A group is closed."""
        self.event(group, "group closed")
        if group in self.worlds:
            self.worlds.remove(group)
            self._resize()

    def _resize(self) -> None:
        room = max(1, len(self.worlds)) * ENTRIES
        if room != self.entries.maxlen:
            self.entries = deque(self.entries, room)


RECORDER: Final = Recorder()
"""That of this process."""
