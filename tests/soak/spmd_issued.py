"""An operation of a random program under way: its works, the arrays that are theirs, and what must come of it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from spmd_memory import Loan, Pool
from spmd_program import COLLECTIVES, Step
from spmd_values import Array, an_object, dtype_of, reduced, same, values

import asyncdist as dist

ALL = -1
"""Who an operation depends on: all members, or a group rank, or (None) whoever sends."""


@dataclass
class Issued:
    """See the module."""

    name: str
    message: bool
    """Between two ranks, not a collective."""
    works: list[dist.Work[Any]] = field(default_factory=list)
    depends: list[int | None] = field(default_factory=list)
    """On whom each work depends."""
    zero_copy: list[Loan] = field(default_factory=list)
    results: list[tuple[int, Any]] = field(default_factory=list)
    """Index of a work, and what it must give."""
    checks: list[Callable[[list[Any]], str]] = field(default_factory=list)
    """Called with all results; what is wrong."""
    parts: dict[int, Array] | None = None
    """Of a stream: what must come from each rank."""
    stream: dist.ChunkStream | None = None
    partly: bool = False
    """An error has ended its issue."""
    after: Callable[[], Awaitable[str]] | None = None
    """To be awaited as soon as it is issued; what is wrong."""

    def judge(self, results: list[Any]) -> list[str]:
        """What is wrong, all works having ended well with these results."""
        wrong = [check(results) for check in self.checks]
        wrong += [
            f"work {index} gave {str(results[index])[:200]} instead of {str(expected)[:200]}"
            for index, expected in self.results
            if not same(expected, results[index])
        ]
        wrong += [loan.wrong() for loan in self.zero_copy]
        return [f"{self.name}: {text}" for text in wrong if text]


class Issuer:
    """What issues operations of a track on a group has; `me` and all other ranks are group ranks."""

    def __init__(
        self, group: dist.ProcessGroup, tag: int, where: tuple[int, ...], pool: Pool, own: random.Random
    ) -> None:
        self.group, self.tag, self.where, self.pool, self.own = group, tag, where, pool, own
        self.size, self.me = group.size, group.rank

    def begin(self, step: Step, number: int) -> Issued:
        """Draw what all ranks draw alike."""
        self.step, self.number = step, number
        self.dice = random.Random(repr((self.where, number)))
        self.dtype = dtype_of(step.dtype)
        self.root = step.root % self.size
        self.now = Issued(f"{self.group.name} tag {self.tag} number {number} ({step})", step.kind not in COLLECTIVES)
        return self.now

    def call(self, name: str, *arguments: Any, depends: int | None = ALL, **options: Any) -> dist.Work[Any]:
        options.setdefault("tag", self.tag)
        work: dist.Work[Any] = getattr(self.group, name)(*arguments, **options)
        self.now.works.append(work)
        self.now.depends.append(depends)
        return work

    def send(self, array: Array, to: int, **options: Any) -> None:
        self.call("isend", array, to, depends=to, **options)

    def receive(self, array: Array, source: int, **options: Any) -> None:
        self.call(self.own.choice(("irecv", "recv")), array, source, depends=source, **options)
        self.gives(source)

    def gives(self, expected: Any) -> None:
        """The last work's result."""
        self.now.results.append((len(self.now.works) - 1, expected))

    def put(self, initial: Array, expected: Array | None = None, layout: str = "") -> Array:
        """An array for the operation; None: it stays as it is."""
        loan = self.pool.loan(initial, expected, layout)
        self.now.zero_copy.append(loan)
        return loan.array

    def blank(self, expected: Array, layout: str = "") -> Array:
        """An array to be filled."""
        return self.put(np.full_like(expected, 1), expected, layout)

    def given(self, array: Array) -> Array:
        """An input, which may be one that cannot be written."""
        placed = self.put(array)
        if self.own.random() < 0.2:
            placed = placed.view()
            placed.setflags(write=False)
        return placed

    def count(self, share: int = 1) -> int:
        """Elements in one of `share` parts of the operation's octets."""
        return self.step.octets // self.dtype.itemsize // share

    def counts(self, share: int | None = None) -> list[int]:
        """One for each rank, none like the other."""
        most = self.count(share or self.size)
        return [self.dice.choice((0, most // 3, most, most + self.dice.randint(0, 3))) for _ in range(self.size)]

    def mine(self, count: int, *where: int) -> Array:
        return values(self.dtype, count, *self.where, self.number, *where)

    def all_parts(self, count: int, *where: int) -> list[Array]:
        """What each rank contributes."""
        return [self.mine(count, rank, *where) for rank in range(self.size)]

    def reduced(self, parts: list[Array]) -> Array:
        return reduced(self.step.op, parts)

    def ragged(self, rank: int) -> Array:
        """An array of any shape and dtype, of a rank's own."""
        dice = random.Random(repr((self.where, self.number, rank)))
        dtype = dtype_of(dice.choice(("int64", "float32", "bool", "complex64")))
        count = self.step.octets // dtype.itemsize // dice.choice((1, 2, 5))
        array = values(dtype, count, self.number, rank)
        return array.reshape(dice.choice([(count,), (1, count), *[(2, count // 2)] * (count % 2 == 0)]))

    def objects(self, count: int, *where: int) -> list[Any]:
        dice = random.Random(repr((self.where, self.number, where)))
        return [an_object(dice) for _ in range(count)]
