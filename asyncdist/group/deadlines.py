"""The deadlines of a group's collectives, and which ranks are missing when a collective takes long.

One timer serves all operations under way. When a deadline passes, every member is connected to and asked whether it has
ever issued the operation. The members that have not, and those that do not answer, are missing.

Long before, from `ASK_S` on, the ranks that an operation waits for are asked the same. A rank that runs something else,
has closed the group or never made it is named at once. A rank that is only late costs a few messages, as each question
comes at twice the age of the one before.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from asyncdist.collectives.backend import CollectiveWork, WorkKey
from asyncdist.concurrency.tasks import start_task
from asyncdist.concurrency.trace import warn
from asyncdist.errors import CollectiveTimeoutError
from asyncdist.inspect.dumps import line_of, slow_s_from_environ
from asyncdist.transport.config import LATE_S
from asyncdist.world.control import Probe, Status
from asyncdist.world.world import ABSENCES, ISSUED, NOT_CALLED, World

T = TypeVar("T")

MONITORED_BARRIER: Final = "monitored_barrier"
"""The operation whose expiry on the group's first rank asks all members, however many: that is what it is for."""

ASK_S: Final = 0.5
"""How long the first operations of a group take at most where all is well and no rank computes. Then a message is worth
its price, and the error comes within a second."""

PROBE_S: Final = 0.5
"""How long members have to answer: a loop that cannot answer within half a second is stuck itself, and failures are to
name the rank within a second."""

MAX_PROBE_DIALS: Final = 256
"""Largest group of which all members are asked, connected or not. In larger ones, where all may ask at that moment,
connections for the question alone would be too many; there only connected ranks are found missing."""

STOP_ASKING_S: Final = 3600.0
"""Age at which an operation is no longer asked about: a loop that has nothing else to do is to end some time."""

LOOK_S: Final = 0.25
"""Least time between two looks at all operations, unless a deadline passes: else each of thousands of operations would
be asked about at a moment of its own."""

SLOW_NAMED: Final = 16
"""Ranks that the line of the log on a slow operation names."""
SILENT: Final = "no answer"
STOPPED: Final = "no answer: its process is stopped, by SIGSTOP or a debugger"
"""That of a rank which shares memory with this one, or whose launcher says so."""
NOT_HEARD_FROM: Final = "nothing came from there"
"""Why a member is missing that has not said why; what members say is in `world.ABSENCES`."""


def timeout_error(work: CollectiveWork, rank: int, missing: Mapping[int, str], why: str) -> CollectiveTimeoutError:
    """Return what all members raise when `work` expires on global rank `rank`; `missing` says why by global rank.

    `why` is a sentence on all of them, or empty.
    """
    text = f"{work.operation} #{work.sequence} timed out on rank {rank}"
    if missing:
        text += f"; missing: {_spelled(missing)}"
    if why:
        text += f". {why}"
    return CollectiveTimeoutError(text, missing)


def _spelled(whys: Mapping[int, str]) -> str:
    """`rank 1, 2 (not called there), 3 (no answer)`."""
    ranks = {why: ", ".join(str(rank) for rank in whys if whys[rank] == why) for why in whys.values()}
    return "rank " + ", ".join(f"{some} ({why})" for why, some in ranks.items())


class _Probe(NamedTuple):
    silent: set[int]
    """Members that have not answered."""
    absent: dict[int, str]
    """Why, by member that answered that it has not issued the operation."""
    timer: asyncio.TimerHandle


