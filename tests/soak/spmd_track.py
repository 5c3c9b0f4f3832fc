"""One track of a random program on one rank: issues its steps, awaits them in another order, judges every result."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from spmd_issued import ALL, Issued
from spmd_memory import Pool
from spmd_messages import Operations
from spmd_program import COLLECTIVES, MESSAGES, Program, Step, Track, draw_step
from spmd_values import Array

import asyncdist as dist
from asyncdist.group.deadlines import PROBE_S

STALL_S = 0.3
"""Time-out of collectives that a rank leaves out."""
ENDING_TAGS = (990, 991, 992)
"""Beyond the track's: of what a rank leaves out, of what is called later, of messages after it."""
GIVEN_UP = "given up after a fault"
ON_PURPOSE = "on purpose"


class WrongError(AssertionError):
    """A result, an error, or the lack of one that the program does not explain."""


class FaultHeard(Exception):
    """The fault of this program has ended the track."""


class Fault:
    """What a rank has heard of the program's fault."""

    def __init__(self, program: Program) -> None:
        self.culprit = -1 if program.fault is None else program.fault.rank
        self.kind = "" if program.fault is None else program.fault.kind
        self.struck = asyncio.Event()
        self.heard: list[tuple[str, float]] = []
        self.leaving = False
        """This rank is the culprit, and issues no more."""

    def hear(self, where: str, error: dist.DistError, *, message: bool) -> None:
        """Note what it did to an operation. Raises WrongError for what it does not explain.

        Survivors that have heard of it give up, and with that end the messages under way between them; after a goodbye
        that was heard by messages only, collectives as well.
        """
        named = isinstance(error, dist.PeerLostError | dist.GroupAbortedError) and error.rank == self.culprit
        gone = getattr(error, "left", False) or getattr(error, "reason", "") == GIVEN_UP
        if not named and not (gone and (message or self.kind == "leave")):
            raise WrongError(f"{where}: {error!r}, cause {error.__cause__!r}") from error
        if named:
            self.heard.append((where, time.time()))
        self.struck.set()

    def depends(self, group: dist.ProcessGroup, on: int | None) -> bool:
        """Whether an operation that depends on that group rank must end with the culprit.

        A receive from any source is one that need not: posted after the loss, it waits for those who are left.
        """
        return on is not None and self.culprit in (group.ranks if on == ALL else [group.ranks[on]])


