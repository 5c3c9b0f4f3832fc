"""One rank of the soak: the same random operations on all ranks, many in flight, every result checked.

    python soak_rank.py OPERATIONS SEED

Prints the number of operations done, now and then, and `ok` at the end.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

import asyncdist as dist

IN_FLIGHT = 48
TAGS = 3
COUNTS = (1, 1, 4, 33, 128, 1000, 4097, 20_000)
LARGE_COUNT = 300_000
LARGE_SHARE = 0.002
REPORT_EVERY = 500

Check = Callable[[], bool]
Issued = tuple[str, "dist.Work[Any]", Check]


def value(rank: int, number: int) -> int:
    """What rank `rank` contributes to operation `number`: small, so that sums stay exact."""
    return (rank * 31 + number * 7) % 101


class Program:
    """Draws operations and issues this rank's part of each."""

    def __init__(self, group: dist.ProcessGroup, pair: dist.ProcessGroup | None, seed: int) -> None:
        self.group = group
        self.pair = pair
        self.rng = random.Random(seed)  # the same draws on all ranks
        self.kinds = (
            *[self.all_reduce] * 4,
            *[self.messages] * 3,
            *[self.barrier] * 1,
            self.broadcast,
            self.all_gather,
            self.reduce_scatter,
            self.reduce,
            self.scan,
            self.all_to_all,
            self.in_pair,
        )

    def issue(self, number: int) -> list[Issued]:
        rng = self.rng
        kind, count, tag = rng.choice(self.kinds), rng.choice(COUNTS), rng.randrange(TAGS)
        if rng.random() < LARGE_SHARE:
            count = LARGE_COUNT
        root = rng.randrange(self.group.size)
        issued: list[Issued] = kind(number, count, tag, root)
        return issued

    def total(self, number: int) -> int:
        return sum(value(rank, number) for rank in range(self.group.size))

    def own(self, number: int, count: int) -> np.ndarray[Any, Any]:
        return np.full(count, value(self.group.rank, number), np.int64)

    def all_reduce(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        data = self.own(number, count)
        return [("all_reduce", self.group.all_reduce(data, tag=tag), lambda: bool((data == self.total(number)).all()))]

    def broadcast(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        data = self.own(number, count)
        work = self.group.broadcast(data, root, tag=tag)
        return [("broadcast", work, lambda: bool((data == value(root, number)).all()))]

    def reduce(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        data = self.own(number, count)
        expected = self.total(number) if self.group.rank == root else value(self.group.rank, number)
        return [("reduce", self.group.reduce(data, root, tag=tag), lambda: bool((data == expected).all()))]

    def scan(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        data = self.own(number, count)
        expected = sum(value(rank, number) for rank in range(self.group.rank + 1))
        return [("scan", self.group.scan(data, tag=tag), lambda: bool((data == expected).all()))]

    def barrier(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        return [("barrier", self.group.barrier(tag=tag), lambda: True)]

    def all_gather(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        size = self.group.size
        out = np.zeros((size, count), np.int64)
        work = self.group.all_gather_into_tensor(out, self.own(number, count), tag=tag)
        column = np.array([[value(rank, number)] for rank in range(size)])
        return [("all_gather", work, lambda: bool((out == column).all()))]

    def reduce_scatter(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        out = np.zeros(count, np.int64)
        work = self.group.reduce_scatter_tensor(out, self.own(number, count * self.group.size), tag=tag)
        return [("reduce_scatter", work, lambda: bool((out == self.total(number)).all()))]

    def all_to_all(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        size, rank = self.group.size, self.group.rank
        out, data = np.zeros(size * count, np.int64), np.repeat(np.arange(size) + 1000 * rank, count)
        work = self.group.all_to_all_single(out, data, tag=tag)
        expected = np.repeat(np.arange(size) * 1000 + rank, count)
        return [("all_to_all", work, lambda: bool((out == expected).all()))]

    def messages(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        group = self.group
        there, here = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        out, data = np.zeros(count, np.int64), self.own(number, count)
        return [
            ("send", group.isend(data, there, tag), lambda: True),
            ("recv", group.irecv(out, here, tag), lambda: bool((out == value(here, number)).all())),
        ]

    def in_pair(self, number: int, count: int, tag: int, root: int) -> list[Issued]:
        pair = self.pair
        if pair is None:
            return []
        data = self.own(number, count)
        first = self.group.rank // 2 * 2
        expected = value(first, number) + value(first + 1, number)
        return [("all_reduce in a pair", pair.all_reduce(data, tag=tag), lambda: bool((data == expected).all()))]


async def main(operations: int, seed: int) -> None:
    """Issue all, await all, in order."""
    async with dist.init_process_group(timeout=120) as group:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, group.size - 1, 2)]
        pair = next((pair for pair in pairs if isinstance(pair, dist.ProcessGroup)), None)
        program = Program(group, pair, seed)
        flight: deque[tuple[int, Issued]] = deque()
        for number in range(operations):
            flight += [(number, issued) for issued in program.issue(number)]
            while len(flight) >= IN_FLIGHT:
                await settle(*flight.popleft())
            if number % REPORT_EVERY == 0:
                print(number, flush=True)
        while flight:
            await settle(*flight.popleft())
    print("ok", flush=True)


async def settle(number: int, issued: Issued) -> None:
    """Await one, and look at what it gave."""
    name, work, right = issued
    await work
    if not right():
        raise AssertionError(f"operation {number}, {name}, gave something wrong")


if __name__ == "__main__":
    dist.run(main(int(sys.argv[1]), int(sys.argv[2])))
