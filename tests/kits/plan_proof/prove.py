"""Proving an algorithm in a world: the problems that it is proven on, its plans for them, and how they are verified.

A family is one problem, with one root after another. The ranks are renamed with the root.

| world | counts | roots |
| --- | --- | --- |
| 1 .. 12 | none, one, one per rank and one fewer, uneven, many chunks, all on one rank; ranks per host | every root |
| 13 .. 64 | none, even, uneven | every root for even counts, else five |
| 65 .. 128 | none; even or uneven, by turns | every root whose plans are the first root's, renamed; else five |
| larger | none; uneven, or, in every fourth world, even | five |

The five roots are the first rank, the second, the rank one third on, the middle one and the last. Uneven counts of
worlds above 64 leave most ranks without an element, so that a ring of p ranks takes p steps and not p * p. Even counts
give each rank some.

Algorithms that look at the ranks per host are proven for several numbers of them; trees with even and uneven counts
only, as a tree is made without a look at how vectors are cut. With hosts, a root stands for the roots at its place in
other hosts if their plans are its own, renamed. In worlds above 64 the five roots do; other places are left to smaller
worlds.

Algorithms through shared memory are also proven with six chunks of every slice, for five roots: in worlds up to 12, and
in every sixteenth of the larger ones. What they do otherwise with a single copy is proven there too, up to 64 ranks and
with more chunks: in worlds up to 12 with so many that some are left out of the plan (`plan.steps.RepeatedSteps`).

Of each family the first problem is verified: by rank 0's plan alone where all plans are rotations (`verify_rotated`),
else by running the plans of all ranks. The other problems differ in the root. Where their plans are the first problem's
with ranks renamed, they are right too, as nothing that `verify` looks at changes with names. Else they are verified in
the same way, in large worlds for some roots (`run_roots`). Where hosts have several ranks, this is done for each place
in a host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, TypeAlias

from asyncdist.plan.algorithms.registry import build, needs_lane, ordered_algorithms
from asyncdist.plan.algorithms.shared_reduce import SINGLE_COPY_LOOKAHEAD
from asyncdist.plan.problem import BLOCK_COLLECTIVES, PRIVATE_COLLECTIVES, ROOTED, VECTOR_COLLECTIVES, Problem
from asyncdist.plan.steps import Plan
from plan_proof.relabel import Relabelling, rotated_problem
from plan_proof.symbols import PlanError
from plan_proof.verify import verify, verify_rotated

__all__ = [
    "BY_HOST",
    "MAX_STEPS",
    "SINGLE_COPIES",
    "THOROUGH",
    "Proof",
    "exchange_problems",
    "families",
    "private_problems",
    "prove",
]

MAX_STEPS: Final = 2_500_000
"""Steps of all ranks that are run together: about 2 GB. Larger problems are left out, and reported."""


class Proof:
    """What was shown of an algorithm in one world: numbers of problems by the way they were."""

    def __init__(self) -> None:
        self.run = 0
        """Problems whose ranks ran together."""
        self.rotated = 0
        """Problems of which rank 0 ran for all."""
        self.renamed = 0
        """Problems whose plans are another problem's, renamed."""
        self.left_out = 0
        """Problems too large to run (`MAX_STEPS`)."""

    @property
    def proven(self) -> int:
        """Problems in all."""
        return self.run + self.rotated + self.renamed

    def add(self, other: Proof) -> None:
        """Count another proof's problems too."""
        self.run += other.run
        self.rotated += other.rotated
        self.renamed += other.renamed
        self.left_out += other.left_out


def prove(collective: str, algorithm: str, world: int, *, thorough: bool | None = None) -> Proof:
    """Prove one algorithm in one world, on the problems that `families` names. Raises PlanError."""
    proof = Proof()
    for family in families(collective, algorithm, world, thorough=thorough):
        _prove_family(family, algorithm, proof)
    return proof


