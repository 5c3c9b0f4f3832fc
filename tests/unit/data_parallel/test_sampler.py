"""DistributedSampler: torch's division of indices among ranks."""

from __future__ import annotations

import pytest

from asyncdist import DistributedSampler, blocking
from asyncdist.group.process_group import ProcessGroup
from asyncdist.testing import run_world


def samplers(length: int, ranks: int, **options: object) -> list[list[int]]:
    return [list(DistributedSampler(range(length), ranks, rank, **options)) for rank in range(ranks)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "ranks", "drop_last", "expected"),
    [
        (6, 3, False, [[0, 3], [1, 4], [2, 5]]),
        (7, 3, False, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
        (7, 3, True, [[0, 3], [1, 4], [2, 5]]),
        (2, 5, False, [[0], [1], [0], [1], [0]]),
        (2, 5, True, [[], [], [], [], []]),
        (0, 2, False, [[], []]),
    ],
)
def test_padding_and_dropping(length: int, ranks: int, drop_last: bool, expected: list[list[int]]) -> None:
    assert samplers(length, ranks, shuffle=False, drop_last=drop_last) == expected
    for rank, mine in enumerate(expected):
        assert len(DistributedSampler(range(length), ranks, rank, drop_last=drop_last)) == len(mine)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 5, 12, 13])
def test_as_torch_divides(length: int, ranks: int, drop_last: bool) -> None:
    data = pytest.importorskip("torch.utils.data", reason="needs torch (extra `peers`)")
    dataset = list(range(length))
    for rank in range(ranks):
        theirs = data.DistributedSampler(dataset, ranks, rank, shuffle=False, drop_last=drop_last)
        ours = DistributedSampler(dataset, ranks, rank, shuffle=False, drop_last=drop_last)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_shuffled_by_seed_and_epoch() -> None:
    together = samplers(12, 3)
    assert sorted(index for mine in together for index in mine) == list(range(12))
    assert together == samplers(12, 3)
    assert together != samplers(12, 3, seed=1)
    sampler = DistributedSampler(range(100), 1, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    # Epoch 1 of seed 0 is not epoch 0 of seed 1.
    assert second != list(DistributedSampler(range(100), 1, 0, seed=1))


def test_rank_and_size_of_the_default_group() -> None:
    async def main(group: ProcessGroup) -> list[int]:
        return list(DistributedSampler(range(6), shuffle=False))

    assert run_world(3, main) == [[0, 3], [1, 4], [2, 5]]


def test_wrong_arguments() -> None:
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=f"rank={rank} is not among the ranks 0 to 2"):
            DistributedSampler(range(6), 3, rank)
    with pytest.raises(TypeError, match="len"):
        DistributedSampler(6, 3, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed"):
        DistributedSampler(range(6), 3, 0, seed=-1)
    with pytest.raises(ValueError, match="epoch"):
        DistributedSampler(range(6), 3, 0).set_epoch(-1)
    for module in (DistributedSampler, blocking.DistributedSampler):
        with pytest.raises(ValueError, match="not been initialized"):
            module(range(6))
