"""all_to_all in its forms, uneven gather, scatter and all_gather: results, wrong arguments, lengths that disagree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, assert_told_apart, outcome

import asyncdist as dist
from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.testing import run_world


def length(source: int, target: int) -> int:
    """What `source` sends to `target`: something, nothing, one element."""
    return (3 * source + 5 * target) % 4


def block(source: int, target: int, rows: int) -> np.ndarray:
    return np.arange(rows * 2).reshape(rows, 2) + 100.0 * source + 1000 * target


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_to_all_of_arrays_of_any_shapes(size: int) -> None:
    async def main(group: Group) -> None:
        rank = group.rank
        inputs = [block(rank, target, length(rank, target)) for target in range(size)]
        outputs = [np.zeros((length(source, rank), 2)) for source in range(size)]
        assert await dist.all_to_all(outputs, inputs) is outputs
        for source, output in enumerate(outputs):
            assert np.array_equal(output, block(source, rank, length(source, rank)))

    run_world(size, main, seed=size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_to_all_single_with_splits_of_rows(size: int) -> None:
    async def main(group: Group) -> None:
        rank = group.rank
        sent = [length(rank, target) for target in range(size)]
        received = [length(source, rank) for source in range(size)]
        whole = np.concatenate([block(rank, target, rows) for target, rows in enumerate(sent)])
        output = np.zeros((sum(received), 2))
        assert await dist.all_to_all_single(output, whole, received, sent) is output
        assert np.array_equal(output, np.concatenate([block(source, rank, n) for source, n in enumerate(received)]))

    run_world(size, main, seed=size)


@pytest.mark.parametrize("algorithm", [*algorithms("all_to_all"), None])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_all_to_all_single_shares_evenly(size: int, algorithm: str | None) -> None:
    async def main(group: Group) -> None:
        if algorithm is not None:
            group._core._backend._overrides["all_to_all"] = algorithm  # type: ignore[attr-defined]
        for rows in (1, 3, 0, 20_000 // size):
            x = np.arange(size * rows * 2).reshape(-1, 2) + group.rank * 1_000_000
            output = np.zeros_like(x)
            await group.all_to_all_single(output, x, [] if rows == 3 else None)
            parts = [np.arange(size * rows * 2).reshape(-1, 2) + source * 1_000_000 for source in range(size)]
            mine = slice(group.rank * rows, (group.rank + 1) * rows)
            assert np.array_equal(output, np.concatenate([part[mine] for part in parts]))

    run_world(size, main, seed=size)


def test_one_side_of_the_splits_may_be_even() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:  # sends 2 and 2, receives 2 and 4
            output = np.zeros(6)
            await group.all_to_all_single(output, np.arange(4.0), output_split_sizes=[2, 4])
            assert output.tolist() == [0, 1, 10, 11, 12, 13]
        else:  # sends 4 and 2, receives 2 and 2
            output = np.zeros(4)
            await group.all_to_all_single(output, 10 + np.arange(6.0), input_split_sizes=(np.int64(4), 2))
            assert output.tolist() == [2, 3, 14, 15]

    run_world(2, main)


def test_input_and_output_may_be_the_same_memory() -> None:
    async def main(group: Group) -> None:
        x = np.arange(3) + 10 * group.rank
        await group.all_to_all_single(x, x)
        assert x.tolist() == [group.rank, 10 + group.rank, 20 + group.rank]
        y = [np.full(2, 10 * group.rank + target) for target in range(3)]
        await group.all_to_all(y, y[:])
        assert [array.tolist() for array in y] == [[10 * source + group.rank] * 2 for source in range(3)]
        await group.all_to_all([y[1], y[2], y[0]], y)
        assert [array.tolist() for array in (y[1], y[2], y[0])] == [
            [10 * group.rank + source] * 2 for source in range(3)
        ]

    for seed in range(5):
        run_world(3, main, seed=seed)


def test_strided_arrays_are_exchanged_in_place() -> None:
    async def main(group: Group) -> None:
        base = np.zeros((4, 4), np.int32)
        sent = [np.arange(8, dtype=np.int32).reshape(2, 4).T + 100 * other for other in range(2)]
        splits = [1, 3] if group.rank == 0 else [3, 1]
        await group.all_to_all_single(base[:, 1:3], sent[group.rank], splits, splits)
        rows = (slice(0, 1), slice(0, 3)) if group.rank == 0 else (slice(1, 4), slice(3, 4))
        assert np.array_equal(base[:, 1:3], np.concatenate([part[mine] for part, mine in zip(sent, rows, strict=True)]))
        assert not base[:, [0, 3]].any()
        base = np.zeros((3, 2))
        await group.all_to_all([base[:, 0], base[:, 1]], [np.full(3, 10 * group.rank + to) for to in (0.0, 1.0)])
        assert np.array_equal(base, [[group.rank, 10 + group.rank]] * 3)

    run_world(2, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_to_all([np.zeros(1)], [np.zeros(1)] * 2), ValueError, "output_tensor_list must hold one"),
        (lambda g: g.all_to_all([np.zeros(1)] * 2, [np.zeros(1)] * 3), ValueError, "input_tensor_list must hold one"),
        (lambda g: g.all_to_all(np.zeros(2), [np.zeros(1)] * 2), TypeError, "must be a list"),
        (lambda g: g.all_to_all([np.zeros(1), "x"], [np.zeros(1)] * 2), TypeError, r"output_tensor_list\[1\] must be"),
        (lambda g: g.all_to_all([np.zeros(1)] * 2, [np.zeros(2), np.zeros(1)]), ValueError, r"\[0\] has shape \(1,\)"),
        (lambda g: g.all_to_all([np.zeros(1)] * 2, [np.zeros(1), np.zeros(1, "f4")]), ValueError, "dtype float32"),
        (lambda g: g.all_to_all([np.zeros(1), np.zeros(1, int)], [np.zeros(1)] * 2), ValueError, "dtype int64"),
        (lambda g: g.all_to_all([np.broadcast_to(0.0, 3)] * 2, [np.zeros(3)] * 2), ValueError, "read-only"),
        (lambda g: g.all_to_all_single(np.zeros(3), np.zeros(3)), ValueError, "is 3, which 2 ranks cannot share"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(2)), ValueError, "input holds 1 elements for this rank"),
        (lambda g: g.all_to_all_single(np.zeros(4, "f4"), np.zeros(4)), ValueError, "dtype"),
        (lambda g: g.all_to_all_single(np.array(1.0), np.array(1.0)), ValueError, "must have a dimension"),
        (lambda g: g.all_to_all_single("x", np.zeros(2)), TypeError, "output must be"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), None, [4]), ValueError, "one size per rank: 2, but"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), [1, 2]), ValueError, "output_split_sizes add up to 3"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), [5, -1]), ValueError, "must not be negative"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), [1.0, 3]), TypeError, r"sizes\[0\] must be an int"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), [True, 3]), TypeError, r"sizes\[0\] must be an int"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), np.ones(2)), TypeError, "must be a list of ints"),
        (lambda g: g.all_to_all_single(np.zeros(4), np.zeros(4), [1, 3], [3, 1]), ValueError, "has room for 1"),
        (lambda g: g.all_gather([np.zeros(3), np.zeros(2)], np.zeros(2)), ValueError, r"\[0\] is float64\[3\], but"),
        (lambda g: g.all_gather([np.zeros(2), np.zeros(2, "f4")], np.zeros(2)), ValueError, "dtype"),
        (lambda g: g.gather(np.zeros(2), [np.zeros(2), np.zeros(3)]), ValueError, "say uneven=True on every rank"),
        (lambda g: g.scatter(np.zeros(2), [np.zeros(2), np.zeros(3)]), ValueError, "say uneven=True on every rank"),
        (lambda g: g.gather(np.zeros(2), [np.zeros(3)] * 2, uneven=True), ValueError, r"\[0\] is float64\[3\], but"),
        (lambda g: g.gather(np.zeros(2), uneven=True), ValueError, "must be given on the destination"),
        (lambda g: g.gather(np.zeros(2), [np.zeros(2)] * 2, 1, uneven=True), ValueError, "must not be given on"),
        (lambda g: g.scatter(np.zeros(2), [np.zeros(3)] * 2, uneven=True), ValueError, r"\[0\] is float64\[3\], but"),
        (lambda g: g.scatter(np.zeros(2), uneven=True), ValueError, "must be given on the source"),
        (lambda g: g.scatter(np.zeros(2), [np.zeros(2)] * 2, 1, uneven=True), ValueError, "must not be given on"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call_and_told(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                await group.barrier()
        await group.barrier()

    run_world(2, main)


@pytest.mark.parametrize(
    ("sent", "expected"), [(0, 1), (0, 100_000), (3, 0), (3, 4), (3, 100_000), (200_000, 0), (200_000, 100_000)]
)
@pytest.mark.parametrize("algorithm", ["linear", "pairwise"])
def test_lengths_that_disagree_name_the_rank_that_sends(sent: int, expected: int, algorithm: str) -> None:
    """Also where one of the two is nothing at all, and where the messages are pulled."""

    async def main(group: Group) -> BaseException | None:
        group._core._backend._overrides["all_to_all_uneven"] = algorithm  # type: ignore[attr-defined]
        sizes = [[1, 1, 1], [1, 1, sent], [1, 1, 1]]
        inputs = [np.zeros(n, np.uint8) for n in sizes[group.rank]]
        outputs = [np.zeros(row[group.rank], np.uint8) for row in sizes]
        if group.rank == 2:
            outputs[1] = np.zeros(expected, np.uint8)
        error = await outcome(group.all_to_all(outputs, inputs))
        await asyncio.sleep(1)
        with pytest.raises(dist.GroupAbortedError):
            group.barrier()
        return error

    error = run_world(3, main, seed=1)[2]
    assert isinstance(error, dist.CollectiveMismatchError)
    assert f"rank 1 sent {sent} bytes where {expected} are expected" in str(error)
    assert "rank 2, all_to_all #0" in str(error)


@pytest.mark.parametrize("root", [0, 1, 2])
@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_lengths_that_disagree_with_the_root_are_named(collective: str, root: int) -> None:
    async def main(group: Group) -> BaseException | None:
        wrong = (root + 1) % 3
        blocks = [np.zeros(5) for _ in range(3)] if group.rank == root else None
        tensor = np.zeros(0 if group.rank == wrong else 5)
        return await outcome(getattr(group, collective)(tensor, blocks, root, uneven=True))

    errors = run_world(3, main, seed=root)
    receiver, sender = ((root + 1) % 3, root) if collective == "scatter" else (root, (root + 1) % 3)
    assert isinstance(errors[receiver], dist.CollectiveMismatchError)
    assert f"rank {sender} sent" in str(errors[receiver])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda g: g.all_to_all_single(np.zeros(2), np.zeros(2)),
            lambda g: g.all_to_all_single(np.zeros(2), np.zeros(2), [1, 1]),
        ),
        (
            lambda g: g.all_to_all([np.zeros(1)] * 2, [np.zeros(1)] * 2),
            lambda g: g.all_to_all([np.zeros(2, "f4")] * 2, [np.zeros(2, "f4")] * 2),
        ),
        (
            lambda g: g.gather(np.zeros(1), [np.zeros(1)] * 2, uneven=True),
            lambda g: g.gather(np.zeros(1)),
        ),
        (
            lambda g: g.all_gather([np.zeros(1), np.zeros(2)], np.zeros(1)),
            lambda g: g.all_gather([np.zeros(2), np.zeros(2)], np.zeros(2)),
        ),
        (lambda g: g.scan(np.zeros(2)), lambda g: g.exscan(np.zeros(2))),
    ],
)
def test_different_calls_are_told_apart(one: Callable[[Group], Any], other: Callable[[Group], Any]) -> None:
    assert_told_apart(one, other)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_gather_and_scatter_of_different_sizes_to_and_from_every_root(size: int) -> None:
    async def main(group: Group) -> None:
        for root in range(size):
            sizes = [length(rank, root) for rank in range(size)]
            mine = np.full(sizes[group.rank], group.rank)
            blocks = [np.zeros(n, int) for n in sizes] if group.rank == root else None
            assert await dist.gather(mine, blocks, dst=root, uneven=True) is blocks
            if blocks is not None:
                assert [b.tolist() for b in blocks] == [[rank] * n for rank, n in enumerate(sizes)]
            back = np.full_like(mine, -1)
            assert await dist.scatter(back, blocks, src=root, uneven=True) is back
            assert np.array_equal(back, mine)

    run_world(size, main, seed=size)


@pytest.mark.parametrize("algorithm", [*algorithms("all_gather"), None])
def test_all_gather_of_different_sizes(algorithm: str | None) -> None:
    async def main(group: Group) -> None:
        if algorithm is not None:
            group._core._backend._overrides["all_gather"] = algorithm  # type: ignore[attr-defined]
        for step in (0, 1, 20_000):
            shapes = [((rank * step) % 70_001, 2) for rank in range(group.size)]
            mine = np.full(shapes[group.rank], float(group.rank))
            everyone = [np.zeros(shape) for shape in shapes]
            await group.all_gather(everyone, mine)
            assert all((array == rank).all() for rank, array in enumerate(everyone))

    run_world(5, main, seed=3)


def test_varying_splits_share_what_is_prepared() -> None:
    """A mixture of experts has other splits at every step: they must not push other operations' plans out."""

    async def main(group: Group) -> None:
        for step in range(20):
            sent = [(group.rank + target + step) % 5 for target in range(3)]
            received = [(group.rank + source + step) % 5 for source in range(3)]
            output = np.zeros(sum(received))
            await group.all_to_all_single(output, np.full(sum(sent), float(group.rank)), received, sent)
            assert output.tolist() == [float(source) for source in range(3) for _ in range(received[source])]
        assert len(group._core._backend._recipes) == 1  # type: ignore[attr-defined]

    run_world(3, main)


def test_large_exchanges_over_and_over() -> None:
    async def main(group: Group) -> None:
        works = []
        for step in range(3):
            inputs = [np.full(100_000 * target + step, 10.0 * group.rank + target) for target in range(3)]
            outputs = [np.zeros(100_000 * group.rank + step) for _ in range(3)]
            works.append((group.all_to_all(outputs, inputs), outputs))
        for work, outputs in works:
            await work
            assert all((array == 10.0 * source + group.rank).all() for source, array in enumerate(outputs))

    run_world(3, main, seed=4)
