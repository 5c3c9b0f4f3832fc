"""The messages of random programs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from spmd_collectives import Collectives
from spmd_issued import Issued
from spmd_program import Step
from spmd_values import Array, same, values

import asyncdist as dist

SILENT_S = 0.1
"""Time-out of a receive of what nobody sends."""
TAG_OF_SILENCE, TAG_OF_WITHDRAWN = 1, 2
"""Beyond the track's; nothing else is sent there. Messages for any source have one tag each, as steps overlap."""


class Operations(Collectives):
    """All kinds of steps but `nested`."""

    late_s = 1.0
    """How late a time-out may be."""

    def issue(self, step: Step, number: int) -> Issued:
        """Issue this rank's part of a step."""
        now = self.begin(step, number)
        getattr(self, step.kind)()
        return now

    def ring(self) -> None:
        by = self.dice.randrange(self.size)
        there, here = (self.me + by) % self.size, (self.me - by) % self.size
        out = self.blank(self.mine(self.count(), here))
        if self.own.random() < 0.5:
            self.receive(out, here)
            self.send(self.given(self.mine(self.count(), self.me)), there)
        else:
            self.send(self.given(self.mine(self.count(), self.me)), there)
            self.receive(out, here)

    def crossed(self) -> None:
        """Everybody sends two to everybody, in an order of its own."""
        counts = self.count(2 * self.size), self.count(self.size)
        todo = [(what, rank) for rank in range(self.size) for what in ("send", "receive") for _ in range(2)]
        self.own.shuffle(todo)
        done = dict.fromkeys(todo, 0)
        for what, rank in todo:
            index = done[what, rank]
            done[what, rank] += 1
            if what == "send":
                self.send(self.given(self.mine(counts[index], self.me, rank, index)), rank)
            else:
                self.receive(self.blank(self.mine(counts[index], rank, self.me, index)), rank)

    def batch(self) -> None:
        right, left = (self.me + 1) % self.size, (self.me - 1) % self.size
        out, given = self.blank(self.mine(self.count(), left)), self.given(self.mine(self.count(), self.me))
        batch = [
            dist.P2POp(dist.isend, given, None, self.group, self.tag, right),
            dist.P2POp(dist.irecv, out, None, self.group, self.tag, left),
        ]
        self.now.works += dist.batch_isend_irecv(batch)
        self.now.depends += [right, left]

    def message_array(self) -> None:
        right, left = (self.me + 1) % self.size, (self.me - 1) % self.size
        self.send(self.given(self.ragged(self.me)), right)
        self.call("recv_array", left, depends=left)
        self.gives(self.ragged(left))

    def message_objects(self) -> None:
        right, left = (self.me + 1) % self.size, (self.me - 1) % self.size
        count = self.dice.randint(0, 3)
        self.call("send_object_list", self.objects(count, self.me), left, depends=left)
        places: list[Any] = [None] * count
        self.call("recv_object_list", places, right, depends=right)
        self.now.checks.append(lambda _: "" if same(places, self_objects) else f"received {str(places)[:200]}")
        self_objects = self.objects(count, right)

    def burst(self) -> None:
        """Many small ones to a neighbor, which may post its receives late."""
        many, octets = self.dice.choice(((20, 9000), (60, 100), (200, 10), (600, 1), (5, 70_000)))
        right, left = (self.me + 1) % self.size, (self.me - 1) % self.size
        late = self.own.random() < 0.5
        given = self.put(values(np.dtype("uint8"), octets, self.number, self.me), None, "plain")
        outs = [np.zeros(octets, np.uint8) for _ in range(many)]
        if late:
            for _ in range(many):
                self.send(given, right)
        for out in outs:
            self.receive(out, left)
        if not late:
            for _ in range(many):
                self.send(given, right)
        expected = values(np.dtype("uint8"), octets, self.number, left)
        self.now.checks.append(lambda _: "" if all(same(out, expected) for out in outs) else "a message is wrong")

    def fan_in(self) -> None:
        """All others send some to the root, which takes them from any source."""
        tag = self.tag + 10 + self.number % 900
        each = self.dice.randint(1, 4)
        number, size, root, most = self.number, self.size, self.root, self.count() + 2

        def message(rank: int, index: int) -> Array:
            array = values(np.dtype("int64"), max(2, most // (index + 1)), number, rank, index)
            array[:2] = rank, index
            return array

        if self.me != root:
            for index in range(each):
                self.send(self.given(message(self.me, index)), root, tag=tag)
            return
        arrays = []
        for _ in range(each * (size - 1)):
            arrays.append(np.full(most, -1))
            self.call(self.own.choice(("irecv", "recv")), arrays[-1], None, tag=tag, depends=None)

        def check(results: list[Any]) -> str:
            order: dict[int, list[int]] = {}
            for source, array in zip(results, arrays, strict=True):
                order.setdefault(source, []).append(int(array[1]))
                expected = np.full(most, -1)
                sent = message(source, int(array[1])) if 0 <= array[1] < each else expected
                expected[: sent.size] = sent
                if not same(array, expected):
                    return f"the message of {source} is wrong: {array[:8]}"
            right = {rank: list(range(each)) for rank in range(size) if rank != root}
            return "" if order == right else f"messages came as {order}"

        self.now.checks.append(check)

    def withdrawn(self) -> None:
        """A receive is withdrawn, and its array used otherwise; another one gets the message."""
        right, left = (self.me + 1) % self.size, (self.me - 1) % self.size
        tag = self.tag + TAG_OF_WITHDRAWN
        expected = self.mine(self.count(), left)
        first = np.zeros_like(expected)
        work = self.group.irecv(first, left, tag)
        self.send(self.given(self.mine(self.count(), self.me)), right, tag=tag)

        async def finish() -> str:
            if self.own.random() < 0.5:
                await asyncio.sleep(self.own.random() * 0.003)
            if not work.cancel():
                await work
                return "" if same(first, expected) else "what could not be withdrawn got something wrong"
            first.fill(1)
            second = np.zeros_like(expected)
            await self.group.irecv(second, left, tag)
            if not (first == 1).all():
                return "a receive that was withdrawn has written"
            return "" if same(second, expected) else "what came instead of the withdrawn one is wrong"

        self.now.after = finish

    def silence(self) -> None:
        """A receive of what nobody sends ends with its time-out, and nothing else does."""
        source = self.own.choice([None, *range(self.size)])
        tag, array, begun_s = self.tag + TAG_OF_SILENCE, np.zeros(self.count()), time.monotonic()
        work: dist.Work[Any]
        if self.own.random() < 0.5:
            work = self.group.irecv(array, source, tag, timeout=SILENT_S)
        else:
            work = self.group.recv_array(source, tag, timeout=SILENT_S)

        async def finish() -> str:
            try:
                await work
            except dist.CollectiveTimeoutError as error:
                took_s = time.monotonic() - begun_s
                missing = () if source is None else (self.group.ranks[source],)
                if not SILENT_S * 0.99 <= took_s <= SILENT_S + self.late_s:
                    return f"timed out after {took_s:.2f} s"
                return "" if source is None or error.missing == missing else f"{error!r} says {error.missing}"
            except dist.PeerLostError as error:
                if not error.left:  # else it has done all that it had to do
                    raise
                return ""
            return "received what nobody has sent"

        self.now.after = finish
