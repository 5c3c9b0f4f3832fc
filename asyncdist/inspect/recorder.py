"""The recorder: a ring of the newest operations of this process, always on.

To record an operation costs some hundred nanoseconds: a list is made of what is at hand, and nothing is formatted
before somebody asks (`dumps`). An entry holds facts, never arrays, errors, frames or tasks: those would live for as
long as the ring remembers them.

Ranks of one process share the ring, which has room for the operations of each.
"""

from __future__ import annotations

import asyncio
import os
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
    "OURS",
    "PEER",
    "RECORDER",
    "SHAPE",
    "Compared",
    "Entry",
    "GroupFacts",
    "Recorded",
]

ENTRIES: Final = 2000
"""Operations remembered of each rank: two seconds of a thousand a second, in some 600 KB."""

OURS: Final = frozenset({"asyncdist", "asyncdist_server", "asyncio", "concurrent", "uvloop"})
# asyncio's own is a function of Python before 3.12, and a message counts nanoseconds.
_current_task: Final[Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]] = (
    asyncio.current_task if sys.version_info >= (3, 12) else vars(asyncio.tasks)["_current_tasks"].get
)

Site: TypeAlias = tuple[CodeType, int]
"""A line of a program, as code and instruction."""

Entry: TypeAlias = list[Any]
"""What is known of one operation, at the places below; the last two of messages and events only.

PLACE: tag and sequence number of a collective, the tag of a message. SHAPE: the `Call.recipe_key` of a collective, the
dtype and shape of a message as they travel, the keys of a store. GROUP: its `GroupFacts`; None of a store. SITE: the
calling line, or None. TASK: a weak reference to the task, or its name. ISSUED and ENDED: as
`time.monotonic` has it, or None. NOTE: what went wrong, as text; or the group rank that was waited for last, as number.
PEER: a global rank, -1 for any.
"""
PLACE, OPERATION, SHAPE, GROUP, SITE, TASK, ISSUED, ENDED, NOTE, PEER, NBYTES = range(11)


Compared: TypeAlias = dict[int, tuple[float, float]]
"""By rank of another host: within how many seconds it is known how many seconds its clock is ahead of this one."""


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

    def stopped(self, rank: int) -> bool:
        """Whether the process of global rank `rank` is known to be stopped, by a signal or by a debugger."""

    def network(self, question: bytes) -> dict[str, Any]:
        """What `endpoint.NETWORK` asks for. It takes seconds, and is called from a thread of its own."""


class GroupFacts:
    """What entries know of their group; it does not keep the group alive."""

    __slots__ = ("compared", "group", "group_id", "name", "rank", "ranks")

    def __init__(
        self, rank: int, group_id: int, name: str, ranks: tuple[int, ...], group: Recorded, compared: Compared
    ) -> None:
        """`rank` is the global rank of this member, `compared` what its world knows of clocks."""
        self.compared = compared
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
        self.sites = False
        """Whether to record which line issued an operation, for half a microsecond: where dumps are asked for."""

    def message(self, facts: GroupFacts, tag: int, work: Any, meta: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Record a message that is issued now."""
        site, task = (self.caller(), task_name(loop)) if self.sites else (None, None)
        work.entry = [tag, work.operation, meta, facts, site, task, monotonic(), None, None, work.peer, work.nbytes]
        self.entries.append(work.entry)

    def wait(self, operation: str, keys: Any, loop: asyncio.AbstractEventLoop) -> Entry:
        """Record that the store is asked for what other clients are to do."""
        entry = [None, operation, keys, None, self.caller(), task_name(loop), monotonic(), None, None]
        self.entries.append(entry)
        return entry

    def caller(self) -> Site | None:
        """The line of the program that called us: the innermost that is none of ours or of the event loop's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_globals.get("__package__") or "").partition(".")[0] in OURS:
            frame = frame.f_back
        return None if frame is None else (frame.f_code, frame.f_lasti)

    def event(self, group: GroupFacts, what: str, peer: int | None = None, error: object = None) -> None:
        """Record what has become of a group or a rank."""
        now_s = monotonic()
        text = None if error is None else str(error)
        entry = [None, what, None, group, None, None, now_s, now_s, text, peer, 0]
        self.entries.append(entry)

    def made(
        self,
        rank: int,
        group_id: int,
        name: str,
        ranks: tuple[int, ...],
        group: Recorded,
        compared: Compared,
        *,
        is_world: bool,
    ) -> GroupFacts:
        """A group was made: return what its entries are to know. There is room for each rank of this process."""
        facts = GroupFacts(rank, group_id, name, ranks, group, compared)
        if is_world:
            self.worlds.append(facts)
            self._resize()
            wanted = (
                os.environ.get("ASYNCDIST_CALL_SITES", "").strip() or os.environ.get("ASYNCDIST_DUMP_DIR", "").strip()
            )
            self.sites |= wanted not in ("", "0")
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
            self.entries = type(self.entries)(self.entries, room)


def task_name(loop: asyncio.AbstractEventLoop) -> str | None:
    """The name of the task that runs, if one does."""
    task = asyncio.current_task(loop)
    return None if task is None else task.get_name()


RECORDER: Final = Recorder()
"""That of this process."""