def _prove_family(family: Family, algorithm: str, proof: Proof) -> None:
    world, per_host = _one(family[0]).world, _one(family[0]).ranks_per_host
    period = per_host if per_host < world and world % per_host == 0 else 1  # of names that keep ranks together
    firsts: dict[int, tuple[Problem | tuple[Problem, ...], list[Plan]]] = {}
    for problem in family:
        place = _one(problem).root % period
        if place in firsts and _renamed(*firsts[place], problem, algorithm):
            proof.renamed += 1
        elif _one(problem).root in run_roots(world):
            plans = _prove_problem(problem, algorithm, proof)
            if place not in firsts and len(family) > 1:
                firsts[place] = problem, plans or [_plan_of(problem, algorithm)(rank) for rank in range(world)]


def _prove_problem(problem: Problem | tuple[Problem, ...], algorithm: str, proof: Proof) -> list[Plan]:
    """Prove one problem; return its plans, where all were made to run together."""
    plan_of = _plan_of(problem, algorithm)
    if isinstance(problem, Problem) and verify_rotated(problem, plan_of):
        proof.rotated += 1
        return []
    plans: list[Plan] = []
    steps = 0
    for rank in range(_one(problem).world):
        plans.append(plan_of(rank))
        steps += len(plans[-1].steps)
        if steps > MAX_STEPS:
            proof.left_out += 1
            return []
    verify(problem, plans)
    proof.run += 1
    return plans


def _renamed(
    first: Problem | tuple[Problem, ...], plans: list[Plan], other: Problem | tuple[Problem, ...], algorithm: str
) -> bool:
    """Whether `other` is `first` with ranks renamed, and its plans are `plans` renamed alike."""
    if not isinstance(first, Problem) or not isinstance(other, Problem):
        return False
    world, shift = first.world, other.root - first.root
    if other.ranks_per_host < world and (shift % other.ranks_per_host or world % other.ranks_per_host):
        return False  # renamed, ranks of one host would be on two
    if rotated_problem(first, shift) != other:
        return False
    plan_of = _plan_of(other, algorithm)
    return all(
        Relabelling(first, rank, shift).maps(plan, plan_of((rank + shift) % world)) for rank, plan in enumerate(plans)
    )


def _plan_of(problem: Problem | tuple[Problem, ...], algorithm: str) -> Callable[[int], Plan]:
    """Makes a rank's plan. It must say that it keeps the order of ranks where the registry says so."""
    own = [problem] * problem.world if isinstance(problem, Problem) else list(problem)
    ordered = algorithm in ordered_algorithms(own[0].collective, shared=True)
    chunk_length = chunk_length_of(own[0], algorithm)

    def plan_of(rank: int) -> Plan:
        plan = build(own[rank], algorithm, rank, chunk_length)
        if ordered and not plan.ordered:
            raise PlanError(f"{plan.collective}:{algorithm} of {own[rank]}: rank {rank} keeps no order of ranks")
        return plan

    return plan_of


def _one(problem: Problem | tuple[Problem, ...]) -> Problem:
    return problem if isinstance(problem, Problem) else problem[0]


Family: TypeAlias = tuple[Problem | tuple[Problem, ...], ...]
"""Problems that differ in the root alone, or one; where a rank knows only its own lengths, each is one per rank."""

CHUNK_LENGTH: Final = 4
"""Elements in a chunk: few, so that small vectors have several. A proof depends on the cuts, not on the size."""

THOROUGH: Final = 12
"""The largest world in which every count and root is proven. Up to there is every kind of number: powers of two,
primes, odd and even composites."""

EVERY_ROOT: Final = 128
"""The largest world in which every root is looked at. The plans alone, for all roots, are p * p to make."""

BOTH_COUNTS: Final = 64
"""The largest world that is proven with even and with uneven counts, most ranks having an element, and with every root,
whether or not its plans are another's renamed."""

BY_TURNS: Final = 128
"""The largest world from which on three worlds in four are proven with uneven counts, and not every second one."""

