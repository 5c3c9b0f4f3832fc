"""One rank of a random SPMD program.

    python -m spmd_rank SEED LATE_S FOLDER

Prints `ready` when its first world is open, and at the end one line of JSON: what was wrong, what it has heard of the
program's fault and when. Prints what it is doing on SIGUSR1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import Any

import uvloop
from kill_soak_rank import mapped, open_files
from spmd_program import Program, Track, program
from spmd_track import GIVEN_UP, ON_PURPOSE, Fault, TrackRun, WrongError

import asyncdist as dist
from asyncdist.group.core import GroupCore

LONG_S = 120.0
LEFT_BEHIND_S = 3.0
"""How long descriptors and mappings may outlive their world; finalizers close some of them."""
CLOSED_S = 6.0
"""Leaving after a fault is bounded by LEAVE_LIMIT_S of asyncdist.world.world."""


class Rank:
    """See the module."""

    def __init__(self, made: Program, rank: int, late_s: float, folder: str) -> None:
        self.program, self.rank, self.late_s, self.folder = made, rank, late_s, folder
        self.fault = Fault(made)
        self.own = random.Random(repr((made.seed, "rank", rank)))
        self.doing: dict[str, str] = {}
        self.struck_s = 0.0
        self.unhandled: list[str] = []

    @property
    def culprit(self) -> bool:
        return self.fault.culprit == self.rank and self.fault.kind in ("leave", "raise", "abort")

    async def main(self) -> None:
        """Run all worlds. Raises WrongError, or what else a rank's program ended with."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: self.unhandled.append(str(context)[:800])
        )
        before = open_files(), mapped()
        worlds = range(self.program.worlds)
        for several in [worlds] if self.program.at_once else [[number] for number in worlds]:
            await self._run(list(several))
            if self.fault.struck.is_set():
                break
        await self._leaves_nothing(*before)
        if self.unhandled:
            raise WrongError(f"unhandled in the event loop: {self.unhandled}")

    async def _run(self, worlds: list[int]) -> None:
        """Run worlds at once, from their opening to their end."""
        groups: dict[int, dist.ProcessGroup]
        if self.program.seed % 2:
            groups = dict(zip(worlds, await asyncio.gather(*map(self._open, worlds)), strict=True))
        else:
            groups = {number: await self._open(number) for number in worlds}
        runs = [run for track in self.program.tracks if track.world in groups for run in self._made(track, groups)]
        if self.program.connects:
            for group in groups.values():
                await self._connect(group)
        print("ready", flush=True)
        tasks = {asyncio.create_task(run.run()): run for run in runs}
        last = self.program.worlds - 1
        failing = asyncio.create_task(self._fail(groups[last], tasks)) if self.culprit and last in groups else None
        await self._end(tasks)
        if failing is not None:
            await failing
        for run in runs:
            run.check()
        await asyncio.gather(*(self._close(number, group) for number, group in groups.items()))

    async def _open(self, number: int) -> dist.ProcessGroup:
        made = self.program
        where: dict[str, Any] = {}
        if made.meet == "file":
            where = {"init_method": f"file://{self.folder}/{number}", "rank": self.rank, "world_size": made.size}
        progress: Any = "thread" if made.threads[self.rank] else "loop"
        self.doing[f"world {number}"] = "opens"
        group = await dist.init_process_group(timeout=LONG_S, group_name=f"world{number}", progress=progress, **where)
        self.doing[f"world {number}"] = "is open"
        return group

    def _made(self, track: Track, groups: dict[int, dist.ProcessGroup]) -> list[TrackRun]:
        world = groups[track.world]
        group: Any = world
        if len(track.parts) > 1:
            group = dist.split_group(world, track.parts)
        elif track.parts:
            group = dist.new_group(track.parts[0], group=world, sort_ranks=False)
        if not isinstance(group, dist.ProcessGroup):
            return []
        name = f"world {track.world} track {track.number}"
        say = lambda text: self.doing.__setitem__(name, text)  # noqa: E731
        return [TrackRun(self.program, track, group, self.rank, self.fault, self.late_s, say)]

    async def _connect(self, group: dist.ProcessGroup) -> None:
        """A rank that is connected to none hears of none: who receives from any source is to be connected to all."""
        try:
            works: list[dist.Work[Any]] = []
            for rank in range(group.size):
                works += [group.isend(b"", rank), group.recv_array(rank)]
            for work in works:
                await work
        except dist.DistError as error:  # of a rank that was faster
            self.fault.hear("connecting", error, message=True)

    async def _end(self, tasks: dict[asyncio.Task[None], TrackRun]) -> None:
        """Wait for all tracks; once a fault was heard of, not for long for those that it is to end."""
        struck = asyncio.create_task(self.fault.struck.wait())
        pending: set[asyncio.Future[Any]] = {*tasks, struck}
        deadline_s = None
        while pending - {struck}:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {struck}:
                if not task.cancelled():
                    await task
            if struck in done:
                deadline_s = time.monotonic() + self.late_s
            if not done:  # too late
                deadline_s = None
                for task, run in tasks.items():
                    if run.endless:
                        task.cancel()
        struck.cancel()
        await asyncio.gather(struck, return_exceptions=True)

    async def _fail(self, group: dist.ProcessGroup, tasks: dict[asyncio.Task[None], TrackRun]) -> None:
        """What the program has gone wrong on this rank."""
        assert self.program.fault is not None
        await asyncio.sleep(self.program.fault.after_s)
        mine = [task for task, run in tasks.items() if run.endless]
        if self.fault.kind == "leave":
            self.fault.leaving = True
            await asyncio.gather(*mine, return_exceptions=True)  # it may have none; what went wrong is told elsewhere
        elif self.fault.kind == "raise":
            self.fault.leaving = True
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)
            error = RuntimeError(ON_PURPOSE)
            self.struck_s = time.time()
            await group.__aexit__(RuntimeError, error, None)
        else:
            self.struck_s = time.time()
            for run in [run for run in tasks.values() if run.endless]:
                run.group.abort(ON_PURPOSE)
            group.abort(ON_PURPOSE)

    async def _close(self, number: int, group: dist.ProcessGroup) -> None:
        self.doing[f"world {number}"] = "closes"
        last = number == self.program.worlds - 1
        begun_s = time.monotonic()
        failed = self.fault.struck.is_set() and (last or self.fault.kind == "kill")
        if failed:
            core: Any = group._core
            if isinstance(core, GroupCore):
                self._give_up(core)
            else:
                core.bridge.call(self._give_up, core.inner_core)
        try:
            await group.close()
        except dist.DistError as error:
            if not failed and not (self.culprit and last):
                raise WrongError(f"closing world {number}: {error!r}") from error
        if self.culprit and self.fault.kind == "leave" and last:
            self.struck_s = time.time()
        took_s = time.monotonic() - begun_s
        if failed and took_s > CLOSED_S + self.late_s:
            raise WrongError(f"world {number} took {took_s:.1f} s to close")
        self.doing[f"world {number}"] = "is closed"

    def _give_up(self, core: GroupCore) -> None:
        """Abort a world's groups that have the culprit for a member."""
        for one in [core, *core.inner()]:
            if self.fault.culprit in one.ranks:
                one.abort(GIVEN_UP)

    async def _leaves_nothing(self, files: dict[str, str], maps: int) -> None:
        deadline_s = time.monotonic() + LEFT_BEHIND_S
        while True:
            gc.collect()
            now = open_files()
            new = [
                what for fd, what in now.items() if files.get(fd) != what and ("asyncdist" in what or "socket" in what)
            ]
            left = {
                "open": new if sum("socket:" in what for what in now.values()) > len(files) else [],
                "mapped": mapped() - maps,
                "tasks": [task for task in asyncio.all_tasks() if task is not asyncio.current_task()],
                "threads": [thread.name for thread in threading.enumerate() if "asyncdist" in thread.name],
            }
            if not any(left.values()):
                return
            if time.monotonic() > deadline_s:
                raise WrongError(f"left behind: {left}")
            await asyncio.sleep(0.02)

    def show(self, *_: Any) -> None:
        """Say on standard error what every track is doing."""
        print("\n".join(f"{name}: {text}" for name, text in self.doing.items()), file=sys.stderr)
        faulthandler.dump_traceback()


def run(seed: int, late_s: float, folder: str) -> bool:
    """Run this process's rank; whether all was right."""
    made = program(seed)
    rank = Rank(made, int(os.environ["RANK"]), late_s, folder)
    signal.signal(signal.SIGUSR1, rank.show)
    problem = ""
    try:
        factory = uvloop.new_event_loop if made.loops[rank.rank] == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(rank.main())
    except WrongError as error:
        problem = str(error)
        print(f"rank {rank.rank}: {problem}", file=sys.stderr, flush=True)
    except BaseException:
        problem = traceback.format_exc()
        print(problem, file=sys.stderr, flush=True)
    print(json.dumps({"problem": problem, "heard": rank.fault.heard, "struck_s": rank.struck_s}), flush=True)
    return not problem


if __name__ == "__main__":
    right = run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(not right)
