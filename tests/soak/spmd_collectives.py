"""The collectives of random programs: how each is issued, and what numpy says must come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from spmd_issued import Issuer
from spmd_program import Step
from spmd_values import OPS, Array

LONG_S = 120.0
"""Longer than any program takes."""


class Collectives(Issuer):
    """A method for each kind of step."""

    @property
    def op(self) -> Any:
        return OPS[self.step.op]

    def all_reduce(self) -> None:
        parts = self.all_parts(self.count())
        self.call("all_reduce", self.put(parts[self.me], self.reduced(parts)), self.op)

    def reduce(self) -> None:
        parts = self.all_parts(self.count())
        expected = self.reduced(parts) if self.me == self.root else None
        self.call("reduce", self.put(parts[self.me], expected), self.root, self.op)

    def scan(self) -> None:
        parts = self.all_parts(self.count())
        self.call("scan", self.put(parts[self.me], self.reduced(parts[: self.me + 1])), self.op)

    def exscan(self) -> None:
        parts = self.all_parts(self.count())
        expected = self.reduced(parts[: self.me]) if self.me else None
        self.call("exscan", self.put(parts[self.me], expected), self.op)

    def broadcast(self) -> None:
        count = self.count()
        self.call("broadcast", self.put(self.mine(count, self.me), self.mine(count, self.root)), self.root)

    def all_gather(self) -> None:
        parts = [self.mine(count, rank) for rank, count in enumerate(self._counts())]
        self.call("all_gather", [self.blank(part) for part in parts], self.given(parts[self.me]))

    def all_gather_into_tensor(self) -> None:
        parts = self.all_parts(self.count(self.size))
        together = np.stack(parts) if self.dice.random() < 0.5 else np.concatenate(parts)
        if self.dice.random() < 0.3:  # in place
            initial = np.ones_like(together).reshape(self.size, -1)
            initial[self.me] = parts[self.me]
            out = self.put(initial, together)
            self.call("all_gather_into_tensor", out, out[self.me])
        else:
            self.call("all_gather_into_tensor", self.blank(together), self.given(parts[self.me]))

    def gather(self) -> None:
        uneven = self.dice.random() < 0.5
        counts = self.counts() if uneven else [self.count(self.size)] * self.size
        parts = [self.mine(count, rank) for rank, count in enumerate(counts)]
        out = [self.blank(part) for part in parts] if self.me == self.root else None
        self.call("gather", self.given(parts[self.me]), out, self.root, uneven=uneven)

    def scatter(self) -> None:
        uneven = self.dice.random() < 0.5
        counts = self.counts() if uneven else [self.count(self.size)] * self.size
        parts = [self.mine(count, rank) for rank, count in enumerate(counts)]
        given = [self.given(part) for part in parts] if self.me == self.root else None
        self.call("scatter", self.blank(parts[self.me]), given, self.root, uneven=uneven)

    def reduce_scatter(self) -> None:
        counts = self._counts()
        given = [self.given(self.mine(count, self.me, to)) for to, count in enumerate(counts)]
        expected = self.reduced(self.all_parts(counts[self.me], self.me))
        self.call("reduce_scatter", self.blank(expected), given, self.op)

    def reduce_scatter_tensor(self) -> None:
        parts = [part.reshape(self.size, -1) for part in self.all_parts(self.count(self.size) * self.size)]
        expected = self.reduced([part[self.me] for part in parts])
        if self.dice.random() < 0.3:  # in place
            after = parts[self.me].copy()
            after[self.me] = expected
            array = self.put(parts[self.me], after)
            self.call("reduce_scatter_tensor", array[self.me], array, self.op)
        else:
            self.call("reduce_scatter_tensor", self.blank(expected), self.given(parts[self.me]), self.op)

    def barrier(self) -> None:
        self.call("barrier")

    def monitored_barrier(self) -> None:
        self.call("monitored_barrier", LONG_S)

    def all_to_all(self) -> None:
        matrix = [self.counts() for _ in range(self.size)]
        out = [self.blank(self.mine(matrix[rank][self.me], rank, self.me)) for rank in range(self.size)]
        given = [self.given(self.mine(count, self.me, to)) for to, count in enumerate(matrix[self.me])]
        self.call("all_to_all", out, given)

    def all_to_all_single(self) -> None:
        splits = self.dice.random() < 0.5
        matrix = [self.counts() if splits else [self.count(self.size)] * self.size for _ in range(self.size)]
        out = np.concatenate([self.mine(matrix[rank][self.me], rank, self.me) for rank in range(self.size)])
        given = np.concatenate([self.mine(count, self.me, to) for to, count in enumerate(matrix[self.me])])
        if splits:
            received = [row[self.me] for row in matrix]
            self.call("all_to_all_single", self.blank(out), self.given(given), received, matrix[self.me])
        elif self.dice.random() < 0.5:  # in place
            array = self.put(given, out)
            self.call("all_to_all_single", array, array)
        else:
            self.call("all_to_all_single", self.blank(out), self.given(given))

    # Arrays of any shape, objects.

    def all_gather_array(self) -> None:
        self.call("all_gather_array", self.given(self.ragged(self.me)))
        self.gives([self.ragged(rank) for rank in range(self.size)])

    def gather_array(self) -> None:
        self.call("gather_array", self.given(self.ragged(self.me)), self.root)
        self.gives([self.ragged(rank) for rank in range(self.size)] if self.me == self.root else None)

    def broadcast_array(self) -> None:
        part = self.ragged(self.root)
        self.call("broadcast_array", self.put(part) if self.me == self.root else None, self.root)
        if self.me != self.root:
            self.gives(part)

    def scatter_array(self) -> None:
        given = [self.given(self.ragged(rank)) for rank in range(self.size)] if self.me == self.root else None
        self.call("scatter_array", given, self.root)
        self.gives(self.ragged(self.me))

    def all_gather_object(self) -> None:
        objects = self.objects(self.size)
        self.call("all_gather_object", [None] * self.size, objects[self.me])
        self.gives(objects)

    def gather_object(self) -> None:
        objects = self.objects(self.size)
        places = [None] * self.size if self.me == self.root else None
        self.call("gather_object", objects[self.me], places, self.root)
        self.gives(objects if self.me == self.root else None)

    def broadcast_object_list(self) -> None:
        objects = self.objects(self.dice.randint(1, 4))
        self.call("broadcast_object_list", objects if self.me == self.root else [None] * len(objects), self.root)
        self.gives(objects)

    def scatter_object_list(self) -> None:
        objects = self.objects(self.size)
        self.call("scatter_object_list", [None, 7], objects if self.me == self.root else None, self.root)
        self.gives([objects[self.me], 7])

    # Several at once.

    def all_reduce_coalesced(self) -> None:
        every = [self.all_parts(count, index) for index, count in enumerate(self._several())]
        self.call("all_reduce_coalesced", [self.put(parts[self.me], self.reduced(parts)) for parts in every], self.op)

    def broadcast_coalesced(self) -> None:
        counts = self._several()
        arrays = [self.put(self.mine(n, self.me, i), self.mine(n, self.root, i)) for i, n in enumerate(counts)]
        self.call("broadcast_coalesced", arrays, self.root)

    def all_gather_coalesced(self) -> None:
        every = [self.all_parts(count, index) for index, count in enumerate(self._several())]
        out = [[self.blank(parts[rank]) for parts in every] for rank in range(self.size)]
        self.call("all_gather_coalesced", out, [self.given(parts[self.me]) for parts in every])

    def all_gather_into_tensor_coalesced(self) -> None:
        every = [self.all_parts(count, index) for index, count in enumerate(self._several())]
        out = [self.blank(np.concatenate(parts)) for parts in every]
        self.call("all_gather_into_tensor_coalesced", out, [self.given(parts[self.me]) for parts in every])

    def reduce_scatter_tensor_coalesced(self) -> None:
        every = [self.all_parts(count * self.size, index) for index, count in enumerate(self._several())]
        out = [self.blank(np.split(self.reduced(parts), self.size)[self.me]) for parts in every]
        given = [self.given(parts[self.me]) for parts in every]
        self.call("reduce_scatter_tensor_coalesced", out, given, self.op)

    def broadcast_stream(self) -> None:
        count = self.count()
        array = self.put(self.mine(count, self.me), self.mine(count, self.root), "plain")
        self._stream("broadcast_stream", {self.root: self.mine(count, self.root)}, array, self.root)

    def all_gather_stream(self) -> None:
        parts = self.all_parts(self.count(self.size))
        together = self.own.random() < 0.5
        out: Any = self.blank(np.concatenate(parts), "plain") if together else [self.blank(p, "plain") for p in parts]
        self._stream("all_gather_stream", dict(enumerate(parts)), out, self.put(parts[self.me], None, "plain"))

    def _stream(self, name: str, parts: dict[int, Array], *arguments: Any) -> None:
        chunk_bytes = self.dice.choice((1 << 12, 1 << 16, (1 << 16) + 64, 1 << 20))
        stream = getattr(self.group, name)(*arguments, chunk_bytes=chunk_bytes, tag=self.tag)
        self.now.stream, self.now.parts = stream, parts
        self.now.works.append(stream.work)
        self.now.depends.append(-1)

    def _counts(self) -> list[int]:
        return self.counts() if self.dice.random() < 0.5 else [self.count(self.size)] * self.size

    def _several(self) -> list[int]:
        return [self.count(self.size * self.dice.randint(1, 4)) for _ in range(self.dice.randint(1, 4))]


def collective(step: Step) -> bool:
    """Whether it is one of the above."""
    return hasattr(Collectives, step.kind)
