"""scan and exscan, and reductions with a function of the user's: results, order, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, ordered_algorithms
from asyncdist.testing import run_world

AFFINE = dist.ReduceOp.custom(
    # Compositions of maps x -> a x + b modulo 7, each written as the number a + 10 b.
    lambda left, right: (right % 10 * (left % 10)) % 7 + 10 * ((right % 10 * (left // 10) + right // 10) % 7),
    commutative=False,
    name="affine",
)


def maps(rank: int, length: int) -> np.ndarray:
    numbers = np.random.default_rng(rank)
    return numbers.integers(1, 7, length) + 10 * numbers.integers(0, 7, length)


def composed(ranks: Any, length: int) -> np.ndarray:
    first, *rest = [maps(rank, length) for rank in ranks]
    for other in rest:
        first = AFFINE.function(first, other)
    return first


def use(group: Group, collective: str, algorithm: str | None) -> None:
    if algorithm is not None:
        group._core._backend._overrides[collective] = algorithm  # type: ignore[attr-defined]


def test_the_operation_of_these_tests_does_not_commute() -> None:
    left, right = maps(0, 50), maps(1, 50)
    assert not np.array_equal(AFFINE.function(left, right), AFFINE.function(right, left))
    third = maps(2, 50)
    assert np.array_equal(
        AFFINE.function(AFFINE.function(left, right), third), AFFINE.function(left, AFFINE.function(right, third))
    )


@pytest.mark.parametrize("algorithm", [*algorithms("scan"), None])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_prefixes(size: int, algorithm: str | None) -> None:
    async def main(group: Group) -> None:
        rank = group.rank
        for collective in ("scan", "exscan"):
            use(group, collective, algorithm)
        for shape in ((3, 4), (0,), (), (150_000,)):
            for op, reduce in ((dist.ReduceOp.SUM, np.sum), (dist.ReduceOp.MAX, np.max)):
                everyone = [np.full(shape, float(5 - abs(other - 2))) for other in range(size)]
                x, y = everyone[rank].copy(), everyone[rank].copy()
                assert await dist.scan(x, op) is x
                assert await dist.exscan(y, op) is y
                assert np.array_equal(x, reduce(everyone[: rank + 1], axis=0))
                assert np.array_equal(y, reduce(everyone[:rank], axis=0) if rank else everyone[0])

    run_world(size, main, seed=size)


def test_a_weighted_prefix_leaves_rank_0_alone_where_it_has_none() -> None:
    async def main(group: Group) -> None:
        x, y = np.ones(3), np.ones(3)
        await group.scan(x, dist.ReduceOp.PREMUL_SUM(group.rank + 1.0))
        await group.exscan(y, dist.ReduceOp.PREMUL_SUM(group.rank + 1.0))
        assert (x == [1, 3, 6, 10][group.rank]).all()
        assert (y == [1, 1, 3, 6][group.rank]).all()
        if not group.rank:
            y.flags.writeable = False  # rank 0 only reads
        await group.exscan(y)

    run_world(4, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.scan([1]), TypeError, "tensor must be"),
        (lambda g: g.exscan(np.zeros(2), "sum"), TypeError, "ReduceOp"),
        (lambda g: g.scan(np.zeros(2), dist.ReduceOp.AVG), TypeError, "not defined for prefixes"),
        (lambda g: g.exscan(np.zeros(2), dist.ReduceOp.AVG), TypeError, "not defined for prefixes"),
        (lambda g: g.scan(np.zeros(2), dist.ReduceOp.BAND), TypeError, "BAND"),
        (lambda g: g.scan(np.broadcast_to(0.0, 3)), ValueError, "read-only"),
        (lambda g: g.exscan(np.broadcast_to(0.0, 3)), ValueError, "read-only"),
        (lambda g: g.scan(np.zeros(2), tag=-1), ValueError, "tag"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            with pytest.raises(error, match=message):
                call(group)

    run_world(2, main)


REDUCING = [(collective, algorithm) for collective in ("all_reduce", "reduce_scatter", "reduce", "scan", "exscan")
            for algorithm in (*ALGORITHMS[collective], None)]  # fmt: skip


@pytest.mark.parametrize(("collective", "algorithm"), REDUCING)
def test_a_function_that_does_not_commute_is_applied_in_rank_order(collective: str, algorithm: str | None) -> None:
    """Whatever algorithm is asked for: one that does not keep the order is not used."""

    async def main(group: Group) -> None:
        use(group, collective, algorithm)
        size, rank = group.size, group.rank
        for length in (0, 1, 7, 3_001):
            x = maps(rank, length)
            if collective == "all_reduce":
                await group.all_reduce(x, AFFINE)
                assert np.array_equal(x, composed(range(size), length))
            elif collective == "reduce":
                for root in range(size):
                    x = maps(rank, length)
                    await group.reduce(x, root, AFFINE)
                    assert np.array_equal(x, composed(range(size), length) if rank == root else maps(rank, length))
            elif collective == "reduce_scatter":
                out = np.zeros(length, int)
                await group.reduce_scatter_tensor(out, maps(rank, length * size), AFFINE)
                mine = slice(rank * length, (rank + 1) * length)
                assert np.array_equal(out, composed(range(size), length * size)[mine])
            elif collective == "scan":
                await group.scan(x, AFFINE)
                assert np.array_equal(x, composed(range(rank + 1), length))
            else:
                await group.exscan(x, AFFINE)
                assert np.array_equal(x, composed(range(rank), length) if rank else maps(0, length))
        recipes = group._core._backend._recipes.values()  # type: ignore[attr-defined]
        assert {recipe.program.plan.algorithm for recipe in recipes} <= set(ordered_algorithms(collective))

    for size in (2, 5):
        run_world(size, main, seed=size)


@pytest.mark.parametrize("algorithm", [*algorithms("all_reduce"), None])
def test_a_function_that_commutes_goes_with_every_algorithm(algorithm: str | None) -> None:
    """Large enough for several chunks, and for reductions in slices."""
    op = dist.ReduceOp.custom(np.hypot)
    assert repr(op) == "ReduceOp.custom(hypot)"

    async def main(group: Group) -> None:
        use(group, "all_reduce", algorithm)
        for length in (3, 500_000):
            x = np.full(length, group.rank + 1.0, np.float32)
            await group.all_reduce(x, op)
            np.testing.assert_allclose(x, np.sqrt(sum((rank + 1.0) ** 2 for rank in range(group.size))), rtol=1e-5)

    run_world(3, main, seed=2)


class Failing:
    """Adds, until it is to fail."""

    def __init__(self, error: BaseException | Any, on_rank_with: float) -> None:
        self.error = error
        self.value = on_rank_with

    def __call__(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if self.value in (left[0], right[0]):
            if isinstance(self.error, BaseException):
                raise self.error
            return self.error(left, right)
        return left + right


@pytest.mark.parametrize("length", [4, 40_000, 1_000_000])
@pytest.mark.parametrize("algorithm", ["recursive_doubling", "ring"])
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (dist.GroupAbortedError("mine", "mine", 0), "GroupAbortedError: mine"),
        (lambda left, right: left[:1], r"ValueError: it returned shape \(1,\) for operands"),
        (lambda left, right: (left + right) * 1j, "TypeError: Cannot cast"),
        (lambda left, right: left.sort(), "ValueError: .*read-only"),
        (lambda left, right: None, "ValueError: it returned shape"),
    ],
)
def test_a_function_that_fails_ends_the_operation_everywhere(
    failure: Any, message: str, algorithm: str, length: int
) -> None:
    op = dist.ReduceOp.custom(Failing(failure, 3.0), name="failing")

    async def main(group: Group) -> Any:
        use(group, "all_reduce", algorithm)
        x = np.full(length, group.rank + 1.0)
        error = await outcome(group.all_reduce(x, op))
        await asyncio.sleep(1)
        with pytest.raises(dist.GroupAbortedError):
            group.barrier()
        return error

    errors = run_world(3, main, seed=1)
    failed = [error for error in errors if type(error) is dist.DistError]
    assert failed, errors
    for error in failed:
        with pytest.raises(dist.DistError, match=rf"all_reduce #0: ReduceOp.custom\(failing\) raised {message}"):
            raise error
        assert isinstance(error.__cause__, Exception)
    for error in errors:
        assert isinstance(error, dist.DistError | np.ndarray), errors


def test_a_function_that_fails_within_the_call_is_told_to_the_others() -> None:
    """all_reduce_multigpu reduces a rank's own arrays at once."""
    op = dist.ReduceOp.custom(Failing(ZeroDivisionError("by zero"), 1.0), name="failing")

    async def main(group: Group) -> None:
        x = [np.full(3, group.rank + 1.0) for _ in range(2)]
        if group.rank == 0:
            with pytest.raises(dist.DistError, match="by zero"):
                dist.all_reduce_multigpu(x, op)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match=r"rank 0 refused the operation: .*by zero"):
                await dist.all_reduce_multigpu(x, op)
        await group.barrier()

    run_world(2, main)


