"""What is noted while a simulated world runs, and which errors its fault explains."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
from sim_programs import Scenario, Track

import asyncdist as dist
from asyncdist.group.core import CLOSE_SENDS_S, core_of
from asyncdist.group.deadlines import PROBE_S
from asyncdist.testing import VirtualTimeLoop
from asyncdist.testing.world import SimulatedWorld
from asyncdist.transport.protocol.frame import CREDIT_BYTES, TRAFFIC_CLASSES
from asyncdist.work import Work

MARK = 99
"""Written into every array whose Work has ended: whoever reads or writes it later shows up."""
PROMPT_S = 2.0
"""Virtual seconds after a fault or the issue, whichever is later, within which an operation must have failed."""
STALL_TIMEOUT_S = 1.0
"""Time-out of collectives in a track where a rank stalls; nothing else takes nearly as long."""


class WatchedLoop(VirtualTimeLoop):
    """Notes what is left when the main task has ended, and lets the loop run on for late writes to show."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._main_ran = False
        self.set_exception_handler(lambda _loop, context: self.problems.append(f"unhandled in the loop: {context}"))

    def run_until_complete(self, future: Any) -> Any:
        """See the class."""
        try:
            return super().run_until_complete(future)
        finally:
            if not self._main_ran:
                self._main_ran = True
                left = [task for task in asyncio.all_tasks(self) if not task.done()]
                self.problems.extend(f"task left: {task!r}" for task in left)
                if not left:
                    super().run_until_complete(asyncio.sleep(1))


