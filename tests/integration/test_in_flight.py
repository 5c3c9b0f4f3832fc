"""Many collectives in flight at once, of every size, between real processes: each gets its own values."""

from __future__ import annotations

import pytest
from jobs import run_ranks

MANY = """
async def main():
    async with dist.init_process_group(timeout=60) as group:
        size = group.size
        kinds = ((1, 300), (2, 150), (300, 150), (4_096, 60), (16_384, 100), (40_000, 20), (200_000, 12))
        for elements, count in kinds:
            arrays = [np.full(elements, group.rank + number, np.float32) for number in range(count)]
            works = [dist.all_reduce(array) for array in arrays]
            if elements == 300:
                works.reverse()
            for work in works:
                await work
            for number, array in enumerate(arrays):
                expected = size * (size - 1) / 2 + size * number
                assert (array == expected).all(), (elements, number, array[:4], expected)
            await dist.barrier()
        mixed = [np.full(elements, group.rank, np.int64) for elements in (1, 50_000, 7, 8_192, 3, 100_000, 2) * 20]
        for work in [dist.all_reduce(array, tag=number % 2) for number, array in enumerate(mixed)]:
            await work
        assert all((array == size * (size - 1) // 2).all() for array in mixed)
dist.run(main())
"""


@pytest.mark.parametrize("spin_us", ["0", "20"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_collective_in_flight_gets_its_own_values(world_size: int, spin_us: str) -> None:
    run_ranks(MANY, world_size, {"ASYNCDIST_SPIN_US": spin_us})


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_so_it_is_by_messages(transport: str) -> None:
    run_ranks(MANY, 3, {"ASYNCDIST_TRANSPORT": transport})
