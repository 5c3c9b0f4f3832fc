"""Which algorithm, and which plan: a pure function of what all ranks know, so that all choose alike.

The thresholds are a prior for asyncio over TCP: a message costs about 60 us from end to end, 15 us of them per
endpoint, and a byte 1/1.5 ns. That moves every switch of the MPI literature up by a factor of ten to a hundred: with
messages this dear, rounds count for longer. Sizes are bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from asyncdist.plan.problem import COLLECTIVES, Problem
from asyncdist.plan.registry import algorithms, build
from asyncdist.plan.steps import Plan

__all__ = ["algorithms", "choose", "chunk_bytes", "parse_overrides", "plan_for", "plan_id"]

DIRECT_WORLD: Final = 8
"""Largest world in which all talk to all: beyond it the messages of one round cost more CPU than the rounds saved."""

DIRECT_REDUCE_BYTES: Final = 4 << 10
"""All_reduce by exchanging everything: every rank moves and reduces p-1 vectors; it only pays for the smallest."""

DIRECT_GATHER_BYTES: Final = 64 << 10
"""Blocks this small travel eagerly (the transport's EAGER_BYTES), so all_gather is then one trip without a reply."""

DOUBLING_BYTES: Final = 128 << 10
"""Recursive doubling sends log2(p) vectors where circulant and ring send two: 150 KB at 8 ranks, 108 KB at 64."""

DOUBLING_PAIR_BYTES: Final = 512 << 10
"""The same for two ranks, where it takes one round and the ring two: 0.6 MB."""

RING_BLOCK_BYTES: Final = 512 << 10
"""Blocks from which the ring's p-1 latencies hide behind its pipelined chunks: 0.9 MB of 4 ranks, 9.5 of 16."""

LINEAR_BROADCAST_WORLD: Final = 4
"""With 16 KB and four ranks, three sends cost the root less than a second round costs everyone."""

LINEAR_BROADCAST_BYTES: Final = 16 << 10
"""Above it the root's link, which carries the vector p-1 times, is what takes long."""

CHAIN_BYTES: Final = 1 << 20
"""Smallest vector for a chain: below it there are too few chunks to fill it."""

CHAIN_RANK_BYTES: Final = 128 << 10
"""And this much per rank: a chain has p-2 latencies to hide, 1 MB at 8 ranks, 4 to 8 MB at 64."""

LINEAR_ROOT_WORLD: Final = 32
"""gather and scatter: up to this many messages at the root cost less than a tree's forwarding."""

TREE_BLOCK_BYTES: Final = 16 << 10
"""gather and scatter: larger blocks are not worth forwarding, whatever the world."""

BRUCK_WORLD: Final = 16
"""Smallest world for Bruck's all_to_all: it saves p - 1 - log2(p) messages and costs about 2p copies of a block."""

BRUCK_BLOCK_BYTES: Final = 2 << 10
"""Blocks above this are not worth sending log2(p)/2 times."""

PAIRWISE_BLOCK_BYTES: Final = 1 << 20
"""Blocks from which one partner at a time keeps the link busy anyway, and 32 would only share it."""

CHUNK_MIN_BYTES: Final = 128 << 10
"""A chunk should cost more to transfer (85 us) than its message costs by existing (60 us)."""

CHUNK_MAX_BYTES: Final = 1 << 20
"""Reducing a chunk leaves the event loop free again within about 0.3 ms; larger ones gain nothing, as long as there are
fewer than CHUNKS_MAX."""

CHUNKS_PER_BLOCK: Final = 4
"""Chunks in a block of medium size: the wire, the reduction and the loop each have one, and one waits."""

CHUNKS_MAX: Final = 128
"""Chunks in the largest blocks, which get larger chunks instead: each is a step with its message, a third of a kB in
the plan, and a pipeline of 128 is already within a percent or two of the wire."""

PLAN_CACHE_PLANS: Final = 512
"""Plans kept. A model has a few hundred tensor shapes. A plan takes 1 to 300 kB in small worlds, so this is below
150 MB with the largest vectors everywhere, and a few MB as a rule."""


def plan_for(
    collective: str,
    rank: int,
    world: int,
    count: int | Sequence[int],
    itemsize: int,
    root: int = 0,
    algorithm: str | None = None,
) -> Plan:
    """Return `rank`'s plan, from the cache where possible (give `count` as int or tuple: a list costs a conversion).

    `count` is the vector's length in elements, or, for collectives of blocks, the length of each rank's block or a
    sequence of one length per rank. `itemsize` is bytes per element, `root` a group rank. `algorithm` overrides the
    choice. Raises ValueError for anything unknown or out of range.
    """
    if not isinstance(count, int | tuple):
        count = tuple(count)
    return _plan(collective, rank, world, count, itemsize, root, algorithm)


@lru_cache(maxsize=PLAN_CACHE_PLANS)
def _plan(
    collective: str,
    rank: int,
    world: int,
    count: int | tuple[int, ...],
    itemsize: int,
    root: int,
    algorithm: str | None,
) -> Plan:
    if itemsize < 1:
        raise ValueError(f"an element has at least one byte, got {itemsize}")
    problem = Problem.of(collective, world, count, root)
    chunk_length = max(1, chunk_bytes(problem, itemsize) // itemsize)
    return build(problem, algorithm or choose(problem, itemsize), rank, chunk_length)


def choose(problem: Problem, itemsize: int) -> str:
    """Name the algorithm for a problem with elements of `itemsize` bytes."""
    return _CHOICES[problem.collective](problem, itemsize)


def chunk_bytes(problem: Problem, itemsize: int) -> int:
    """Bytes of a chunk, at most: a quarter of what moves as one block, within limits; more for the largest blocks."""
    if problem.collective == "all_reduce":
        block_bytes = -(-problem.total // problem.world) * itemsize
    else:
        block_bytes = max(problem.counts) * itemsize
    chunk = min(max(block_bytes // CHUNKS_PER_BLOCK, CHUNK_MIN_BYTES), CHUNK_MAX_BYTES)
    return max(chunk, -(-block_bytes // CHUNKS_MAX))


@lru_cache(maxsize=PLAN_CACHE_PLANS)
def plan_id(
    collective: str, algorithm: str, world: int, count: int | tuple[int, ...], root: int = 0, detail: str = ""
) -> int:
    """Fingerprint, 32 bits, of what ranks must agree on; the same in every process and release that plans alike.

    `detail` is for what a plan does not know but ranks must agree on too: the dtype, the reduce operation.
    """
    problem = Problem.of(collective, world, count, root)
    counts = str(problem.counts[0]) if problem.even else ",".join(map(str, problem.counts))
    if problem.private:  # other ranks have other lengths; the transport compares those of each message
        counts = ""
    return zlib.crc32(f"{collective}:{algorithm}:{world}:{counts}:{problem.root}:{detail}".encode())


def parse_overrides(text: str) -> dict[str, str]:
    """Parse "all_reduce:ring,broadcast:chain" (ASYNCDIST_ALGO) into algorithm by collective; empty text is none.

    Raises ValueError that names the entry and what would be right.
    """
    overrides: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        collective, colon, algorithm = (part.strip() for part in entry.partition(":"))
        if not colon or not collective or not algorithm:
            raise ValueError(f"algorithm override {entry!r} is not of the form collective:algorithm")
        if collective not in COLLECTIVES:
            raise ValueError(f"algorithm override {entry!r}: no such collective; known: {', '.join(COLLECTIVES)}")
        if algorithm not in algorithms(collective):
            known = ", ".join(algorithms(collective))
            raise ValueError(f"algorithm override {entry!r}: no such algorithm; {collective} has: {known}")
        if collective in overrides:
            raise ValueError(f"algorithm override for {collective} is given twice")
        overrides[collective] = algorithm
    return overrides


def _choose_all_reduce(problem: Problem, itemsize: int) -> str:
    world, nbytes = problem.world, problem.total * itemsize
    power_of_two = world & (world - 1) == 0
    if not power_of_two and world <= DIRECT_WORLD and nbytes <= DIRECT_REDUCE_BYTES:
        return "linear"
    if nbytes <= (DOUBLING_PAIR_BYTES if world <= 2 else DOUBLING_BYTES):
        return "recursive_doubling"
    if world <= 2 or nbytes >= world * RING_BLOCK_BYTES:
        return "ring"
    return "circulant"


def _choose_tree(problem: Problem, itemsize: int) -> str:
    """Broadcast and reduce."""
    world, nbytes = problem.world, problem.total * itemsize
    if world <= LINEAR_BROADCAST_WORLD and nbytes <= LINEAR_BROADCAST_BYTES:
        return "linear"
    if world > 2 and nbytes >= max(CHAIN_BYTES, world * CHAIN_RANK_BYTES):
        return "chain"
    return "binomial_tree"


def _choose_all_gather(problem: Problem, itemsize: int) -> str:
    block_bytes = max(problem.counts) * itemsize
    if problem.world <= DIRECT_WORLD and block_bytes <= DIRECT_GATHER_BYTES:
        return "linear"
    return "ring" if block_bytes >= RING_BLOCK_BYTES else "circulant"


def _choose_reduce_scatter(problem: Problem, itemsize: int) -> str:
    return "ring" if max(problem.counts) * itemsize >= RING_BLOCK_BYTES else "circulant"


def _choose_rooted_blocks(problem: Problem, itemsize: int) -> str:
    """Gather and scatter."""
    if problem.world <= LINEAR_ROOT_WORLD or max(problem.counts) * itemsize >= TREE_BLOCK_BYTES:
        return "linear"
    return "binomial_tree"


def _choose_exchange(problem: Problem, itemsize: int) -> str:
    """All_to_all."""
    block_bytes = -(-problem.total // problem.world) * itemsize
    if problem.even and problem.world >= BRUCK_WORLD and block_bytes <= BRUCK_BLOCK_BYTES:
        return "bruck"
    return "pairwise" if problem.world > 2 and block_bytes >= PAIRWISE_BLOCK_BYTES else "linear"


def _choose_uneven_exchange(problem: Problem, itemsize: int) -> str:
    """A rank knows its own lengths only, and all must choose alike."""
    return "linear"


def _choose_scan(problem: Problem, itemsize: int) -> str:
    """Scan and exscan."""
    world, nbytes = problem.world, problem.total * itemsize
    return "chain" if nbytes >= max(CHAIN_BYTES, world * CHAIN_RANK_BYTES) else "recursive_doubling"


def _choose_barrier(problem: Problem, itemsize: int) -> str:
    return "dissemination"


_CHOICES: Final[dict[str, Callable[[Problem, int], str]]] = {
    "all_reduce": _choose_all_reduce,
    "broadcast": _choose_tree,
    "reduce": _choose_tree,
    "all_gather": _choose_all_gather,
    "reduce_scatter": _choose_reduce_scatter,
    "gather": _choose_rooted_blocks,
    "scatter": _choose_rooted_blocks,
    "barrier": _choose_barrier,
    "scan": _choose_scan,
    "exscan": _choose_scan,
    "all_to_all": _choose_exchange,
    "all_to_all_uneven": _choose_uneven_exchange,
    "gather_uneven": _choose_uneven_exchange,
    "scatter_uneven": _choose_uneven_exchange,
}
