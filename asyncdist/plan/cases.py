"""The problems that every algorithm is proven on, and the command that proves them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from asyncdist.plan.problem import BLOCK_COLLECTIVES, PRIVATE_COLLECTIVES, ROOTED, Problem
from asyncdist.plan.registry import ALGORITHMS, build
from asyncdist.plan.symbols import PlanError
from asyncdist.plan.verify import verify

__all__ = ["exchange_problems", "main", "private_problems", "problems", "prove"]

CHUNK_LENGTH: Final = 4
"""Elements in a chunk: few, so that small vectors have several. A proof depends on the cuts, not on the size."""

THOROUGH_WORLD: Final = 12
"""Up to here every count and every root is proven; larger worlds take a choice of both, which differs by world."""

SEVERAL_CHUNKS: Final = 5 * CHUNK_LENGTH + 1
"""Elements of a vector sent whole: six chunks, more than any window holds."""

BLOCK_PATTERN: Final = (5, 0, 1, 0)
"""Uneven block lengths, repeated: two chunks, nothing, one element."""


def problems(collective: str, world: int, *, thorough: bool | None = None) -> Iterator[Problem | tuple[Problem, ...]]:
    """Yield what a collective is proven on in a world: no elements, one, fewer than ranks, uneven, several chunks.

    Where a rank knows only its own lengths, yield one problem per rank.
    """
    if thorough is None:
        thorough = world <= THOROUGH_WORLD
    if collective == "barrier":
        yield Problem.of(collective, world, 0)
        return
    if collective == "all_to_all_uneven":
        yield from _uneven_exchanges(world, thorough=thorough)
        return
    if collective in PRIVATE_COLLECTIVES:
        for known in problems(collective.removesuffix("_uneven"), world, thorough=thorough):
            assert isinstance(known, Problem)
            yield private_problems(collective, known.counts, known.root)
        return
    counts: list[int | tuple[int, ...]] = [0, 1] if thorough or world % 4 == 0 else [0]
    if collective in BLOCK_COLLECTIVES:
        counts += [_pattern(world)] + ([9, _lone(world)] if thorough else [])
    else:
        several = SEVERAL_CHUNKS if collective in ROOTED else world + world // 2 + 1
        counts += [several] + ([world - 1, world, 9 * world + 5] if thorough else [])
    roots = range(world) if thorough else (0, world // 3 + 1)
    for count in counts:
        for root in roots if collective in ROOTED else (0,):
            yield Problem.of(collective, world, count, root)


def private_problems(collective: str, counts: Sequence[int], root: int) -> tuple[Problem, ...]:
    """Every rank's problem of gather_uneven or scatter_uneven: the root knows all lengths, the others their own."""
    world = len(counts)
    own = [tuple(count if rank == other else 0 for other, count in enumerate(counts)) for rank in range(world)]
    return tuple(Problem.of(collective, world, counts if rank == root else own[rank], root) for rank in range(world))


def exchange_problems(lengths: Sequence[Sequence[int]]) -> tuple[Problem, ...]:
    """Every rank's problem of all_to_all_uneven, where rank s sends `lengths[s][d]` elements to rank d."""
    world = len(lengths)
    return tuple(
        Problem.of("all_to_all_uneven", world, (*lengths[rank], *(row[rank] for row in lengths)))
        for rank in range(world)
    )


def prove(collective: str, algorithm: str, world: int, *, thorough: bool | None = None) -> int:
    """Prove one algorithm in one world. Returns the number of problems; raises PlanError."""
    proven = 0
    for problem in problems(collective, world, thorough=thorough):
        own = [problem] * world if isinstance(problem, Problem) else problem
        verify(problem, [build(own[rank], algorithm, rank, CHUNK_LENGTH) for rank in range(world)])
        proven += 1
    return proven


def main(arguments: Sequence[str]) -> int:
    """Prove what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m asyncdist.plan.verify", description="Prove the plans.")
    parser.add_argument("--worlds", default="1..64", help="world sizes: N, A..B, or several with commas (1..64)")
    parser.add_argument("--collective", help="only this one")
    parser.add_argument("--algorithm", help="only this one")
    parser.add_argument("--thorough", action="store_true", help="all counts and roots in every world")
    options = parser.parse_args(arguments)
    worlds = _worlds(options.worlds)
    failed = 0
    for collective, table in ALGORITHMS.items():
        for algorithm in table:
            if options.collective not in (None, collective) or options.algorithm not in (None, algorithm):
                continue
            failed += not _report(collective, algorithm, worlds, thorough=options.thorough or None)
    return 1 if failed else 0


def _report(collective: str, algorithm: str, worlds: Sequence[int], *, thorough: bool | None) -> bool:
    started = time.perf_counter()
    try:
        proven = sum(prove(collective, algorithm, world, thorough=thorough) for world in worlds)
    except PlanError as error:
        print(f"{collective}:{algorithm} FAILED: {error}", file=sys.stderr)
        return False
    elapsed_s = time.perf_counter() - started
    print(f"{collective}:{algorithm}: {proven} problems in {len(worlds)} worlds, {elapsed_s:.1f} s", flush=True)
    return True


def _worlds(text: str) -> list[int]:
    worlds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        worlds.extend(range(int(first), int(last if dots else first) + 1))
    return worlds


def _pattern(world: int) -> tuple[int, ...]:
    return tuple(BLOCK_PATTERN[rank % len(BLOCK_PATTERN)] for rank in range(world))


def _uneven_exchanges(world: int, *, thorough: bool) -> Iterator[tuple[Problem, ...]]:
    ranks = range(world)
    pattern = BLOCK_PATTERN
    yield exchange_problems([[pattern[(3 * source + target) % len(pattern)] for target in ranks] for source in ranks])
    if thorough:
        yield exchange_problems([[0] * world for _ in ranks])
        yield exchange_problems([[1] * world for _ in ranks])
        yield exchange_problems([[9 * (target == world // 2) for target in ranks] for _ in ranks])


def _lone(world: int) -> tuple[int, ...]:
    """Only one rank, not the root, has something."""
    return tuple(7 if rank == world // 2 else 0 for rank in range(world))
