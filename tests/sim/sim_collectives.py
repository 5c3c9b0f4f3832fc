"""Collectives of a simulated program: issued, awaited in all manners, and compared with numpy."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
from sim_exchanges import EXCHANGES, FROM_FEW, issue_exchange
from sim_judge import STALL_TIMEOUT_S, Judge, cancelled_wait
from sim_programs import ROOTED, STALL_TAG, Collective, Track, reduced, values

import asyncdist as dist
from asyncdist.work import Work


class CollectiveTracks(Judge):
    """The tracks of collectives."""

    async def _collectives(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        later: list[tuple[int, Collective, Issued]] = []
        for number, op in enumerate(track.collectives):
            dice = self.scenario.random(index, number, self.rank)
            if dice.random() < 0.4:
                await asyncio.sleep(dice.random() * 0.003)
            if await self._fault_here(index, number, track, group):
                break
            try:
                issued = self._issue(index, number, track, op, group)
            except dist.DistError as error:
                self._check_error(f"track {index} {op.kind} {number}", track, error, self.loop.time(), set(group.ranks))
                break
            if issued is None:
                continue
            how = dice.choice(("now", "now", "later", "cancel", "wait"))
            if how == "later":
                later.append((number, op, issued))
                continue
            if how == "cancel":
                await cancelled_wait(issued.work, dice.random() * 0.004)
            elif how == "wait":
                with contextlib.suppress(TimeoutError, dist.DistError):
                    await issued.work.wait(timeout=dice.random() * 0.004)
            if not await self._settle(index, number, track, op, group, issued):
                break
        for number, op, issued in later:
            await self._settle(index, number, track, op, group, issued)

    async def _fault_here(self, index: int, number: int, track: Track, group: dist.ProcessGroup) -> bool:
        """Stall here, if that is the fault."""
        fault = self.fault
        if fault is None or fault.kind != "stall" or not self.culprit or (index, number) != (fault.track, fault.index):
            return False
        self._strike()
        await asyncio.sleep(4)
        try:
            group.barrier(tag=track.tag)
            if any(other != self.rank and not self.journal.members[0, other].closed for other in group.ranks):
                self.journal.problem(f"rank {self.rank}: the group was not aborted though this rank stalled")
        except dist.DistError as error:
            self._check_error("after stalling", track, error, self.loop.time(), set(group.ranks))
        return True

    def _issue(self, index: int, number: int, track: Track, op: Collective, group: dist.ProcessGroup) -> Issued | None:
        fault = self.fault
        count = op.count
        timeout: dict[str, Any] = {}
        if fault is not None and index == fault.track and track.tag == STALL_TAG:
            if fault.kind == "stall":
                self.journal.issued_s[self.rank, number] = self.loop.time()
                timeout = {"timeout": STALL_TIMEOUT_S}
            elif fault.kind == "mismatch" and number == fault.index and self.culprit:
                self._strike()
                count += 3
        if op.refuser == group.rank:
            try:
                _call_wrongly(group, op, track.tag, self.scenario.random(index, number).randrange(3))
                self.journal.problem(f"rank {self.rank}: wrong arguments of {op.kind} were accepted")
            except (TypeError, ValueError):
                pass
            return None
        return Issued(self, (index, number), op, group, count, {"tag": track.tag, **timeout})

    async def _settle(
        self, index: int, number: int, track: Track, op: Collective, group: dist.ProcessGroup, issued: Issued
    ) -> bool:
        """Await the work and check what it gave; False ends the track."""
        where = f"rank {self.rank} track {index} {op.kind} {number}"
        refused = None
        try:
            await issued.work
        except dist.CollectiveMismatchError as error:
            refused = error
            if op.refuser is None or f"rank {group.ranks[op.refuser]} refused" not in str(error):
                known = self._check_error(where, track, error, issued.at_s, set(group.ranks))
                self.journal.mark(where, *issued.arrays)
                return not known and False
        except dist.DistError as error:
            self._check_error(where, track, error, issued.at_s, set(group.ranks))
            self.journal.mark(where, *issued.arrays)
            return False
        if op.refuser is not None:
            if refused is None and op.kind not in ROOTED + FROM_FEW and op.count and self.fault is None:
                self.journal.problem(f"{where}: ended well although rank {op.refuser} of the group refused it")
        elif not (self.fault is not None and self.fault.kind == "mismatch" and track.tag == STALL_TAG):
            issued.check(where)
        self.journal.mark(where, *issued.arrays)
        return True


class Issued:
    """A collective under way, and what it must give."""

    def __init__(
        self,
        run: Judge,
        place: tuple[int, int],
        op: Collective,
        group: dist.ProcessGroup,
        count: int,
        options: dict[str, Any],
    ) -> None:
        size, rank = group.size, group.rank
        self.at_s = run.loop.time()
        self.work: Work[Any]
        self.expected: list[tuple[np.ndarray, np.ndarray]] = []
        dtype = op.dtype
        everyone = [values(dtype, count, *place, other) for other in range(size)]
        mine = everyone[rank].copy()
        self.arrays: list[np.ndarray] = [mine]
        kind, reduce_op = op.kind, op.op

        def empty(shape: Any) -> np.ndarray:
            array = np.full(shape, 3, dtype)
            self.arrays.append(array)
            return array

        if kind in EXCHANGES:
            self.work, self.arrays, self.expected = issue_exchange(group, op, count, place, options)
        elif kind == "all_reduce":
            self.expected = [(mine, reduced(reduce_op, everyone))]
            self.work = group.all_reduce(mine, reduce_op, **options)
        elif kind == "broadcast":
            self.expected = [(mine, everyone[op.root])]
            self.work = group.broadcast(mine, op.root, **options)
        elif kind == "reduce":
            self.expected = [(mine, reduced(reduce_op, everyone) if rank == op.root else everyone[rank])]
            self.work = group.reduce(mine, op.root, reduce_op, **options)
        elif kind == "all_gather":
            blocks = [empty(count) for _ in range(size)]
            self.expected = list(zip(blocks, everyone, strict=True))
            self.work = group.all_gather(blocks, mine, **options)
        elif kind == "all_gather_into_tensor":
            flat = empty(count * size)
            self.expected = [(flat, np.concatenate(everyone))]
            self.work = group.all_gather_into_tensor(flat, mine, **options)
        elif kind == "all_gather_stacked":
            stacked = empty((size, count))
            self.expected = [(stacked, np.stack(everyone))]
            self.work = group.all_gather_into_tensor(stacked, mine, **options)
        elif kind == "gather":
            blocks = [empty(count) for _ in range(size)] if rank == op.root else []
            self.expected = list(zip(blocks, everyone, strict=True)) if blocks else []
            self.work = group.gather(mine, blocks or None, op.root, **options)
        elif kind == "scatter":
            out = empty(count)
            blocks = [block.copy() for block in everyone] if rank == op.root else []
            self.arrays += blocks
            self.expected = [(out, everyone[rank])]
            self.work = group.scatter(out, blocks or None, op.root, **options)
        elif kind == "reduce_scatter":
            sizes = [count + other * 3 for other in range(size)]
            parts = [[values(dtype, n, *place, other, to) for to, n in enumerate(sizes)] for other in range(size)]
            out = empty(sizes[rank])
            self.arrays += parts[rank]
            self.expected = [(out, reduced(reduce_op, [part[rank] for part in parts]))]
            self.work = group.reduce_scatter(out, parts[rank], reduce_op, **options)
        elif kind == "reduce_scatter_tensor":
            wholes = [values(dtype, count * size, *place, other) for other in range(size)]
            out = empty(count)
            self.arrays.append(wholes[rank])
            mine_part = slice(rank * count, (rank + 1) * count)
            self.expected = [(out, reduced(reduce_op, [whole[mine_part] for whole in wholes]))]
            self.work = group.reduce_scatter_tensor(out, wholes[rank], reduce_op, **options)
        else:
            self.work = group.barrier(**options)
        if kind == "reduce_scatter":  # `parts` shares the list with `expected` only by value
            self.expected = [(out, self.expected[0][1].copy())]

    def check(self, where: str) -> None:
        """Raise AssertionError unless every array holds what it must."""
        for array, expected in self.expected:
            assert np.array_equal(array, expected), f"{where}: wrong result"


def _call_wrongly(group: dist.ProcessGroup, op: Collective, tag: int, how: int) -> None:
    """Call the collective so that it is refused."""
    if how == 0:
        group.all_reduce("no array", tag=tag)
    elif how == 1:
        group.broadcast(np.zeros(3), group.size + 4, tag=tag)
    else:
        group.barrier(tag=tag, timeout=-1)
