"""Runs a `Scenario` in virtual time and checks what is promised of groups: right results, or the right error.

`run_scenario` raises AssertionError with all that was wrong.
"""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
from sim_collectives import CollectiveTracks
from sim_judge import Journal, WatchedLoop
from sim_messages import MessageTracks
from sim_programs import MAX_LATENESS_S, Scenario, Track

import asyncdist as dist
from asyncdist.testing.world import SimulatedWorld, run_world

__all__ = ["run_scenario"]

END_TAG = 999


class Leave(Exception):
    """A rank's program ends with this."""


def run_scenario(scenario: Scenario) -> Journal:
    """Run it. Raises AssertionError."""
    journal = Journal(scenario)
    loop = WatchedLoop()

    async def main(group: dist.ProcessGroup, world: SimulatedWorld) -> None:
        await RankRun(journal, group, world).run()

    try:
        run_world(
            scenario.size,
            main,
            seed=scenario.seed,
            latency_s=scenario.latency_s,
            timeout_s=scenario.timeout_s,
            loop_factory=lambda: loop,
            pass_world=True,
        )
    except Exception as error:
        journal.problem(f"run_world raised {error!r}")
    journal.check_marks()
    problems = journal.problems
    del main
    gc.collect(1)
    problems += loop.problems
    if problems:
        described = "\n  ".join(problems[:12])
        raise AssertionError(f"seed {scenario.seed}, {scenario.size} ranks, fault {scenario.fault}:\n  {described}")
    return journal


class RankRun(CollectiveTracks, MessageTracks):
    """One rank's part."""

    async def run(self) -> None:
        """From the first call to the end of `close`."""
        dice = self.scenario.random(self.rank)
        await asyncio.sleep(dice.choice((0, dice.random() * MAX_LATENESS_S)))
        for index, ranks in enumerate(self.scenario.groups[1:], 1):
            self.groups.append(dist.new_group(list(ranks), sort_ranks=False))
            if self.rank in ranks:
                self.journal.members[index, self.rank] = self.groups[index]
        self.journal.members[0, self.rank] = self.group
        if self.scenario.meets:
            await self.group.barrier(tag=END_TAG)
            await asyncio.sleep(MAX_LATENESS_S)  # by then all have passed it
        tracks = [
            asyncio.create_task(self._guarded(index, track), name=f"rank {self.rank} track {index} {track.what}")
            for index, track in enumerate(self.scenario.tracks)
            if self.rank in self.scenario.groups[track.group]
        ]
        breaker = asyncio.create_task(self._break()) if self.culprit or self._breaks else None
        left_with = None
        try:
            await self._tracks_done(tracks)
            if self.scenario.barrier:
                await self._end_together()
        except Leave as leave:
            left_with = leave
        kind = self._fault_kind
        if breaker is not None and kind == "break":
            await breaker
        elif breaker is not None and not breaker.done():
            breaker.cancel()
            await asyncio.gather(breaker, return_exceptions=True)
        if self.culprit:
            self.journal.struck.set()  # or it never will
        if (not self.culprit or kind == "break") and any(track.what != "collectives" for track in self.scenario.tracks):
            await self._others_done()  # what a rank gives up by leaving early is no news
        await self._close(dice, left_with)

    @property
    def _fault_kind(self) -> str:
        return self.fault.kind if self.fault is not None else ""

    async def _tracks_done(self, tracks: list[asyncio.Task[None]]) -> None:
        kind = self._fault_kind
        if self.culprit and kind in ("leave", "raise"):
            await asyncio.sleep(self.fault.after_s)  # type: ignore[union-attr]
            self._strike()
            for task in tracks:
                task.cancel()
            await asyncio.gather(*tracks, return_exceptions=True)
            if kind == "raise":
                raise Leave("mine")
            return
        await asyncio.gather(*tracks)

    async def _others_done(self) -> None:
        if self.fault is None:
            return
        self.journal.done += 1
        if self.journal.done == self.scenario.size - (self.fault.kind != "break"):
            self.journal.all_done.set()
        await self.journal.all_done.wait()
        if self.fault.kind not in ("stall", "mismatch"):  # those may never come to it
            await self.journal.struck.wait()

    async def _end_together(self) -> None:
        await self.group.barrier(tag=END_TAG)
        await asyncio.sleep(0.5)
        self._check_cores()
        await asyncio.sleep(0.5)

    async def _close(self, dice: random.Random, left_with: Leave | None) -> None:
        groups = [group for group in self.groups[1:] if isinstance(group, dist.ProcessGroup)]
        try:
            if left_with is not None:
                async with self.group:
                    raise left_with
            if dice.random() < 0.5:
                for group in groups:
                    await self._close_group(group)
            closers = [asyncio.create_task(self.group.close()) for _ in range(dice.choice((1, 1, 2)))]
            if dice.random() < 0.2:
                await asyncio.sleep(0)
                closers[-1].cancel()
            await asyncio.wait(closers)
            for closer in closers:
                if not closer.cancelled():
                    closer.result()
        except Leave:
            pass
        except dist.DistError as error:
            self._check_error("close", None, error, self.loop.time(), set(self.scenario.groups[0]))
        if not self.group.closed:
            self.journal.problem(f"rank {self.rank}: not closed after close")
        await self._close_group(self.group)  # raises what a canceled closer was to raise, else nothing

    async def _close_group(self, group: dist.ProcessGroup) -> None:
        try:
            await group.close()
        except dist.DistError as error:
            self._check_error("close", None, error, self.loop.time(), set(group.ranks))

    async def _break(self) -> None:
        fault = self.fault
        assert fault is not None
        await asyncio.sleep(fault.after_s)
        if self._breaks:
            return
        if fault.kind == "kill":
            self._strike()
            self.world.kill(self.rank)
        elif fault.kind == "abort":
            self._strike()
            self.group.abort("enough")
        elif fault.kind == "subgroup abort":
            self._strike()
            self.groups[1].abort("enough of this")
        elif fault.kind == "break":
            await asyncio.sleep(MAX_LATENESS_S)
            payload = np.zeros(200_000)
            try:
                await self.group.isend(payload, fault.other, 77, timeout=0.2)
                self.journal.problem(f"rank {self.rank}: a send nobody received did not expire")
            except dist.DistError:
                pass
            self._strike()
            self.journal.mark(f"rank {self.rank} expired send", payload)
            self.group.world.mesh.break_pair(fault.other, ConnectionResetError("the connection broke"))

    async def _guarded(self, index: int, track: Track) -> None:
        try:
            await getattr(self, f"_{track.what}")(index, track, self.groups[track.group])
        except (AssertionError, TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
            self.journal.problem(f"rank {self.rank} track {index} {track.what}: {error!r}")