class TrackRun:
    """See the module."""

    def __init__(
        self,
        program: Program,
        track: Track,
        group: dist.ProcessGroup,
        rank: int,
        fault: Fault,
        late_s: float,
        doing: Callable[[str], None],
    ) -> None:
        self.program, self.track, self.group, self.fault, self._say = program, track, group, fault, doing
        self.endless = program.endless(track, rank)
        self.where = (program.seed % 1000, track.world, track.number)
        self.own = random.Random(repr((program.seed, track.world, track.number, rank)))
        self.pool = Pool(self._allocate, self.own)
        self.flight: list[Issued] = []
        self.late_s = late_s

    def _allocate(self, octets: int) -> Array:
        if self.own.random() < 0.5:
            try:
                return self.group.empty(octets, np.uint8)
            except dist.DistError:  # aborted
                pass
        return np.empty(octets, np.uint8)

    async def run(self) -> None:
        """All steps; of an endless track, until the fault ends it."""
        try:
            await self._all_steps()
        except FaultHeard:
            await self._after_fault()
        except asyncio.CancelledError:
            self._cancelled()
            raise

    def check(self) -> None:
        """Raise WrongError if memory was written that was free; nothing is under way."""
        self.pool.check()
        if self.pool.problems:
            raise WrongError(f"{self.group.name} tag {self.track.tag}: {self.pool.problems}")

    async def _all_steps(self) -> None:
        operations = self._operations(self.group, self.track.tag)
        for number in itertools.count():
            if self.fault.leaving if self.endless else number >= len(self.track.steps):
                break
            step = self.track.steps[number % len(self.track.steps)]
            if step.kind == "nested":
                await self._nested(number)
                continue
            await self._issue(operations, step, number)
            while len(self.flight) >= self.track.window:
                await self._settle(self.flight.pop(self.own.randrange(len(self.flight))))
        while self.flight:
            await self._settle(self.flight.pop(self.own.randrange(len(self.flight))))
        if self.track.ending:
            await (self._stall() if self.track.ending == "stall" else self._abort())

    def _operations(self, group: dist.ProcessGroup, tag: int, *where: int) -> Operations:
        operations = Operations(group, tag, (*self.where, *where), self.pool, self.own)
        operations.late_s = self.late_s
        return operations

    async def _issue(self, operations: Operations, step: Step, number: int) -> None:
        name = f"{operations.group.name} number {number} ({step})"
        self._say(name)
        try:
            issued = operations.issue(step, number)
        except dist.DistError as error:  # part of it may be under way
            operations.now.partly = True
            self.flight.append(operations.now)
            self._failed(operations.now, error)
        self.flight.append(issued)
        if issued.after is not None:
            try:
                wrong = await issued.after()
            except dist.DistError as error:
                self._failed(operations.now, error)
            if wrong:
                raise WrongError(f"{name}: {wrong}")
        chance = self.own.random()
        if chance < 0.08:
            await asyncio.sleep(self.own.random() * 0.004)
        elif chance < 0.12:
            time.sleep(self.own.random() * 0.004)  # noqa: ASYNC251  # it computes
        if issued.stream is not None:  # nothing else is issued meanwhile
            self.flight.remove(issued)
            await self._settle(issued)

    async def _settle(self, issued: Issued) -> None:
        """Await its works in any order, some twice, and judge what they gave."""
        self._say(f"settles {issued.name}, in flight {[each.name for each in self.flight]}")
        order = list(range(len(issued.works)))
        self.own.shuffle(order)
        results: list[Any] = [None] * len(order)
        self.flight.append(issued)
        for index in order:
            work = issued.works[index]
            try:
                if issued.stream is not None:
                    await self._consume(issued)
                if self.own.random() < 0.1 and not work.operation.startswith(("recv", "send")):  # which that withdraws
                    await self._cancel_waiter(work)
                results[index] = await work
            except dist.DistError as error:
                self._failed(issued, error)
        self.flight.remove(issued)
        wrong = issued.judge(results)
        for loan in issued.zero_copy:
            self.pool.give_back(loan)
        if wrong or self.pool.problems:
            raise WrongError("\n".join([*wrong, *self.pool.problems]))

    async def _cancel_waiter(self, work: dist.Work[Any]) -> None:
        async def wait() -> None:
            await work

        waiter = asyncio.create_task(wait())
        waiter.add_done_callback(lambda task: task.cancelled() or task.exception())  # where this is cancelled itself
        await asyncio.sleep(self.own.choice((0, self.own.random() * 0.002)))
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)

    async def _consume(self, issued: Issued) -> None:
        """Take some chunks of a stream, or all, or none; the work goes on all the same."""
        stream, parts = issued.stream, issued.parts
        assert stream is not None
        assert parts is not None
        how = self.own.choice(("all", "all", "some", "none"))
        left = self.own.randint(1, 5) if how == "some" else 1 << 30
        seen = dict.fromkeys(parts, 0)
        if how != "none":
            async for chunk in stream:
                part = parts[chunk.source]
                at, end = chunk.start, chunk.start + chunk.data.size
                if at != seen[chunk.source] or not np.array_equal(chunk.data, part[at:end]):
                    raise WrongError(f"{issued.name}: the chunk of {chunk.source} at {at} is wrong")
                seen[chunk.source] = end
                left -= 1
                if not left:
                    break
            else:
                if seen != {rank: part.size for rank, part in parts.items()}:
                    raise WrongError(f"{issued.name}: the stream ended at {seen}")
        await stream.aclose()

    async def _nested(self, number: int) -> None:
        """Make a group out of the track's, use it, and perhaps close it."""
        dice = random.Random(repr((self.where, number, "nested")))
        group = self.group
        chosen = dice.sample(range(group.size), dice.randint(1, group.size))
        members = [group.ranks[index] for index in chosen]
        self._say(f"{group.name} number {number}: a group of {members}")
        made: Any
        if dice.random() < 0.3:
            made = dist.split_group(group, [[index] for index in range(group.size)] if group.size < 3 else [chosen])
        elif dice.random() < 0.3:
            if group.world.rank not in members:
                return
            made = dist.new_group(members, group=group, use_local_synchronization=True)
        else:
            made = dist.new_group(members, group=group, sort_ranks=False)
        if not isinstance(made, dist.ProcessGroup):
            return
        operations = self._operations(made, 0, number)
        outer, self.flight = self.flight, []
        for index in range(dice.randint(1, 5)):
            await self._issue(operations, draw_step(dice, dice.choice(COLLECTIVES + MESSAGES)), index)
        while self.flight:
            await self._settle(self.flight.pop())
        self.flight = outer
        if dice.random() < 0.7:
            await made.close()

    # What goes wrong.

    def _depends(self, issued: Issued, index: int) -> bool:
        return self.fault.depends(self.group, issued.depends[index])

    def _failed(self, issued: Issued, error: dist.DistError) -> NoReturn:
        if not self.endless:
            raise WrongError(f"{issued.name}: {error!r}, cause {error.__cause__!r}") from error
        self.fault.hear(issued.name, error, message=issued.message)
        raise FaultHeard

    async def _after_fault(self) -> None:
        """All that depends on the culprit must end as well, and what ends well must have been right."""
        while self.flight:
            issued = self.flight[-1]
            self._say(f"after the fault: {issued.name}")
            results, failed = [], False
            for index, work in enumerate(issued.works):
                depends = self._depends(issued, index)
                try:
                    if not depends and not work.done():
                        failed = True
                        continue
                    results.append(await work)
                except dist.DistError as error:
                    failed = True
                    self.fault.hear(issued.name, error, message=issued.message)
            self.flight.pop()
            wrong = [] if failed or issued.partly or issued.after else issued.judge(results)
            if wrong:
                raise WrongError("after the fault: " + "\n".join(wrong))

    def _cancelled(self) -> None:
        """Of a survivor, when it has waited long enough."""
        hung = [
            f"{issued.name}: work {index}"
            for issued in self.flight
            for index, work in enumerate(issued.works)
            if not work.done() and self._depends(issued, index)
        ]
        if self.fault.struck.is_set() and hung:
            raise WrongError(f"not ended by the fault: {hung}")

    async def _stall(self) -> None:
        """One member leaves a collective out: all hear of it in time; messages go on, and so can the others."""
        group, mine = self.group, self.group.rank == self.track.culprit
        culprit = group.ranks[self.track.culprit]
        left_out, later, after = (self.track.tag + beyond for beyond in ENDING_TAGS)
        dice = random.Random(repr((self.where, "ending")))
        self._say(f"{group.name}: rank {culprit} leaves a collective out")
        begun_s = time.monotonic()
        try:
            await group.barrier(tag=self.track.tag)  # which may end well elsewhere, and not here
            begun_s = time.monotonic()
            if mine:
                await group.barrier(tag=later)
            for _ in range(dice.randint(1, 3)):
                await group.all_reduce(np.ones(dice.choice((1, 5000, 600_000))), tag=left_out, timeout=STALL_S)
            raise WrongError(f"{group.name}: a collective went well without rank {culprit}")
        except (dist.CollectiveTimeoutError, dist.GroupAbortedError) as error:
            cause = error.__cause__ if isinstance(error, dist.GroupAbortedError) else error
            if not isinstance(cause, dist.CollectiveTimeoutError) or culprit not in cause.missing:
                raise WrongError(
                    f"{group.name}: {error!r}, cause {cause!r}, for what rank {culprit} left out"
                ) from error
        took_s = time.monotonic() - begun_s
        if took_s > STALL_S + PROBE_S + self.late_s:
            raise WrongError(f"{group.name}: timed out after {took_s:.2f} s")
        await self._must_be_aborted(later)
        there, here = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        got = np.zeros(70_000)
        sent = group.isend(np.full(70_000, float(group.rank)), there, after)
        await group.recv(got, here, after)
        await sent
        if not (got == here).all():
            raise WrongError(f"{group.name}: a message after the time-out is wrong")
        if not mine:
            smaller = dist.shrink_group([self.track.culprit], group)
            data = np.ones(5000)
            await smaller.all_reduce(data)
            if not (data == smaller.size).all():
                raise WrongError(f"{group.name}: wrong after it was shrunk")
        await group.close()

    async def _abort(self) -> None:
        """One member gives the group up: so it is on all others, and its arrays are free."""
        group, culprit = self.group, self.group.ranks[self.track.culprit]
        tag = self.track.tag + ENDING_TAGS[0]
        self._say(f"{group.name}: rank {culprit} gives it up")
        try:
            await group.barrier(tag=self.track.tag)  # which may end well elsewhere, and not here
            if group.rank == self.track.culprit:
                await asyncio.sleep(self.own.random() * 0.01)
                group.abort(ON_PURPOSE)
            while True:
                await group.all_reduce(np.ones(self.own.choice((1, 600_000)) if group.size == 1 else 5000), tag=tag)
        except dist.GroupAbortedError as error:
            if error.rank != culprit or ON_PURPOSE not in str(error):
                raise WrongError(f"{group.name}: {error!r} for what rank {culprit} gave up") from error
        await self._must_be_aborted(tag)
        await group.close()

    async def _must_be_aborted(self, tag: int) -> None:
        try:
            await self.group.barrier(tag=tag)
        except dist.GroupAbortedError:
            return
        raise WrongError(f"{self.group.name} is usable after it was aborted")
