"""Many collectives in flight at once, of every size, between real processes: each gets its own values."""

from __future__ import annotations

import pytest
from jobs import run_ranks

MANY = """
async def many():
    async with dist.init_process_group(timeout=60, group_name=" ".join(environ.values())) as group:
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

async def main():
    global environ
    async with dist.init_process_group(timeout=60) as group:
        for environ in ENVIRONS:  # each of them in a world of its own
            os.environ.update(environ)
            await many()
            await group.barrier()
dist.run(main())
"""
ASLEEP, SPINNING = {"ASYNCDIST_SPIN_US": "0"}, {"ASYNCDIST_SPIN_US": "20"}
BY_MESSAGES = [{"ASYNCDIST_TRANSPORT": transport} for transport in ("unix", "tcp")]


@pytest.mark.parametrize(
    ("world_size", "environs"),
    [
        pytest.param(2, [ASLEEP, SPINNING], marks=pytest.mark.thorough),
        (3, [ASLEEP, SPINNING]),
        (3, BY_MESSAGES),
        pytest.param(4, [ASLEEP, SPINNING], marks=pytest.mark.thorough),
    ],
)
def test_every_collective_in_flight_gets_its_own_values(world_size: int, environs: list[dict[str, str]]) -> None:
    run_ranks(MANY.replace("ENVIRONS", repr(environs)), world_size)
