"""Exchanges, prefixes and reductions of one's own between real processes."""

from __future__ import annotations

import pytest
from jobs import run_ranks

EXCHANGES = """
def last(left, right):
    return right

async def main():
    async with dist.init_process_group() as group:
        size, rank = group.size, group.rank
        for unit in (1, 1000, 300_000):  # eager, and pulled
            received = [(source + 2 * rank) % 3 * unit for source in range(size)]
            inputs = [np.full((rank + 2 * target) % 3 * unit, rank + 0.5, np.float32) for target in range(size)]
            outputs = [np.zeros(n, np.float32) for n in received]
            single = np.zeros(sum(received), np.float32)
            works = [
                dist.all_to_all(outputs, inputs),
                dist.all_to_all_single(single, np.concatenate(inputs), received, [len(x) for x in inputs]),
            ]
            for work in works:
                await work
            assert all((output == source + 0.5).all() for source, output in enumerate(outputs))
            assert np.array_equal(single, np.concatenate(outputs))
            even = np.zeros(size * unit)
            await dist.all_to_all_single(even, np.arange(size * unit) + 10.0 * rank)
            mine = np.arange(rank * unit, (rank + 1) * unit)
            assert np.array_equal(even.reshape(size, unit), [mine + 10.0 * source for source in range(size)])
            x, y, z = (np.full(unit, rank + 1.0) for _ in range(3))
            await dist.scan(x)
            await dist.exscan(y)
            await dist.all_reduce(z, dist.ReduceOp.custom(last, commutative=False))
            assert (x == (rank + 1) * (rank + 2) / 2).all()
            assert (y == (rank * (rank + 1) / 2 if rank else 1)).all()
            assert (z == size).all()
            blocks = [np.zeros(source * unit) for source in range(size)] if rank == 2 else None
            await dist.gather(np.full(rank * unit, float(rank)), blocks, dst=2, uneven=True)
            assert blocks is None or all((block == source).all() for source, block in enumerate(blocks))
        print("right")
dist.run(main())
"""


@pytest.mark.parametrize("transport", ["auto", "tcp", "unix"])
def test_exchanges_between_processes(transport: str) -> None:
    for rank in run_ranks(EXCHANGES, 3, {"ASYNCDIST_TRANSPORT": transport}):
        assert rank.stdout == "right\n"
        assert rank.stderr == ""