class Deadlines:
    """Watches `works`; calls `expired(work, missing, why)` when a deadline has passed.

    `missing` says which global ranks were missing, if known, and what each says; `why` is a sentence, or empty.
    """

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        works: Mapping[WorkKey, CollectiveWork],
        expired: Callable[[CollectiveWork, dict[int, str], str], None],
    ) -> None:
        self._world = world
        self._loop = world.loop
        self._group_id = group_id
        self._ranks = ranks
        self._works = works
        self._expired = expired
        self._timer: asyncio.Handle | None = None
        self._due_s = math.inf  # kept here, as uvloop makes a plain handle of a timer that is due at once
        self._probes: dict[WorkKey, _Probe] = {}
        self._slow_s = slow_s_from_environ(os.environ, world.loop)
        self._late: dict[WorkKey, dict[int, str]] = {}
        """What members have said of operations that take long."""
        self._told: set[WorkKey] = set()
        """Operations that a line of the log has spoken of."""
        self._asking: set[asyncio.Task[Any]] = set()
        self._why: asyncio.Task[str] | None = None
        """Asks why the operation does not end whose deadline has passed first: it is the one that the others follow."""
        self.askers: dict[int, int] = {}
        """Members that have waited long for a collective, and its tag: they are told when this group is closed here."""

    def watch(self, work: CollectiveWork, timeout_s: float | None) -> None:
        """Watch a work that has just been issued."""
        now_s = work.issued_s = self._loop.time()
        work.deadline_s = math.inf if timeout_s is None else now_s + timeout_s
        at_s = work.ask_at_s = now_s + ASK_S
        if work.deadline_s < at_s:
            at_s = work.deadline_s
        if at_s < self._due_s:
            self._restart(at_s)

    def ask(self, rank: int, tag: int, sequence: int) -> bool:
        """Ask one member, whatever the deadline; a member that runs anything in that place says what it is.

        False if the member is lost or has left.
        """
        return bool(self._world.tell((rank,), Probe(self._group_id, tag, sequence), dial=True))

    def answer_probe(self, rank: int, tag: int, sequence: int, issued: bool) -> None:
        """Answer a member's probe."""
        self.askers[rank] = tag
        state = ISSUED if issued else NOT_CALLED
        self._world.tell((rank,), Status(self._group_id, tag, sequence, state), dial=False)

    def answered(self, sender: int, tag: int, sequence: int, state: str) -> bool:
        """A member answered a probe. False if no deadline has passed that the probe was about."""
        if (tag, sequence) in self._works:
            self._late.setdefault((tag, sequence), {})[sender] = state
        probe = self._probes.get((tag, sequence))
        if probe is None:
            return False
        probe.silent.discard(sender)
        if state != ISSUED:
            probe.absent[sender] = state if state in ABSENCES else NOT_CALLED
        self._conclude_answered((tag, sequence))
        return True

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_s = math.inf
        for probe in self._probes.values():
            probe.timer.cancel()
        self._probes.clear()
        for asking in self._asking:
            asking.cancel()

    def _restart(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._check)
        self._due_s = at_s

    def _check(self) -> None:
        self._timer = None
        self._due_s = math.inf
        now_s = self._loop.time()
        upcoming_s = math.inf
        tags = set()
        for ended in self._late.keys() - self._works.keys():
            del self._late[ended]
        self._told &= self._works.keys()
        for key, work in list(self._works.items()):
            if work.deadline_s is None or key in self._probes:
                continue
            if work.deadline_s <= now_s:
                self._probe(key)
                continue
            if work.ask_at_s <= now_s:
                age_s = now_s - work.issued_s
                if key[0] not in tags:  # those behind the oldest of a tag wait for it
                    self._ask_late(work)
                    if age_s >= self._slow_s and key not in self._told:
                        self._log_slow(work, age_s)
                work.ask_at_s = now_s + age_s if age_s < STOP_ASKING_S else math.inf
                if now_s < work.issued_s + self._slow_s < work.ask_at_s:
                    work.ask_at_s = work.issued_s + self._slow_s
            tags.add(key[0])
            upcoming_s = min(upcoming_s, work.deadline_s, max(work.ask_at_s, now_s + LOOK_S))
        if upcoming_s < math.inf:
            self._restart(upcoming_s)

    def _ask_late(self, work: CollectiveWork) -> None:
        waited_for = work.waiting_for()
        self._world.tell(waited_for, Probe(self._group_id, *work.key), dial=len(waited_for) <= MAX_PROBE_DIALS)

    def _log_slow(self, work: CollectiveWork, age_s: float) -> None:
        """Say once in the log whom an operation waits for, and what these do, once they have been asked."""
        self._told.add(work.key)
        waited_for = work.waiting_for()[:SLOW_NAMED]
        silent = {rank: STOPPED if self._world.is_stopped(rank) else NOT_HEARD_FROM for rank in waited_for}
        telling = self._ask_and_log(work, age_s, silent)
        self._start(telling, "asks whom an operation waits for")

    def _start(self, asking: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = start_task(self._loop, asking, name=name)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _ask_and_log(self, work: CollectiveWork, age_s: float, silent: Mapping[int, str]) -> None:
        does: dict[int, str] = {}
        try:
            does = await self._world.doing(list(silent))
        finally:
            whys = {rank: self._late.get(work.key, {}).get(rank, why) for rank, why in silent.items()}
            whys |= {rank: f"{whys[rank]}: {what}" for rank, what in does.items()}
            site = "" if work.entry is None else line_of(work.entry)
            more = f"; called at {site}" if site else ""
            warn("%s: waits for %.0f s%s%s", work.where, age_s, f" for {_spelled(whys)}" if whys else "", more)

    def _probe(self, key: WorkKey) -> None:
        message = Probe(self._group_id, *key)
        monitors = self._works[key].operation == MONITORED_BARRIER and self._ranks[0] == self._world.rank
        asked = self._world.tell(self._ranks, message, dial=monitors or len(self._ranks) <= MAX_PROBE_DIALS)
        if key in self._works:
            self._probes[key] = _Probe(set(asked), {}, self._await_answers(key))
            if self._why is None and self._world.asks:
                about = {"group_id": f"{self._group_id:016x}", "tag": key[0], "sequence": key[1]}
                why = self._world.why(self._works[key].waiting_for(), about)
                self._why = self._start(why, "asks why an operation does not end")
                self._why.add_done_callback(self._know_why)

    def _know_why(self, _why: object) -> None:
        for key in list(self._probes):
            self._conclude_answered(key)

    def _conclude_answered(self, key: WorkKey) -> None:
        """All that was asked has been answered, perhaps; the time that is left for that bounds both."""
        probe = self._probes.get(key)
        if probe is not None and not probe.silent and (self._why is None or self._why.done()):
            self._conclude(key)

    def _await_answers(self, key: WorkKey) -> asyncio.TimerHandle:
        return self._loop.call_later(PROBE_S, self._no_more_answers, key, self._loop.time() + PROBE_S)

    def _no_more_answers(self, key: WorkKey, due_s: float) -> None:
        if self._loop.time() - due_s > LATE_S:  # answers may be here, unread
            self._probes[key] = self._probes[key]._replace(timer=self._await_answers(key))
        else:
            self._conclude(key)

    def _conclude(self, key: WorkKey) -> None:
        probe = self._probes.pop(key)
        probe.timer.cancel()
        work = self._works.get(key)
        asked, self._why = self._why, None
        if work is not None:
            why = asked.result() if asked is not None and asked.done() and not asked.cancelled() else ""
            stopped = {rank: STOPPED for rank in probe.silent if self._world.is_stopped(rank)}
            whys = dict.fromkeys(probe.silent, SILENT) | stopped | probe.absent
            self._expired(work, {rank: whys[rank] for rank in sorted(whys)}, why)
