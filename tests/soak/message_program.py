"""Random messages among the ranks of a world: withdrawn, late, cancelled, left behind; and what must come of them.

Each rank sends numbered messages to each other, of random sizes and tags, and notes how each send ended. The receivers
note what they got, in the order of their receives. `problems_of` holds one against the other: of each pair and tag what
was received is what was acknowledged, once and in order; a message whose receive has thrown it away, which the receive
says, may be missing, and what a rank has not received before it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import asyncdist as dist

__all__ = ["RANKS", "Messages", "Notes", "problems_of"]

RANKS = 3
TAGS = 3
HEAD_BYTES = 16
LAST = 2**32 - 1
"""The number of the last message of a tag."""
SIZES = (0, 16, 1000, 65_536, 262_144 - 4096, 262_144, 262_145, 600_000, 1 << 20)
MEAN_PAUSE_S = 0.002
AT_ONCE = 6
"""Sends that a rank leaves to themselves."""


@dataclass
class Notes:
    """What one rank has seen. Messages are written as [number, bytes], number 0 where there is no room for it."""

    rank: int
    sent: dict[str, list[list[int]]] = field(default_factory=dict)  # by receiver and tag: those acknowledged
    withdrawn: int = 0
    got: dict[str, list[list[int]]] = field(default_factory=dict)  # by sender and tag
    thrown: dict[str, int] = field(default_factory=dict)  # by sender and tag: those that a receive threw away
    whole: bool = False  # whether it has received until all had sent their last
    problems: list[str] = field(default_factory=list)


class Messages:
    """One rank's part. `largest`: bytes of the largest message, of which there are few."""

    def __init__(self, group: Any, seed: int, messages: int, largest: int) -> None:
        self.group, self.me = group, group.rank
        self.seed, self.messages, self.largest = seed, messages, largest
        common = random.Random(f"messages {seed}")
        self.any_source = [common.random() < 0.3 for _ in range(TAGS)]
        self.leaver = common.choice((None, None, common.randrange(RANKS)))
        self.leaves_after = common.randrange(messages + 1)
        self.impatience_s = common.choice((0.0005, 0.003, 0.02))
        self.laziness_s = common.choice((0.0, 0.001, 0.01))
        self.notes = Notes(self.me)
        self.others = [rank for rank in range(RANKS) if rank != self.me]
        self.ended: set[tuple[int, int]] = set()  # sender and tag

    async def run(self) -> Notes:
        """All of it; the group is closed at the end."""
        async with asyncio.TaskGroup() as tasks:
            senders = [tasks.create_task(self._send_all(rank)) for rank in self.others]
            receivers = [
                tasks.create_task(self._receive(tag, source))
                for tag in range(TAGS)
                for source in ([None] if self.any_source[tag] else self.others)
            ]
            left = [await sender for sender in senders]
            if self.leaver == self.me:
                for task in receivers:
                    task.cancel()
        self.notes.whole = self.leaver != self.me
        try:
            await self.group.close()
        except dist.DistError as error:
            if not (isinstance(error, dist.PeerLostError) and error.left):
                self.notes.problems.append(f"rank {self.me} closes: {error!r}")
        for pending in [one for each in left for one in each]:
            self._settle(pending)
        return self.notes

    # -- sending

    async def _send_all(self, to: int) -> list[tuple[str, list[int], Any, Any]]:
        """Send to one rank; the last ones are still under way."""
        dice = random.Random(f"{self.seed} {self.me} {to}")
        pending: list[tuple[str, list[int], Any, Any]] = []
        count = self.leaves_after if self.me == self.leaver else self.messages
        for number in range(1, count + 1):
            if dice.random() < 0.4:
                await asyncio.sleep(dice.expovariate(1 / MEAN_PAUSE_S))
            nbytes = self.largest if dice.random() < 0.02 else dice.choice(SIZES)
            tag = dice.randrange(TAGS)
            array = self._message(number if nbytes else 0, tag, min(nbytes, self.largest))
            how = dice.choice(("await", "await", "expire", "cancel", "cancel waiter", "keep waiting", "leave"))
            limit_s = dice.random() * self.impatience_s
            try:
                work = (self.group.isend if how in ("cancel", "keep waiting", "leave") else self.group.send)(
                    array, to, tag, timeout=limit_s if how == "expire" else None
                )
                pending.append((f"{to} {tag}", [number if nbytes else 0, array.size], array, work))
                await self._wait(work, how, limit_s)
            except dist.PeerLostError as error:
                if not error.left:
                    raise
                return pending
            while pending and (pending[0][3].done() or len(pending) > AT_ONCE):
                with contextlib.suppress(dist.DistError):
                    await pending[0][3]
                self._settle(pending.pop(0))
        for tag in range(TAGS):
            array = self._message(LAST, tag, HEAD_BYTES)
            with contextlib.suppress(dist.PeerLostError):
                pending.append((f"{to} {tag}", [LAST, HEAD_BYTES], array, self.group.isend(array, to, tag)))
        return pending

    async def _wait(self, work: Any, how: str, limit_s: float) -> None:
        """Wait for a send in one of the ways there are; raises PeerLostError."""
        with contextlib.suppress(dist.CollectiveTimeoutError, dist.ClosedError):
            if how in ("await", "expire"):
                await work
            elif how == "cancel":
                await asyncio.sleep(limit_s)
                work.cancel()
            elif how != "leave":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(work, limit_s)
                await work

    def _settle(self, pending: tuple[str, list[int], Any, Any]) -> None:
        """A send has ended: note how, and use its array otherwise."""
        where, message, array, work = pending
        if not work.done():
            self.notes.problems.append(f"rank {self.me}: the send {message} to {where} is under way for ever")
            return
        error = work.exception()
        array[:] = 0xEE
        if error is None:
            self.notes.sent.setdefault(where, []).append(message)
        elif isinstance(error, dist.CollectiveTimeoutError | dist.ClosedError):
            self.notes.withdrawn += 1
        elif not (isinstance(error, dist.PeerLostError) and error.left):
            self.notes.problems.append(f"rank {self.me}: the send {message} to {where}: {error!r}")

    def _message(self, number: int, tag: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        array = np.full(nbytes, (self.me * 31 + tag * 7 + number) & 0xFF, np.uint8)
        if nbytes:
            array[:HEAD_BYTES].view(np.uint32)[:] = self.me, tag, number, nbytes
        return array

    # -- receiving

    async def _receive(self, tag: int, source: int | None) -> None:
        """Receive all of one tag, from one rank or from any, until they have sent their last or are gone."""
        dice = random.Random(f"{self.seed} {self.me} from {source} {tag}")
        posted: list[tuple[Any, Any]] = []
        try:
            await self._receive_from(self.others if source is None else [source], tag, source, posted, dice)
        finally:
            extra = [work for work, _ in posted if not work.cancel()]
            for work in extra:  # what becomes of those of a rank that leaves is no failure
                work.add_done_callback(lambda ended: ended.exception())
            if [work for work in extra if not work.done() or work.exception() is None] and self.leaver != self.me:
                self.notes.problems.append(f"rank {self.me}: something came after the last message of tag {tag}")

    async def _receive_from(
        self, sources: list[int], tag: int, source: int | None, posted: list[tuple[Any, Any]], dice: random.Random
    ) -> None:
        gone: set[int] = set()
        while not all((rank, tag) in self.ended or rank in gone for rank in sources):
            if self.laziness_s and dice.random() < 0.3:
                await asyncio.sleep(dice.expovariate(1 / self.laziness_s))
            while len(posted) < dice.choice((1, 1, 2, 3)):
                posted.append(self._post(tag, source, dice))
            try:
                await self._settle_receive(*posted[0], tag, dice, alone=len(posted) == 1)
                posted.pop(0)
            except dist.PeerLostError as error:
                if not error.left:
                    raise
                gone.update(sources)  # of those from any, only when all are
                posted.pop(0)

    def _post(self, tag: int, source: int | None, dice: random.Random) -> tuple[Any, Any]:
        limit_s = dice.choice((None, None, dice.random() * 3 * self.impatience_s))
        if dice.random() < 0.5:
            return self.group.recv_array(source, tag, timeout=limit_s), None
        array = np.empty(max(self.largest, *SIZES), np.uint8)
        receive = self.group.recv if dice.random() < 0.5 else self.group.irecv
        return receive(array, source, tag, timeout=limit_s), array

    async def _settle_receive(self, work: Any, array: Any, tag: int, dice: random.Random, *, alone: bool) -> None:
        how = dice.random()
        try:
            if how < 0.3 and alone:  # what it has, but does not know of, comes after what those posted later have
                with contextlib.suppress(TimeoutError):  # not wait_for, which may swallow being cancelled (before 3.12)
                    async with asyncio.timeout(dice.random() * self.impatience_s):
                        await work
            elif how < 0.4:
                await asyncio.sleep(dice.random() * self.impatience_s)
                work.cancel()
            result = await work
        except dist.ClosedError:
            return  # withdrawn
        except dist.CollectiveTimeoutError as error:
            if error.missing and "thrown away" in str(error):
                where = f"{error.missing[0]} {tag}"
                self.notes.thrown[where] = self.notes.thrown.get(where, 0) + 1
            return
        self._note(work.source_rank(), tag, (result if array is None else array)[: work.nbytes])

    def _note(self, source: int, tag: int, message: Any) -> None:
        number = 0
        if message.size:
            head = message[:HEAD_BYTES].view(np.uint32)
            number = int(head[2])
            if (
                head.tolist() != [source, tag, number, message.size]
                or (message[HEAD_BYTES:] != (source * 31 + tag * 7 + number) & 0xFF).any()
            ):
                self.notes.problems.append(
                    f"rank {self.me}: wrong bytes from rank {source}, tag {tag}: {head.tolist()}"
                )
        if number == LAST:
            self.ended.add((source, tag))
        self.notes.got.setdefault(f"{source} {tag}", []).append([number, message.size])


def problems_of(all_notes: list[Notes]) -> list[str]:
    """What is wrong with all that the ranks of a world have noted."""
    problems = [problem for notes in all_notes for problem in notes.problems]
    for sender in all_notes:
        for receiver in all_notes:
            for tag in range(TAGS):
                sent = sender.sent.get(f"{receiver.rank} {tag}", [])
                got = receiver.got.get(f"{sender.rank} {tag}", [])
                missing = _missing(sent, got)
                where = f"rank {sender.rank} to rank {receiver.rank}, tag {tag}"
                if missing is None:
                    problems.append(f"{where}: twice, out of order, or not acknowledged: sent {sent}, got {got}")
                elif receiver.whole and len(missing) > receiver.thrown.get(f"{sender.rank} {tag}", 0):
                    problems.append(f"{where}: acknowledged and lost: {missing}")
    return problems


def _missing(sent: list[list[int]], got: list[list[int]]) -> list[list[int]] | None:
    """What of `sent` is not in `got`; None if that is more than a part of it in its order."""
    left = iter(sent)
    missing: list[list[int]] = []
    for message in got:
        for candidate in left:
            if candidate == message:
                break
            missing.append(candidate)
        else:
            return None
    return [*missing, *left]
