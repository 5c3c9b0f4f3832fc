"""Problem: what a plan is to achieve, the same value on every rank.

A problem and a rank determine a plan; nothing else does. So whatever two ranks must agree on is here.

| collective | counts | INPUT | OUTPUT |
| --- | --- | --- | --- |
| all_reduce | (elements,) | - | elements, in place |
| broadcast | (elements,) | - | elements, in place |
| reduce | (elements,) | elements | elements on the root, else nothing |
| all_gather | one block per rank | own block | all blocks |
| reduce_scatter | one block per rank | all blocks | own block |
| gather | one block per rank | own block | all blocks on the root, else nothing |
| scatter | one block per rank | all blocks on the root, else nothing | own block |
| barrier | (0,) | - | - |
| scan | (elements,) | - | elements, in place: the reduction of ranks 0 .. r |
| exscan | (elements,) | - | elements, in place: that of ranks 0 .. r-1; on rank 0 left as it is |
| all_to_all | (elements of a block,) | a block for each rank | a block from each rank |
| all_to_all_uneven | own blocks: to each rank, then from each | the former | the latter |
| gather_uneven | own block in its place, else 0; all on the root | own block | all blocks on the root |
| scatter_uneven | own block in its place, else 0; all on the root | all blocks on the root | own block |

Of the last three a rank knows only its own lengths, so that its problem differs from the others' (`Problem.private`).
Their messages travel even where they are empty: what one rank sends and another does not expect must not pass unseen.

INPUT and OUTPUT must not overlap, with one exception: the own block of all_gather and of gather (on the root) may be
its place in OUTPUT, where the copy is then a copy onto itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from asyncdist.plan.chunks import WINDOW

VECTOR_COLLECTIVES: Final = ("all_reduce", "broadcast", "reduce", "barrier", "scan", "exscan")
"""Every rank has a vector of the same length."""

BLOCK_COLLECTIVES: Final = ("all_gather", "reduce_scatter", "gather", "scatter", "gather_uneven", "scatter_uneven")
"""The vector consists of one block per rank."""

EXCHANGES: Final = ("all_to_all", "all_to_all_uneven")
"""Every rank has a block for every rank."""

COLLECTIVES: Final = (*VECTOR_COLLECTIVES, *BLOCK_COLLECTIVES, *EXCHANGES)

ROOTED: Final = ("broadcast", "reduce", "gather", "scatter", "gather_uneven", "scatter_uneven")
"""One rank has the data, or gets it."""

REDUCTIONS: Final = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
"""Elements of several ranks become one."""

IN_PLACE: Final = ("all_reduce", "scan", "exscan")
"""Every rank finds its data in OUTPUT."""

PRIVATE_COLLECTIVES: Final = ("all_to_all_uneven", "gather_uneven", "scatter_uneven")
"""A rank knows only its own lengths."""


class Problem(NamedTuple):
    """One collective on one group; made by `Problem.of`, which checks."""

    collective: str
    world: int
    counts: tuple[int, ...]
    root: int = 0
    ranks_per_host: int = 1
    window_size: int = WINDOW
    """Chunks that a rank is ready to receive at a time, of one pipeline."""
    single_copy: bool = False
    """Whether what is published is read where it lies, if that may be (`plan.summary.lendable`), instead of copied."""
    hosts: tuple[int, ...] = ()
    """The number of each rank's host, in order of first appearance; none where hosts hold runs of `ranks_per_host`."""

    @classmethod
    def of(
        cls, collective: str, world: int, count: int | Sequence[int], root: int = 0, ranks_per_host: int = 1
    ) -> Problem:
        """Check and normalize.

        `count` is the vector's length in elements; for collectives of blocks it is the length of each rank's block,
        or a sequence of them, one per rank; for all_to_all that of every block, for all_to_all_uneven the lengths of
        what this rank sends to each, followed by those of what it receives from each. `root` is a group rank and is
        ignored (0) where there is none.
        `ranks_per_host` says that group ranks 0 .. k-1, k .. 2k-1, ... share a host each; 1 where hosts are unknown
        or hold no equal runs, which `_replace(hosts=...)` tells then.

        Raises ValueError.
        """
        if collective not in COLLECTIVES:
            raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
        if world < 1:
            raise ValueError(f"{collective}: the world needs at least one rank, got {world}")
        if not 0 <= root < world:
            raise ValueError(f"{collective}: root {root} is not a rank of a world of {world}")
        if ranks_per_host < 1:
            raise ValueError(f"{collective}: a host has at least one rank, got {ranks_per_host} ranks per host")
        counts = _counts(collective, world, count)
        if min(counts) < 0:
            raise ValueError(f"{collective}: negative element count in {counts}")
        return cls(collective, world, counts, root if collective in ROOTED else 0, ranks_per_host)

    @classmethod
    def of_bytes(
        cls, collective: str, world: int, nbytes: int, itemsize: int, root: int = 0, *, ranks_per_host: int = 1
    ) -> Problem:
        """As `of`, of a vector of `nbytes`, rounded up to whole elements and to blocks of equal length."""
        count = -(-nbytes // itemsize)
        if collective == "barrier":
            count = 0
        elif collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
            count = -(-count // world)
        return cls.of(collective, world, count, root, ranks_per_host)

    @property
    def total(self) -> int:
        """Elements of the whole vector; of an exchange, elements of INPUT."""
        if self.collective in EXCHANGES:
            return sum(self.send_counts)
        return sum(self.counts)

    @property
    def by_host(self) -> Sequence[Sequence[int]]:
        """The ranks of each host."""
        return _by_host(self.world, self.ranks_per_host, self.hosts)

    def place(self, rank: int) -> tuple[int, int]:
        """The host of `rank`, and its place among the ranks there."""
        if not self.hosts:
            return divmod(rank, self.ranks_per_host)
        host = self.hosts[rank]
        return host, self.by_host[host].index(rank)

    @property
    def even(self) -> bool:
        """Whether all blocks have the same length."""
        return min(self.counts) == max(self.counts)

    @property
    def private(self) -> bool:
        """Whether the counts are this rank's own, so that other ranks' problems differ."""
        return self.collective in PRIVATE_COLLECTIVES

    @property
    def send_counts(self) -> tuple[int, ...]:
        """Of an exchange: elements of this rank's block for each rank."""
        return self.counts[: self.world] if self.collective == "all_to_all_uneven" else self.counts * self.world

    @property
    def receive_counts(self) -> tuple[int, ...]:
        """Of an exchange: elements of each rank's block for this rank."""
        return self.counts[self.world :] if self.collective == "all_to_all_uneven" else self.counts * self.world

    def input_length(self, rank: int) -> int:
        """Elements of `rank`'s INPUT."""
        if self.collective == "reduce" or self.collective in EXCHANGES:
            return self.total
        if self.collective in ("all_gather", "gather", "gather_uneven"):
            return self.counts[rank]
        scatters = self.collective in ("scatter", "scatter_uneven") and rank == self.root
        return self.total if scatters or self.collective == "reduce_scatter" else 0

    def output_length(self, rank: int) -> int:
        """Elements of `rank`'s OUTPUT."""
        if self.collective in EXCHANGES:
            return sum(self.receive_counts)
        if self.collective in IN_PLACE or self.collective in ("broadcast", "all_gather"):
            return self.total
        if self.collective in ("reduce_scatter", "scatter", "scatter_uneven"):
            return self.counts[rank]
        return self.total if rank == self.root else 0


PLACEMENTS: Final = 16
"""Kept: all ranks of a process plan for few groups at a time."""


@lru_cache(maxsize=PLACEMENTS)
def _by_host(world: int, ranks_per_host: int, hosts: tuple[int, ...]) -> Sequence[Sequence[int]]:
    if not hosts:
        return [range(first, min(first + ranks_per_host, world)) for first in range(0, world, ranks_per_host)]
    found: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        found[host].append(rank)
    return found


def _counts(collective: str, world: int, count: int | Sequence[int]) -> tuple[int, ...]:
    if collective in BLOCK_COLLECTIVES:
        if isinstance(count, int):
            return (count,) * world
        if len(count) != world:
            raise ValueError(f"{collective}: {len(count)} block lengths for a world of {world}")
        return tuple(count)
    if collective == "all_to_all_uneven":
        if isinstance(count, int) or len(count) != 2 * world:
            raise ValueError(f"{collective} takes {world} lengths to send and {world} to receive, got {count}")
        return tuple(count)
    if isinstance(count, int):
        return (count,)
    if len(count) != 1:
        raise ValueError(f"{collective} takes one element count, got {len(count)}")
    return tuple(count)
