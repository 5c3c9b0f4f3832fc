"""Who comes last, from documents as dumps have them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist.inspect.dumps import FORMAT, VERSION
from asyncdist.inspect.job import checked
from asyncdist.inspect.stragglers import stragglers
from asyncdist.inspect.timeline import clocks


def document(rank: int, entries: list[dict[str, Any]], size: int = 3, **more: Any) -> dict[str, Any]:
    groups = [{"id": "aa", "name": "default", "ranks": list(range(size))}]
    return {"rank": rank, "host": "one", "groups": groups, "entries": entries, **more}


def collective(sequence: int, issued: float, ended: float | None, operation: str = "barrier", **more: Any) -> Any:
    entry = {"kind": "collective", "group": "default", "group_id": "aa", "tag": 0, "sequence": sequence}
    entry |= {"operation": operation, "collective": operation, "issued": issued, **more}
    return entry if ended is None else entry | {"ended": ended}


def test_the_rank_that_comes_last_is_told_how_often_and_for_how_long_the_others_waited() -> None:
    found = stragglers(
        [
            document(0, [collective(number, number, number + 0.6) for number in range(4)]),
            document(1, [collective(number, number + 0.1, number + 0.6) for number in range(4)]),
            document(2, [collective(number, number + (0.5 if number else 0), number + 0.6) for number in range(4)]),
        ]
    )
    slow, other = found
    assert (slow.rank, slow.last, slow.operations, other.rank, other.last) == (2, 3, 4, 1, 1)
    assert slow.waited_s == pytest.approx(3 * 0.45)
    assert slow.longest_s == pytest.approx(0.5)
    assert str(slow) == (
        "rank 2 came last to 3 of 4 barrier of group default: the others waited 1.35 of 3.5 s for it, 0.5 s at most"
    )


def test_who_has_ended_before_waited_for_nobody_and_all_wait_for_the_root_alone() -> None:
    gather = {"operation": "gather", "root": 0}
    (slow,) = stragglers(
        [
            document(0, [collective(0, 0.0, 2.0, **gather), collective(1, 5.0, 5.1, "broadcast", root=1)]),
            document(1, [collective(0, 0.1, 0.2, **gather), collective(1, 3.0, 3.1, "broadcast", root=1)]),
            document(2, [collective(0, 1.5, 2.0, **gather), collective(1, 3.0, 3.1, "broadcast", root=1)]),
        ]
    )
    assert (slow.operation, slow.rank, slow.last) == ("gather", 2, 1)
    assert slow.waited_s == pytest.approx(1.5)


def test_what_a_rank_has_not_issued_or_no_longer_remembers_counts_for_nobody() -> None:
    assert not stragglers(
        [
            document(0, [collective(0, 0.0, 1.0), collective(1, 3.0, None)]),
            document(1, [collective(0, 0.9, 1.0), collective(1, 5.0, None)]),
            document(2, []),
        ]
    )
    # A rank without a document does not keep the others from being compared.
    (slow,) = stragglers([document(0, [collective(0, 0.0, 1.0)]), document(1, [collective(0, 0.9, 1.0)])])
    assert slow.rank == 1
    assert not stragglers([])


@pytest.mark.parametrize(("bound_s", "known"), [(0.05, True), (0.5, False), (None, False)])
def test_times_of_other_hosts_are_corrected_and_nobody_is_blamed_in_doubt(bound_s: float | None, known: bool) -> None:
    compared = [] if bound_s is None else [{"rank": 2, "ahead_s": 100.0, "bound_s": bound_s}]
    documents = [
        document(0, [collective(0, 1.0, 1.4)], clock={"host": "a", "compared": []}),
        document(1, [collective(0, 1.0, 1.4)], clock={"host": "a", "compared": compared}),
        document(2, [collective(0, 101.3, 101.4)], clock={"host": "b", "compared": []}),
    ]
    assert clocks(documents)[2].ahead_s == (100.0 if compared else 0.0)
    found = stragglers(documents)
    assert [one.rank for one in found] == ([2] if known else [])


@pytest.mark.parametrize(
    "clock",
    [None, 3, {}, {"host": 1}, {"compared": 1}, {"compared": [1, {}, {"rank": 1, "ahead_s": "1", "bound_s": -1.0}]}],
)
def test_a_dump_may_say_anything_of_its_clock(clock: Any) -> None:
    dump = document(1, [], clock=clock, host="two", format=FORMAT, version=VERSION, time=1.0)
    found = clocks([document(0, []), checked(dump)])
    assert (found[1].host, found[1].bound_s) == ("two", float("inf"))


def test_clocks_are_compared_along_the_surest_way() -> None:
    def of(rank: int, *compared: tuple[int, float, float]) -> dict[str, Any]:
        told = [{"rank": other, "ahead_s": ahead, "bound_s": bound} for other, ahead, bound in compared]
        return document(rank, [], host=f"host {rank}", clock={"compared": told})

    found = clocks([of(3), of(0, (1, 5.0, 0.01), (2, 9.0, 1.0)), of(2, (1, -3.0, 0.01)), of(1, (7, 1.0, 0.0))])
    assert [(found[rank].ahead_s, round(found[rank].bound_s, 9)) for rank in range(4)] == [
        *[(0.0, 0.0), (5.0, 0.01), (8.0, 0.02), (0.0, float("inf"))]
    ]
