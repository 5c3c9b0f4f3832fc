"""What `make test` leaves out: of a product nothing that is not tried in another case, and seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fewer_cases import LOOP, covering, left_out


def pairs(rows: Sequence[Sequence[object]]) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 4), (3, 3, 3), (2, 2, 2, 5), (1, 2, 3)])
def test_every_pair_is_there_in_fewer_rows(sizes: tuple[int, ...]) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[number] for number in covering(rows)]
    assert pairs(chosen) == pairs(rows)
    largest, second = sorted(sizes)[-1:-3:-1]
    assert len(chosen) <= 1.5 * largest * second


def test_of_two_columns_every_row_is_there() -> None:
    rows = list(itertools.product(range(3), range(4)))
    assert covering(rows) == set(range(12))


def case(
    test: str, marks: Sequence[tuple[object, ...]] = (), marker: str = "", path: str = "file", **params: object
) -> Any:
    """As pytest's item for one case of a test."""
    found = [SimpleNamespace(args=mark) for mark in marks]
    return SimpleNamespace(
        parent="file",
        nodeid=path,
        originalname=test,
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda name: found if name == "parametrize" else [],
        get_closest_marker=lambda name: name == marker,
    )


def test_tests_are_judged_one_by_one() -> None:
    product = list(itertools.product("ab", "ab", "ab"))
    three = [case("three", x=x, y=y, z=z) for x, y, z in product]
    two = [case("two", x=x, y=y) for x, y, _ in product[::2]]
    plain = SimpleNamespace(parent="file", originalname="none", get_closest_marker=lambda name: None)
    others = [plain, case("alone", x=1, y=2, z=3)]
    gone = left_out([*three, *two, *others])
    assert len(gone) == 4
    assert all(any(one is item for item in three) for one in gone)


@pytest.mark.parametrize(("seeds", "kept"), [(1, 1), (3, 1), (4, 2), (12, 4)])
@pytest.mark.parametrize("loops", [1, 2])
def test_of_seeds_the_first_are_run_with_everything(seeds: int, kept: int, loops: int) -> None:
    marks = [("seed", range(seeds))]
    gone = left_out([case("random", marks, seed=seed, loop=loop) for seed in range(seeds) for loop in range(loops)])
    assert [one.callspec.params["seed"] for one in gone] == [seed for seed in range(kept, seeds) for _ in range(loops)]


def test_seeds_that_somebody_picked_are_all_run() -> None:
    for marks in ([("seed", [3, 14, 15])], [("faulty, seed", [(False, 3), (False, 14), (False, 15)])]):
        assert not left_out([case("pinned", marks, seed=seed, faulty=False) for seed in (3, 14, 15)])


@pytest.mark.parametrize("names", ["x, y,z", ("x", "y", "z")])
def test_what_is_listed_in_one_decorator_is_one_value(names: object) -> None:
    """Each line was thought of by somebody."""
    product = list(itertools.product("ab", "ab", "ab"))
    assert not left_out([case("listed", [(names, product)], x=x, y=y, z=z) for x, y, z in product])


@pytest.mark.parametrize("marker", ["bench", "thorough"])
def test_what_is_put_off_is_all_that_the_rest_has(marker: str) -> None:
    """And its values are covered by no case that is not run."""
    product = list(itertools.product("ab", "ab", "ab"))
    now = [case("test", x=x, y=y, z=z) for x, y, z in product if x == "a"]
    later = [case("test", marker=marker, x=x, y=y, z=z) for x, y, z in product if x == "b"]
    for rest, run, gone in ((False, now, later), (True, later, now)):
        left = left_out([*now, *later], rest=rest)
        assert all(any(one is item for item in left) for one in gone)
        assert not any(one is item for item in left for one in run)


def test_units_with_one_parameter_run_on_the_loops_by_turns() -> None:
    def cases(path: str) -> list[Any]:
        return [case("test", path=path, **{LOOP: loop, "x": x}) for loop in ("one", "two") for x in range(5)]

    assert not left_out(cases("tests/integration/test_x.py"))
    units = cases("tests/unit/test_x.py")
    gone = left_out(units)
    kept = [tuple(one.callspec.params.values()) for one in units if not any(one is item for item in gone)]
    assert sorted(kept, key=lambda row: row[1]) == [("one", 0), ("two", 1), ("one", 2), ("two", 3), ("one", 4)]


@pytest.mark.parametrize(
    ("folder", "kept"),
    [("unit/group", 1), ("integration/gpu_fake", 1), ("integration/server", 1), ("unit/transport", 2)],
)
def test_tests_of_units_without_a_parameter_run_on_the_loops_by_turns(folder: str, kept: int) -> None:
    """But for those that do input and output."""
    path = f"tests/{folder}/test_x.py"
    items = [case(test, path=path, **{LOOP: loop}) for test in "abc" for loop in ("one", "two")]
    gone = {id(one) for one in left_out(items)}
    loops = [[one.callspec.params[LOOP] for one in items if one.originalname == test] for test in "abc"]
    run = [[x.callspec.params[LOOP] for x in items if x.originalname == test and id(x) not in gone] for test in "abc"]
    assert run == ([["one"], ["two"], ["one"]] if kept == 1 else loops)