SEVERAL_CHUNKS: Final = 5 * CHUNK_LENGTH + 1
"""Elements of a vector sent whole: six chunks, more than any window holds."""

FEW: Final = 11
"""Elements, or ranks that have some, where most have none: several, and no divisor of most worlds."""

BLOCK_PATTERN: Final = (5, 0, 1, 0)
"""Uneven block lengths, repeated: two chunks, nothing, one element."""

LONG_SLICE: Final = 21
"""Elements of a slice or block of six chunks: more than a plan through shared memory is ahead of its results."""

LONG_SLICES: Final = 16
"""Of larger worlds every how manieth is proven with those."""

SINGLE_COPIES: Final = (("all_reduce", "shared"),)
"""Collectives and algorithms whose plans are others where what is published is read where it lies: further ahead."""

TREES_BY_HOST: Final = ("binary_tree", "double_tree")
"""Algorithms whose plans depend on the ranks per host, but not on how a vector is cut for them."""

BY_HOST: Final = ("ring_2d", *TREES_BY_HOST)
"""Algorithms whose plans depend on the ranks per host."""

BY_PLACEMENT: Final = (
    ("all_reduce", "ring_2d"),
    *((name, "double_tree") for name in ("all_reduce", "broadcast", "reduce")),
)
"""Collectives and algorithms whose plans depend on where ranks are, also if hosts hold no equal runs of them."""


def families(collective: str, algorithm: str, world: int, *, thorough: bool | None = None) -> Iterator[Family]:
    """Yield what an algorithm is proven on in a world; `thorough`: as in small worlds."""
    if thorough is None:
        thorough = world <= THOROUGH
    if collective == "all_to_all_uneven":
        for lengths in _exchanges(world, thorough=thorough):
            yield (exchange_problems(lengths),)
        return
    cases = _counts(collective, world, thorough=thorough)
    cuts = collective != "barrier" and collective not in PRIVATE_COLLECTIVES
    if needs_lane(collective, algorithm) and cuts and (thorough or world % LONG_SLICES == 1):
        blocks = collective in BLOCK_COLLECTIVES or collective == "all_to_all"
        cases.append((LONG_SLICE if blocks else LONG_SLICE * world + 5, False))
        if (collective, algorithm) in SINGLE_COPIES and world <= BOTH_COUNTS:
            chunks = 4 * SINGLE_COPY_LOOKAHEAD if thorough else SINGLE_COPY_LOOKAHEAD + 2
            yield (Problem.of(collective, world, CHUNK_LENGTH * chunks * world - 1)._replace(single_copy=True),)
    for number, (counts, every_root) in enumerate(cases):
        roots: Collection[int] = (0,)
        if collective in ROOTED:
            roots = range(world) if every_root else _five(world)
        by_host = algorithm in BY_HOST and (algorithm not in TREES_BY_HOST or number in (1, 2))  # even and uneven
        for ranks_per_host in _hosts(world, algorithm, thorough=thorough) if by_host else (1,):
            first = Problem.of(collective.removesuffix("_uneven"), world, counts, 0, ranks_per_host)
            family = tuple(rotated_problem(first, root) for root in roots)
            if collective in PRIVATE_COLLECTIVES:
                yield tuple(private_problems(collective, problem.counts, problem.root) for problem in family)
            else:
                yield family
        placeable = by_host and thorough and world > 2 and (collective, algorithm) in BY_PLACEMENT
        for hosts in _placements(world) if placeable else ():
            placed = Problem.of(collective, world, counts)._replace(hosts=hosts)
            yield from ((placed._replace(root=root),) for root in roots)