class Journal:
    """What all ranks of one run share."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.problems: list[str] = []
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.members: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.marked: list[tuple[str, np.ndarray]] = []
        self.fault_at_s: float | None = None
        self.issued_s: dict[tuple[int, int], float] = {}
        self.faulty: set[int] = set()
        self.done = 0
        self.all_done = asyncio.Event()
        self.struck = asyncio.Event()

    def problem(self, text: str) -> None:
        """Something was wrong."""
        self.problems.append(text)

    def mark(self, where: str, *arrays: np.ndarray) -> None:
        """The arrays are free: scribble on them, and see later whether anybody else did."""
        for array in arrays:
            if array.flags.writeable:
                array.fill(MARK)
                self.marked.append((where, array))

    def check_marks(self) -> None:
        """Nobody wrote what was free."""
        for where, array in self.marked:
            if not (array == MARK).all():
                self.problem(f"{where}: an array was written after its operation had ended")


class Judge:
    """One rank of a run, and what may become of its operations."""

    def __init__(self, journal: Journal, group: dist.ProcessGroup, world: SimulatedWorld) -> None:
        self.journal = journal
        self.scenario = journal.scenario
        self.group = group
        self.world = world
        self.rank = group.rank
        self.loop = asyncio.get_running_loop()
        self.groups: list[Any] = [group]
        fault = self.scenario.fault
        self.fault = fault
        self.culprit = fault is not None and fault.rank == self.rank

    @property
    def _breaks(self) -> bool:
        return self.fault is not None and self.fault.kind == "break" and self.fault.other == self.rank

    def _strike(self) -> None:
        if self.journal.fault_at_s is None:
            self.journal.fault_at_s = self.loop.time()
            self.journal.struck.set()

    def _check_error(
        self, where: str, track: Track | None, error: BaseException, since_s: float, members: set[int]
    ) -> bool:
        """Note an error that the fault does not explain; True if it is explained."""
        fault, now_s = self.fault, self.loop.time()
        text = f"rank {self.rank} at {now_s:.4f} s, {where}: {type(error).__name__}: {error}"
        if fault is None:
            self.journal.problem(text + " (nothing is wrong in this program)")
            return False
        if self.culprit and fault.kind == "kill":
            if not isinstance(error, dist.ClosedError | dist.PeerLostError | dist.GroupAbortedError):
                self.journal.problem(text + " (here, after being killed)")
            return True
        struck_s = self.journal.fault_at_s
        if struck_s is None and self._left_in_order(error):
            return True
        if struck_s is None:
            self.journal.problem(text + " (before the fault)")
            return False
        slack_s = PROMPT_S + {"stall": STALL_TIMEOUT_S, "leave": CLOSE_SENDS_S}.get(fault.kind, 0.0)
        if now_s > max(struck_s, since_s) + slack_s:
            self.journal.problem(text + f" (late: fault at {struck_s:.4f} s, issued at {since_s:.4f} s)")
        if where == "close" and "refused the operation" in str(error):
            return True  # nobody looked, because the track was over
        if not self._explained(fault.kind, error):
            self.journal.problem(text + f" (not what fault {fault.kind} explains)")
            return False
        return True

    def _explained(self, kind: str, error: BaseException) -> bool:
        fault = self.fault
        assert fault is not None
        rank = getattr(error, "rank", None)
        if self._left_in_order(error):
            return True
        if kind == "kill":
            return isinstance(error, dist.PeerLostError | dist.GroupAbortedError) and rank == fault.rank
        if kind == "leave":
            if self.culprit and isinstance(error, dist.ClosedError):
                return True
            return isinstance(error, dist.PeerLostError | dist.GroupAbortedError) and rank == fault.rank
        if kind in ("abort", "subgroup abort", "raise"):
            if isinstance(error, dist.PeerLostError) and error.left:  # it left before the two were connected
                return rank == fault.rank
            if kind == "raise" and isinstance(error, dist.ClosedError):
                return self.culprit
            return isinstance(error, dist.GroupAbortedError) and rank == fault.rank
        if kind == "break":
            both = (fault.rank, fault.other)
            if isinstance(error, dist.PeerLostError | dist.GroupAbortedError):
                return rank in both
            return isinstance(error, dist.CollectiveTimeoutError) and error.missing == (fault.other,)
        if kind == "stall":
            if self.culprit and isinstance(error, dist.PeerLostError):
                return error.left  # the others were done without it
            if self.culprit and isinstance(error, dist.CollectiveMismatchError):
                return True  # it went on with another operation than the others
            return self._explained_by_stall(error)
        assert kind == "mismatch"
        reason = error.__cause__ if isinstance(error, dist.GroupAbortedError) else error
        shown = (" runs ", " sent ", " expects ")  # what both run, or lengths that only one side of an exchange knows
        return isinstance(reason, dist.CollectiveMismatchError) and any(word in str(reason) for word in shown)

    def _left_in_order(self, error: BaseException) -> bool:
        """Whether a rank is named that had nothing left to do, or gave up, and was gone before the two could talk."""
        reason = error.__cause__ if isinstance(error, dist.GroupAbortedError) else error
        if not isinstance(reason, dist.PeerLostError) or not reason.left:
            return False
        return self.journal.members[0, reason.rank].closed

    def _explained_by_stall(self, error: BaseException) -> bool:
        if isinstance(error, dist.GroupAbortedError):
            return isinstance(error.__cause__, dist.CollectiveTimeoutError)
        if not isinstance(error, dist.CollectiveTimeoutError):
            return False
        found = re.search(r"#(\d+):? timed out", str(error))
        assert found is not None, error
        sequence = int(found[1])
        asked_s = self.loop.time() - PROBE_S - 0.01  # who issued it after that was rightly missing
        wrong = [rank for rank in error.missing if self.journal.issued_s.get((rank, sequence), asked_s) < asked_s]
        return not wrong and self.fault is not None and self.fault.rank in error.missing

    def _check_pair_error(
        self, where: str, track: Track, error: BaseException, since_s: float, group: dist.ProcessGroup, ends: set[int]
    ) -> None:
        """An error of point-to-point: the fault must concern this pair, not only the group."""
        if not self._check_error(where, track, error, since_s, set(group.ranks)):
            return
        fault = self.fault
        assert fault is not None
        reaches_all = fault.kind in ("abort", "subgroup abort", "raise") or "closed with sends" in str(error)
        if not reaches_all and fault.rank not in {*ends, self.rank}:
            self.journal.problem(f"{where}: {error} (point-to-point between survivors must go on)")
        if fault.kind in ("stall", "mismatch"):
            self.journal.problem(f"{where}: {error} (point-to-point must go on)")

    def _check_cores(self) -> None:
        """With everything done, nothing is kept anywhere."""
        mesh: Any = self.group.world.mesh
        problem = self.journal.problem
        if self.group.world.pool.lent:
            problem(f"rank {self.rank}: {self.group.world.pool.lent} scratch buffers are lost")
        for group in self.groups:
            if isinstance(group, dist.ProcessGroup) and ((core := core_of(group))._works or core.pairs._works):
                problem(f"rank {self.rank}: works are kept: {core._works} {core.pairs._works}")
        if mesh._any_source.table.entries or mesh._any_source._holders or mesh._any_source._stalled:
            problem(f"rank {self.rank}: receives from any source are kept")
        for other, peer in mesh._peers.items():
            core = peer.core
            kept = {name: count for name, count in core.statistics().items() if count and name != "credit"}
            if kept:
                problem(f"rank {self.rank} keeps for rank {other}: {kept}")
            back = self.world.network._meshes[self.world.world_id, other]._peers[self.rank].core
            for channel in range(TRAFFIC_CLASSES):
                credit = core._sender.windows[channel].credit
                credit += back._receiver.windows[channel].owed + back._sender.queue._credit_due[channel]
                if credit != CREDIT_BYTES:
                    problem(f"rank {self.rank}: {CREDIT_BYTES - credit} bytes of credit to rank {other} are lost")


async def cancelled_wait(work: Work[Any], after_s: float) -> None:
    """Await `work` in a task that is cancelled after a while; what the task got does not matter."""

    async def wait() -> None:
        await work

    task = asyncio.create_task(wait())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])