def test_functions_are_told_apart_by_name_and_by_whether_they_commute() -> None:
    ops = [dist.ReduceOp.custom(np.fmax), dist.ReduceOp.custom(np.fmax, commutative=False)]
    others = [dist.ReduceOp.custom(np.fmin), dist.ReduceOp.MAX]
    for one, other in zip([ops[0], ops[0], ops[0]], [ops[1], *others], strict=True):

        async def main(group: Group, pair: Any = (one, other)) -> Any:
            return await outcome(group.all_reduce(np.zeros(4), pair[group.rank]))

        outcomes = run_world(2, main)
        assert any(isinstance(found, dist.CollectiveMismatchError) for found in outcomes), outcomes


def test_custom_operations_are_values() -> None:
    assert dist.ReduceOp.custom(np.hypot) == dist.ReduceOp.custom(np.hypot)
    assert hash(dist.ReduceOp.custom(np.hypot)) == hash(dist.ReduceOp.custom(np.hypot))
    assert dist.ReduceOp.custom(np.hypot, name="x") != dist.ReduceOp.custom(np.hypot)
    assert repr(AFFINE) == "ReduceOp.custom(affine, commutative=False)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": 3}, "function must be callable"),
        ({"function": type("Unhashable", (), {"__call__": print, "__hash__": None})()}, "unhashable"),
        ({"function": max, "name": 5}, "name must be a str"),
    ],
)
def test_what_is_no_function_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dist.ReduceOp.custom(**arguments)