def chunk_length_of(problem: Problem, algorithm: str = "") -> int:
    """Elements in a chunk, such that whole vectors have several and, above the thorough worlds, not too many."""
    if algorithm == "shared":  # which cuts slices
        return CHUNK_LENGTH
    if problem.collective in VECTOR_COLLECTIVES and problem.world > THOROUGH:
        return max(CHUNK_LENGTH, problem.total // 5)
    return CHUNK_LENGTH


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


def _counts(collective: str, world: int, *, thorough: bool) -> list[tuple[int | tuple[int, ...], bool]]:
    """Counts, and whether to prove every root with them."""
    if collective == "barrier":
        return [(0, False)]
    even: int | tuple[int, ...] = 1
    if collective in BLOCK_COLLECTIVES:
        uneven: int | tuple[int, ...] = _pattern(world) if world <= BOTH_COUNTS else _sparse(world)
        more: list[int | tuple[int, ...]] = [9, _lone(world)]
    elif collective == "all_to_all":
        uneven, more = 1, [9]  # which has no uneven counts
    elif collective in ROOTED:
        even, uneven = 2, SEVERAL_CHUNKS  # two: one for each half of a vector
        more = [1, 9 * world + 5]
    else:
        uneven = world + world // 2 + 1 if world <= BOTH_COUNTS else FEW
        even, more = world, [1, world - 1, 9 * world + 5]
    if thorough:
        return [(counts, True) for counts in dict.fromkeys((0, even, uneven, *more))]
    every_root = world <= EVERY_ROOT
    if world <= BOTH_COUNTS:
        return [(counts, counts == even) for counts in dict.fromkeys((0, even, uneven))]
    # powers of two and those one less are even, those one more uneven
    turn = world % 4 in (0, 3) if world <= BY_TURNS else world % 8 in (0, 7)
    return [(0, False), (even if turn else uneven, every_root)]


def run_roots(world: int) -> Collection[int]:
    """Roots whose problems are run if their plans are not another root's, renamed."""
    return range(world) if world <= BOTH_COUNTS else _five(world)


def _five(world: int) -> Collection[int]:
    return sorted({0, 1 % world, world // 3, world // 2, world - 1})


def _hosts(world: int, algorithm: str, *, thorough: bool) -> Sequence[int]:
    """Ranks per host: one, those that divide the world, and one that does not; in larger worlds fewer of them."""
    divisors = [number for number in range(2, world) if world % number == 0]
    middle = divisors[len(divisors) // 2 :][:1]
    other = [next(number for number in range(2, world + 2) if world % number)]
    if thorough:
        return [1, *divisors, *other]
    if algorithm in TREES_BY_HOST:
        return [1, *(middle or other if world <= BOTH_COUNTS else middle)]
    return [1, *middle] if world <= BOTH_COUNTS else middle or [1]


def _placements(world: int) -> Iterator[tuple[int, ...]]:
    """Hosts that hold no equal runs: one rank is alone; a host has ranks here and there."""
    yield (0, *[1] * (world - 1))
    yield tuple(rank * rank % 3 for rank in range(world))


def _exchanges(world: int, *, thorough: bool) -> Iterator[list[list[int]]]:
    """Matrices of lengths: row s is what rank s sends to each."""
    ranks = range(world)
    yield [[BLOCK_PATTERN[(3 * source + target) % len(BLOCK_PATTERN)] for target in ranks] for source in ranks]
    if thorough:
        yield [[0] * world for _ in ranks]
        yield [[1] * world for _ in ranks]
        yield [[9 * (target == world // 2) for target in ranks] for _ in ranks]


def _pattern(world: int) -> tuple[int, ...]:
    return tuple(BLOCK_PATTERN[rank % len(BLOCK_PATTERN)] for rank in range(world))


def _sparse(world: int) -> tuple[int, ...]:
    """Few ranks have something, the first not among them."""
    step = world // FEW
    return tuple((5, 1)[rank // step % 2] if rank % step == step - 1 else 0 for rank in range(world))


def _lone(world: int) -> tuple[int, ...]:
    """Only one rank, not the root, has something."""
    return tuple(7 if rank == world // 2 else 0 for rank in range(world))
