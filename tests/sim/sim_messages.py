"""Point-to-point messages of a simulated program, received in all manners."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np
from sim_judge import Judge, cancelled_wait
from sim_programs import PRELUDE_S, Track, values

import asyncdist as dist
from asyncdist.work import Work


class MessageTracks(Judge):
    """The tracks of messages."""

    async def _pair(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        jobs = []
        if group.rank == track.senders[0]:
            jobs.append(self._send_all(index, track, group))
        if group.rank == track.receiver:
            jobs.append(self._receive_pair(index, track, group))
        await asyncio.gather(*jobs)

    async def _many(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        jobs = []
        if group.rank in track.senders:
            jobs.append(self._send_all(index, track, group))
        if group.rank == track.receiver:
            jobs.append(self._receive_many(index, track, group))
        await asyncio.gather(*jobs)

    async def _batch(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        for number, count in enumerate(track.counts):
            payload = values("int64", count, index, number, group.rank)
            got = np.empty(count, np.int64)
            where = f"rank {self.rank} track {index} batch {number}"
            since_s = self.loop.time()
            works: list[Work[Any]] = []
            try:
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, payload, None, group, track.tag, group_peer=right),
                        dist.P2POp(dist.irecv, got, None, group, track.tag, group_peer=left),
                    ]
                )
                for work in works:
                    await work
            except dist.DistError as error:
                self._check_pair_error(where, track, error, since_s, group, {group.ranks[right], group.ranks[left]})
                for work in works:
                    with contextlib.suppress(dist.DistError):
                        await work
                self.journal.mark(where, payload, got)
                continue
            if not np.array_equal(got, values("int64", count, index, number, left)):
                self.journal.problem(f"{where}: wrong data")
            self.journal.mark(where, payload, got)

    async def _send_all(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        dice = self.scenario.random(index, 1000 + self.rank)
        if track.prelude:
            await asyncio.sleep(PRELUDE_S)
        sends: list[tuple[str, float, Work[None], np.ndarray]] = []
        for number, count in enumerate(track.counts):
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() * 0.004)
            payload = values("int64", count, index, number, group.rank)
            where = f"rank {self.rank} track {index} send {number}"
            try:
                work = group.isend(payload, track.receiver, track.tag)
            except dist.DistError as error:
                self._check_pair_error(where, track, error, self.loop.time(), group, {group.ranks[track.receiver]})
                break
            sends.append((where, self.loop.time(), work, payload))
            if dice.random() < 0.4:
                await self._settle_send(track, group, *sends.pop())
        for send in sends:
            await self._settle_send(track, group, *send)

    async def _settle_send(
        self, track: Track, group: dist.ProcessGroup, where: str, since_s: float, work: Work[None], payload: np.ndarray
    ) -> None:
        try:
            await work
        except dist.DistError as error:
            self._check_pair_error(where, track, error, since_s, group, {group.ranks[track.receiver]})
        self.journal.mark(where, payload)

    async def _receive_pair(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        source = track.senders[0]
        dice = self.scenario.random(index, 2000)
        if track.prelude and not await self._expire_some(track, group, source, dice):
            return
        receives: list[Receiving] = []
        if dice.random() < 0.4:
            receives = [
                Receiving(self, group, index, number, count, track, source, "irecv")
                for number, count in enumerate(track.counts)
            ]
        for number, count in enumerate(track.counts):
            if receives:
                receiving = receives[number]
            else:
                if dice.random() < 0.3:
                    await asyncio.sleep(dice.random() * 0.006)
                how = dice.choice(("irecv", "recv", "recv_array", "any", "any_array", "cancel", "small", "dtype"))
                if how.startswith("any") and self.fault is not None:
                    how = "recv"  # one from any source would wait for the others, who have nothing to send
                receiving = Receiving(self, group, index, number, count, track, source, how)
            if not await receiving.settle(dice):
                break

    async def _expire_some(
        self, track: Track, group: dist.ProcessGroup, source: int | None, dice: random.Random
    ) -> bool:
        """Receives that expire or are withdrawn before anything is sent."""
        for _ in range(3):
            since_s = self.loop.time()
            got = np.empty(70_000, np.int64)
            try:
                how = dice.randrange(3)
                if how == 0:
                    work: Work[Any] = group.recv(got, source, track.tag, timeout=dice.random() * 0.02)
                    await work
                elif how == 1:
                    work = group.recv_array(source, track.tag)
                    await cancelled_wait(work, dice.random() * 0.02)
                    work.result()
                else:
                    work = group.irecv(got, source, track.tag)
                    await asyncio.sleep(dice.random() * 0.02)
                    work.cancel()
                    work.result()
                self.journal.problem(f"rank {self.rank}: something came before anything was sent")
            except dist.CollectiveTimeoutError as error:
                if how:
                    self._check_error("prelude", track, error, since_s, set(group.ranks))
            except dist.ClosedError as error:
                if "withdrawn" not in str(error):
                    self._check_error("prelude", track, error, since_s, set(group.ranks))
                    return False
            except dist.DistError as error:
                self._check_error("prelude", track, error, since_s, set(group.ranks))
                if isinstance(error, dist.GroupAbortedError):
                    return False
            except asyncio.InvalidStateError:
                self.journal.problem(f"rank {self.rank}: a withdrawn receive is still under way")
            self.journal.mark(f"rank {self.rank} prelude", got)
        return True

    async def _receive_many(self, index: int, track: Track, group: dist.ProcessGroup) -> None:
        dice = self.scenario.random(index, 3000)
        if track.prelude and not await self._expire_some(track, group, None, dice):
            return
        fault = self.fault
        gone = set()
        if fault is not None and fault.kind in ("kill", "leave", "raise", "break"):
            gone = {fault.rank}
            if fault.kind == "break":
                gone = {fault.rank, fault.other} if self.culprit or self._breaks else set()
        gone -= {self.rank}
        missing = {sender: len(track.counts) for sender in track.senders}
        failures = 0
        while any(left for sender, left in missing.items() if group.ranks[sender] not in gone):
            since_s = self.loop.time()
            where = f"rank {self.rank} track {index} any"
            try:
                work = group.recv_array(None, track.tag)
                if dice.random() < 0.3:
                    await cancelled_wait(work, dice.random() * 0.005)
                array = await work
            except dist.ClosedError as error:
                if "withdrawn" in str(error):
                    continue
                self._check_error(where, track, error, since_s, set(group.ranks))
                return
            except dist.DistError as error:
                self._check_error(where, track, error, since_s, set(group.ranks))
                failures += 1
                if isinstance(error, dist.GroupAbortedError) or self.culprit:
                    return
                if failures > 2:
                    self.journal.problem(f"{where}: {error} (again and again)")
                    return
                continue
            sender = work.source_rank()
            number = len(track.counts) - missing[sender]
            missing[sender] -= 1
            while group.ranks[sender] in gone and missing[sender]:  # one that was on its way is lost, and raised so
                if np.array_equal(array, values("int64", track.counts[number], index, number, sender)):
                    break
                number += 1
                missing[sender] -= 1
            if not np.array_equal(array, values("int64", track.counts[number], index, number, sender)):
                self.journal.problem(f"{where}: wrong data from rank {sender} of the group")


class Receiving:
    """One message to be received, in one of the ways there are."""

    def __init__(
        self,
        run: Judge,
        group: dist.ProcessGroup,
        index: int,
        number: int,
        count: int,
        track: Track,
        source: int,
        how: str,
    ) -> None:
        self.run, self.group, self.track, self.source, self.how = run, group, track, source, how
        self.where = f"rank {run.rank} track {index} receive {number} ({how})"
        self.expected = values("int64", count, index, number, source)
        self.since_s = run.loop.time()
        self.buffer = np.full(count, 3, np.int64)
        self.wrong = False
        self.work: Work[Any] | None = None
        if how == "small" and count:
            self.buffer, self.wrong = np.full(count - 1, 3, np.int64), True
        elif how == "dtype" and count:
            self.buffer, self.wrong = np.full(count, 3, np.float64), True
        if how == "irecv":
            self.post()

    def post(self) -> None:
        """Issue it."""
        group, tag = self.group, self.track.tag
        try:
            if self.how in ("recv_array", "any_array"):
                self.work = group.recv_array(self.source if self.how == "recv_array" else None, tag)
            elif self.how in ("irecv", "small", "dtype"):
                self.work = group.irecv(self.buffer, self.source, tag)
            elif self.how == "any":
                self.work = group.recv(self.buffer, None, tag)
            else:
                self.work = group.recv(self.buffer, self.source, tag)
        except dist.DistError as error:
            self.error(error)

    def error(self, error: BaseException) -> None:
        """A failure: of the pair, or of any member where the source may be any."""
        run, group = self.run, self.group
        ends = set(group.ranks) if self.how.startswith("any") else {group.ranks[self.source]}
        run._check_pair_error(self.where, self.track, error, self.since_s, group, ends)

    async def settle(self, dice: random.Random) -> bool:
        """Wait for the message; False if there will be none."""
        for _ in range(20):
            if self.work is None:
                self.post()
            if self.work is None:
                return False
            if self.how == "cancel":
                await cancelled_wait(self.work, dice.random() * 0.005)
            try:
                got = await self.work
            except dist.CollectiveMismatchError as error:
                if not self.wrong:
                    self.error(error)
                self.run.journal.mark(self.where, self.buffer)
                return True
            except dist.DistError as error:
                if isinstance(error, dist.ClosedError) and "withdrawn" in str(error):
                    self.work = None
                    continue
                self.error(error)
                self.run.journal.mark(self.where, self.buffer)
                return False
            if self.wrong:
                self.run.journal.problem(f"{self.where}: a message that does not fit was received")
            data = got if self.how in ("recv_array", "any_array") else self.buffer
            if self.work.source_rank() != self.source or not np.array_equal(data, self.expected):
                self.run.journal.problem(f"{self.where}: wrong data")
            self.run.journal.mark(self.where, self.buffer, *([got] if data is got else []))
            return True
        self.how = "recv"
        return await self.settle(dice)
