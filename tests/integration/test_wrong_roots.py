"""Rooted collectives whose ranks name different roots: every rank raises, and reads what both sides ran."""

from __future__ import annotations

import functools
import json

import pytest
from jobs import run_ranks

CALLS = """
import json

def block(size):
    return np.zeros(max(1, size // 4), "f4")

def blocks(group, root, size):
    return [block(size) for _ in range(group.size)] if group.rank == root else None

CALLS = {
    "broadcast": lambda g, root, size: g.broadcast(block(size), root),
    "reduce": lambda g, root, size: g.reduce(block(size), root),
    "gather": lambda g, root, size: g.gather(block(size), blocks(g, root, size), root),
    "scatter": lambda g, root, size: g.scatter(block(size), blocks(g, root, size), root),
    "gather_uneven": lambda g, root, size: g.gather(block(size), blocks(g, root, size), root, uneven=True),
    "scatter_uneven": lambda g, root, size: g.scatter(block(size), blocks(g, root, size), root, uneven=True),
    "broadcast_coalesced": lambda g, root, size: g.broadcast_coalesced([block(size), block(4)], root),
    "broadcast_stream": lambda g, root, size: g.broadcast_stream(block(size), root),
    "broadcast_multigpu": lambda g, root, size: g.broadcast_multigpu([block(size)], root),
    "reduce_multigpu": lambda g, root, size: g.reduce_multigpu([block(size)], root),
    "broadcast_array": lambda g, root, size: g.broadcast_array(block(size) if g.rank == root else None, root),
    "gather_array": lambda g, root, size: g.gather_array(block(size), root),
    "scatter_array": lambda g, root, size: g.scatter_array(blocks(g, root, size), root),
    "broadcast_object_list": lambda g, root, size: g.broadcast_object_list([bytes(size)], root),
    "gather_object": lambda g, root, size: g.gather_object(
        bytes(size), [None] * g.size if g.rank == root else None, root
    ),
    "scatter_object_list": lambda g, root, size: g.scatter_object_list([None], [bytes(size)] * g.size, root),
}
ROOTS = {
    "everyone its own": lambda rank, size: rank,
    "the next": lambda rank, size: (rank + 1) % size,
    "one differs": lambda rank, size: int(rank == size - 1),
}
LIMIT_S = 20

async def ended(made):
    if isinstance(made, dist.Work):
        await made
    else:
        async for _ in made:
            pass

async def rounds(group, call, roots, size):
    await group.barrier()
    await ended(call(group, 0, size))
    await ended(call(group, ROOTS[roots](group.rank, group.size), size))
    for _ in range(2):  # what waits for all the others
        await group.barrier()

async def one(group, name, roots, size):
    try:
        async with asyncio.timeout(LIMIT_S):
            await rounds(group, CALLS[name], roots, size)
        said = "nothing"
    except dist.CollectiveError as error:
        said = str(error)
    except TimeoutError:
        said = "hangs"
        group.abort("hangs")
    print(json.dumps([name, roots, size, said]), flush=True)
    try:
        await group.close()
    except dist.DistError:
        pass

async def main():
    async with dist.init_process_group(timeout=60) as world:
        groups = [dist.new_group(list(range(world.size))) for _ in CASES]
        cases = list(zip(groups, CASES))
        for first in range(0, len(cases), AT_ONCE):
            await asyncio.gather(*(one(group, *case) for group, case in cases[first : first + AT_ONCE]))

dist.run(main())
"""

NAMES = (
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "gather_uneven",
    "scatter_uneven",
    "broadcast_coalesced",
    "broadcast_stream",
    "broadcast_multigpu",
    "reduce_multigpu",
    "broadcast_array",
    "gather_array",
    "scatter_array",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
ROOTS = ("everyone its own", "the next", "one differs")

thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.slow("makes 48 groups")
@pytest.mark.parametrize("transport", ["auto", "unix", "tcp"])
@pytest.mark.parametrize("world_size", [3, *map(thorough, (2, 4, 5))])
@pytest.mark.parametrize("size", [4, 200_000, *map(thorough, (2000, 8 << 20))])
def test_every_rank_reads_what_both_sides_run(world_size: int, size: int, transport: str) -> None:
    expect_both_sides(world_size, size, transport)


@pytest.mark.slow("moves 48 long vectors")
def test_every_rank_reads_it_of_long_ones() -> None:
    expect_both_sides(3, 2 << 20, "auto")


def expect_both_sides(world_size: int, size: int, transport: str) -> None:
    cases = [(name, roots, size) for name in NAMES for roots in ROOTS]
    code = f"CASES, AT_ONCE = {cases!r}, {8 if size > 1 << 20 else 24}\n{CALLS}"
    wrong = []
    for rank in run_ranks(code, world_size, {"ASYNCDIST_TRANSPORT": transport}):
        told = [json.loads(line) for line in rank.stdout.splitlines()]
        assert len(told) == len(cases), rank
        for name, roots, _, said in told:
            sides = said.count(" root ")
            if sides < 2 or said.count(f"{name.removesuffix('_uneven')} ") < 2 or "in collective #2" not in said:
                wrong.append((rank.rank, name, roots, said))
    assert not wrong, wrong
