"""What the error shows when ranks run different collectives in one place of the order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.arrays.reduce_op import PremulSum
from asyncdist.collectives.shared.agreement import RESERVED
from asyncdist.group import mismatch as consistency
from asyncdist.group.mismatch import (
    ANSWER_S,
    EARLY_KEPT,
    ISSUED_KEPT,
    LAST_WORDS,
    REPORTS_KEPT,
    WORD_CHARS,
    StrayMessages,
    describe_call,
    parse_check,
)
from asyncdist.testing import run_world
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.protocol.frame import key_prefix, key_suffix
from asyncdist.transport.protocol.peer import PeerCore

Calls = list[Callable[[Group], Any]]


def differ(calls: Calls, seed: int | None = None, full: bool = False) -> list[BaseException]:
    """What each rank gets when it makes the call of its number; a rank whose call ends well makes a barrier then."""

    async def main(group: Group) -> BaseException:
        group._core._mismatches.check_fully(full)
        try:
            found = await outcome(calls[group.rank](group))
            if not isinstance(found, BaseException):
                await asyncio.sleep(2)
                found = await outcome(group.barrier())
        except dist.GroupAbortedError as error:
            found = error
        assert isinstance(found, dist.DistError)
        return found

    return run_world(len(calls), main, seed=seed)


LINE = re.compile(r" at \w+\.py:\d+")
BOTH = "rank 0 runs all_reduce float32[64] SUM (recursive_doubling), rank 1 runs broadcast int64[32] root 1 ("


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_both_sides_show_both_sides(seed: int | None) -> None:
    errors = differ([lambda g: g.all_reduce(np.zeros(64, "f4")), lambda g: g.broadcast(np.zeros(32, "i8"), 1)], seed)
    for rank, error in enumerate(errors):
        assert BOTH in LINE.sub("", str(error)), error
        assert f"group default, rank {rank}, " in str(error)
    assert any(isinstance(error, dist.CollectiveMismatchError) for error in errors)


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (
            [lambda g: g.all_reduce(np.zeros(64)), lambda g: g.all_reduce(np.zeros(8))],
            "float64[64] SUM.*float64[8] SUM",
        ),
        (
            [lambda g: g.all_reduce(np.zeros(8)), lambda g: g.all_reduce(np.zeros(8), dist.ReduceOp.MAX)],
            "float64[8] SUM.*float64[8] MAX",
        ),
        ([lambda g: g.all_reduce(np.zeros(8, "f4")), lambda g: g.all_reduce(np.zeros(8, "i4"))], "float32.*int32"),
        ([lambda g: g.reduce(np.zeros(8), 0), lambda g: g.reduce(np.zeros(8), 1, dist.ReduceOp.MAX)], "root 0.*root 1"),
        ([lambda g: g.barrier(), lambda g: g.all_reduce(np.zeros(4))], "rank 0 runs barrier (.*rank 1 runs all_reduce"),
        (
            [
                lambda g: g.all_reduce_coalesced([np.zeros(3), np.zeros(5)]),
                lambda g: g.all_reduce_coalesced([np.zeros(4), np.zeros(4)]),
            ],
            "all_reduce_coalesced float64[8] SUM of 3+5 (.*float64[8] SUM of 4+4 (",
        ),
        (
            [lambda g: g.reduce_scatter(np.zeros(1), [np.zeros(1), np.zeros(2)]), lambda g: g.all_reduce(np.zeros(9))],
            "reduce_scatter float64[1, 2] SUM (.*all_reduce float64[9]",
        ),
    ],
)
def test_what_differs_is_shown(calls: Calls, shown: str) -> None:
    for error in differ(calls):
        parts = shown.split(".*")
        places = [str(error).find(part) for part in parts]
        assert -1 not in places, error
        assert places == sorted(places)


def test_a_third_rank_hears_of_both_sides() -> None:
    calls: Calls = [lambda g: g.all_reduce(np.zeros(3))] * 2 + [lambda g: g.all_reduce(np.zeros(4))]
    for error in differ(calls):
        assert "float64[3] SUM" in str(error)
        assert "float64[4] SUM" in str(error)


def test_a_side_that_has_gone_on_still_says_what_it_ran() -> None:
    async def main(group: Group) -> str:
        if group.rank == 0:  # its messages are sent eagerly, so it may be done long before the other begins
            await group.broadcast(np.zeros(3), 0)
            await group.broadcast(np.zeros(3), 0)
            await asyncio.sleep(1)
            with pytest.raises(dist.GroupAbortedError) as aborted:
                group.barrier()
            return str(aborted.value)
        await asyncio.sleep(0.1)
        return str(await outcome(group.broadcast(np.zeros(3, "f4"), 0)))

    for text in run_world(2, main):
        assert "rank 0 runs broadcast float64[3] root 0" in text
        assert "rank 1 runs broadcast float32[3] root 0" in text


def test_every_error_names_a_rank_that_differs_from_this_one() -> None:
    """Also where it is heard of from another."""

    async def main(group: Group) -> int | None:
        if group.rank < 2:
            work: Any = group.broadcast(np.zeros(3, "f4" if group.rank else "f8"), 0)
        if group.rank != 1:
            work = group.barrier(tag=1)
        error = await outcome(work)
        assert isinstance(error, dist.CollectiveMismatchError)
        return error.peer

    first, second, third = run_world(3, main)
    assert (first, second) == (1, 0)
    assert third in (0, 1)


@pytest.mark.parametrize("later", [LAST_WORDS - 1, LAST_WORDS])
@pytest.mark.parametrize("leaves", [False, True], ids=["closed the group", "left"])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_side_that_is_gone_has_said_what_it_ran_last(leaves: bool, uneven: bool, later: int) -> None:
    async def main(group: Group) -> str:
        sub = dist.new_group([0, 1])
        assert isinstance(sub, Group)
        if group.rank == 0:
            await sub.broadcast(np.zeros(3), 0)  # sent eagerly, before the other begins
            for _ in range(later):
                await sub.broadcast(np.zeros(0), 0, tag=1)
            if not leaves:
                await sub.close()
                await asyncio.sleep(2)
            return ""
        await asyncio.sleep(1)
        start_s = asyncio.get_running_loop().time()
        error = await outcome(sub.scatter(np.zeros(2), root=0, uneven=uneven))
        assert asyncio.get_running_loop().time() - start_s <= 0.1
        assert isinstance(error, dist.CollectiveMismatchError)
        assert error.peer == 0
        return str(error).partition(": ")[2]

    if later < LAST_WORDS:
        expected = (
            "ranks differ in collective #0: rank 0 runs broadcast float64[3] root 0 (linear), rank 1 runs scatter"
        )
    elif uneven:
        expected = "rank 0 sent 24 bytes where 16 are expected here"
    else:
        theirs = "something else, and " + ("is gone since" if leaves else "has closed the group since")
        expected = f"ranks differ in collective #0: rank 0 runs {theirs}, rank 1 runs scatter float64[2]"
    assert run_world(2, main)[1].startswith(expected)


def test_who_asks_a_side_that_leaves_is_told_as_it_leaves() -> None:
    async def main(group: Group) -> tuple[float, str]:
        if group.rank == 0:
            await group.broadcast(np.zeros(4), 0)
            group._core._mismatches.heard = lambda *_: None  # type: ignore[method-assign]  # it leaves before it answers
            await asyncio.sleep(0.2)
            return 0.0, ""
        error = await outcome(group.broadcast(np.zeros(5), 0))
        return asyncio.get_running_loop().time(), str(error)

    at_s, told = run_world(2, main)[1]
    assert "rank 0 runs broadcast float64[4] root 0" in told
    assert at_s < ANSWER_S


@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
def test_so_many_letters_of_last_words_are_kept_and_no_more(letter: str, past: int) -> None:
    """Of those all fit a control frame, in whatever letters."""

    async def main(group: Group) -> int:
        def function(left: Any, right: Any) -> Any:
            return left + right

        if group.rank == 0:
            begin = len("reduce float64[1] ReduceOp.custom() root 1")
            function.__name__ = function.__qualname__ = letter * (WORD_CHARS - begin + past)
            for _ in range(LAST_WORDS):
                await group.reduce(np.ones(1), 1, dist.ReduceOp.custom(function))
            assert {terms[-6:] for terms, _ in group._core._mismatches.last_words().values()} == {
                "root 1" if not past else " root "
            }
            return 0
        await asyncio.sleep(1)
        return len(group._core._mismatches._last_words[0])

    assert run_world(2, main) == [0, LAST_WORDS]


# Where each side has ended its own operation.

ROOTS: list[Callable[[Group], Any]] = [
    lambda g: g.broadcast(np.zeros(8), g.rank),
    lambda g: g.scatter(np.zeros(8), [np.zeros(8)] * g.size, g.rank),
    lambda g: g.reduce(np.zeros(8), (g.rank + 1) % g.size),
    lambda g: g.gather(np.zeros(8), None, (g.rank + 1) % g.size),
    lambda g: g.gather_object("x", None, (g.rank + 1) % g.size),
    lambda g: g.broadcast_object_list(["x"], g.rank),
]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("number", range(len(ROOTS)))
def test_two_roots_are_found_by_what_comes_after(number: int, seed: int | None) -> None:
    async def main(group: Group) -> str:
        await group.barrier()
        try:
            await ROOTS[number](group)
            await asyncio.sleep(0 if seed is None else 0.1 * group.rank * (seed - 1))
            await group.barrier(tag=7)
        except dist.CollectiveError as error:
            return str(error)
        return "nothing"

    for rank, told in enumerate(run_world(2, main, seed=seed)):
        assert f"group default, rank {rank}, " in told
        assert "ranks differ in collective #1: rank 0 runs " in told
        assert told.count("root 0") == told.count("root 1") == 1


def test_what_was_begun_meanwhile_does_not_end_well() -> None:
    async def main(group: Group) -> list[str]:
        await group.barrier()
        works = [group.broadcast(np.zeros(8), group.rank), *(group.all_reduce(np.ones(2)) for _ in range(3))]
        return [str(await outcome(work)) for work in works[1:]]

    for told in run_world(2, main):
        assert all("ranks differ in collective #1" in text for text in told)


def test_closing_says_what_is_found_then() -> None:
    async def main(group: Group) -> str:
        await group.barrier()
        await group.broadcast(np.zeros(8), group.rank)
        return str(await outcome(group.close()))

    told = run_world(2, main)
    assert any("close: ranks differ in collective #1: rank 0 runs broadcast float64[8]" in text for text in told), told


def test_who_finds_the_other_root_gone_is_told_what_it_ran() -> None:
    async def main(group: Group) -> str:
        await group.barrier()
        await asyncio.sleep(group.rank)
        return str(await outcome(group.broadcast(np.zeros(8), group.rank)))

    told = run_world(2, main)[1]
    assert "broadcast #1: ranks differ in collective #1: rank 0 runs broadcast float64[8] root 0" in told
    assert "rank 1 runs broadcast float64[8] root 1" in told


def test_messages_that_come_early_and_are_received_are_no_evidence() -> None:
    async def main(group: Group) -> int:
        for number in range(5):
            if group.rank == 0:
                await asyncio.sleep(0.1)
            await group.gather(np.ones(3), [np.zeros(3)] * 3 if group.rank == number % 3 else None, number % 3)
        assert all(issued >= group._core._sequences[0] for _, issued in group._core._strays.early)
        if group.rank == 0:
            with pytest.raises(TypeError):
                group.all_reduce(None)
        else:
            assert isinstance(await outcome(group.all_reduce(np.ones(3))), dist.CollectiveMismatchError)
        total = await group.all_reduce(np.ones(1))
        assert all(issued >= group._core._sequences[0] for _, issued in group._core._strays.early)
        return int(total[0])

    assert run_world(3, main) == [3, 3, 3]


def test_a_root_whose_messages_came_before_the_group_was_made_is_found() -> None:
    async def main(group: Group) -> str:
        if group.rank == 0:
            sub = dist.new_group([0, 1])
            assert isinstance(sub, Group)
            await sub.broadcast(np.zeros(8), 0)
            await group.barrier()
            return str(await outcome(sub.barrier()))
        await group.barrier()
        sub = dist.new_group([0, 1])
        assert isinstance(sub, Group)
        return str(await outcome(sub.broadcast(np.zeros(8), 1)))

    for told in run_world(2, main):
        assert "ranks differ in collective #0: rank 0 runs broadcast float64[8] root 0" in told


class Unconnected(BaseMesh):
    """A mesh of which only the watchers matter."""

    def _all_cores(self) -> list[PeerCore]:
        return []


@pytest.mark.parametrize("past", [0, 1])
def test_so_many_operations_are_remembered_of_which_messages_came_early(past: int) -> None:
    mesh = Unconnected(0, 4, cast(MeshOwner, None))
    found: list[tuple[int, int, int]] = []
    sequences = {1: 0}
    evidence = StrayMessages(mesh, 5, {}, sequences, lambda *place: found.append(place))
    prefix = key_prefix(5, 1, 0)[:8]
    for number in range(EARLY_KEPT + past):
        message = key_prefix(5, 1, number) + key_suffix(0, 1)
        mesh.watchers[prefix](3, message, {message})
    reserved = key_prefix(5, 1, RESERVED[0]) + key_suffix(0, 1)
    mesh.watchers[prefix](3, reserved, {reserved})
    assert evidence.left_over((1, EARLY_KEPT + past - 1))
    assert evidence.left_over((1, 0)) == (not past)
    assert found[0] == (1, EARLY_KEPT + past - 1, 3)
    evidence.stop()
    assert not mesh.watchers


def test_the_error_does_not_wait_for_a_side_that_is_stuck() -> None:
    async def main(group: Group) -> Any:
        group._core._mismatches.check_fully(False)
        if group.rank == 0:
            await group.broadcast(np.zeros(3), 0)
            group._core.control = lambda *_: None  # type: ignore[method-assign]  # as a loop that does not run
            await asyncio.sleep(2)
            return None
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        error = await outcome(group.broadcast(np.zeros(3, "f4"), 0))
        assert isinstance(error, dist.CollectiveMismatchError)
        assert error.peer == 0
        assert "rank 0 runs something else that it does not name, rank 1 runs broadcast float32[3]" in str(error)
        return loop.time() - start_s

    assert run_world(2, main)[1] == pytest.approx(ANSWER_S, abs=0.01)


@pytest.mark.parametrize("past", [0, 1])
def test_so_many_collectives_are_remembered_and_no_more(past: int) -> None:
    async def main(group: Group) -> str:
        if group.rank == 0:
            await group.broadcast(np.zeros(3), 0)
            for _ in range(ISSUED_KEPT - 1 + past):
                await group.broadcast(np.zeros(0), 0, tag=1)
            await asyncio.sleep(1)
            return ""
        await asyncio.sleep(0.1)
        return str(await outcome(group.broadcast(np.zeros(3, "f4"), 0)))

    found = run_world(2, main)[1]
    assert ("rank 0 runs broadcast float64[3]" in found) == (not past)
    assert ("does not name" in found) == bool(past)


def test_what_is_pending_ends_with_the_group() -> None:
    async def main(group: Group) -> BaseException | None:
        if group.rank == 0:
            await group.broadcast(np.zeros(3), 0)
            group._core._mismatches.heard = lambda *_: None  # type: ignore[method-assign]
            await asyncio.sleep(0.2)
            group.abort("enough")
            await asyncio.sleep(1)
            return None
        return await outcome(group.broadcast(np.zeros(3, "f4"), 0))

    error = run_world(2, main)[1]
    assert isinstance(error, dist.CollectiveMismatchError)


# ASYNCDIST_CHECK=full.


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_nothing_here_and_something_there_is_found_when_asked_for(seed: int | None) -> None:
    calls: Calls = [lambda g: g.all_reduce(np.zeros(0)), *[lambda g: g.all_reduce(np.zeros(3))] * 2]
    for error in differ(calls, seed, full=True):
        assert "runs all_reduce float64[0] SUM at test_mismatch.py:" in str(error)
        assert "runs all_reduce float64[3] SUM at test_mismatch.py:" in str(error)


def test_two_roots_that_only_send_are_found_when_asked_for() -> None:
    for error in differ([lambda g: g.broadcast(np.zeros(8), 0), lambda g: g.broadcast(np.zeros(8), 1)], full=True):
        assert "rank 0 runs broadcast float64[8] root 0 at" in str(error)
        assert "rank 1 runs broadcast float64[8] root 1 at" in str(error)


def test_ranks_other_than_the_first_are_compared_through_it() -> None:
    calls: Calls = [lambda g: g.all_reduce(np.zeros(0)), lambda g: g.all_reduce(np.zeros(0))]
    calls.append(lambda g: g.broadcast(np.zeros(0), 2))
    for error in differ(calls, full=True):
        assert "rank 0 runs all_reduce float64[0] SUM at" in str(error)
        assert "rank 2 runs broadcast float64[0] root 2 at" in str(error)


def test_equal_programs_pass_the_full_check() -> None:
    async def main(group: Group) -> None:
        group._core._mismatches.check_fully(True)
        own, whole = np.full(2, group.rank), np.zeros(6, int)
        for _ in range(3):
            if group.rank:
                await group.all_gather_into_tensor(whole, own)
            else:  # another spelling of the same operation
                await group.all_gather([whole[:2], whole[2:4], whole[4:]], own)
            await group.all_reduce(np.ones(3), dist.ReduceOp.PREMUL_SUM(group.rank))
            await group.gather(own, [np.zeros(2, int)] * 3 if group.rank == 1 else None, 1)
            await group.barrier(tag=group._core._sequences[0])
        subgroup = dist.new_group([2, 0], sort_ranks=False)
        if not isinstance(subgroup, dist.NonMember):
            subgroup._core._mismatches.check_fully(True)
            await subgroup.all_reduce(np.ones(2))
        await group.barrier()

    for seed in range(5):
        run_world(3, main, seed=seed)


@pytest.mark.parametrize("past", [0, 1])
def test_so_many_reports_are_kept_and_no_more(past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "REPORTS_KEPT", 4)
    assert REPORTS_KEPT > 4

    async def main(group: Group) -> bool:
        group._core._mismatches.check_fully(True)
        last = 3 + past
        if group.rank == 1:
            for number in range(last + 1):
                await group.broadcast(np.zeros(0, "f4" if number == last else "f8"), 0)
        else:
            await asyncio.sleep(0.5)
            for _ in range(last + 1):
                await group.broadcast(np.zeros(0), 0)
        await asyncio.sleep(1)
        return group._core._aborted is None

    assert run_world(2, main) == [bool(past)] * 2


def test_levels() -> None:
    assert [parse_check(text) for text in ("", "on", " Full ")] == ["on", "on", "full"]
    with pytest.raises(ValueError, match="ASYNCDIST_CHECK='off': use on or full"):
        parse_check("off")


async def test_rank_0_sets_the_level_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CHECK", "full")
    async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1) as group:
        assert group.world.options["check"] == "full"
    monkeypatch.setenv("ASYNCDIST_CHECK", "loud")
    with pytest.raises(ValueError, match="ASYNCDIST_CHECK"):
        await dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("recipe", "shown"),
    [
        (("all_reduce", 5, np.dtype("f4"), 0, dist.ReduceOp.SUM, ""), "float32[5] SUM"),
        (("all_reduce", 5, np.dtype("f4"), 0, PremulSum(2), ""), "float32[5] PREMUL_SUM"),
        (("broadcast", (5,), np.dtype(ml_dtypes.bfloat16), 1, None, ""), "bfloat16[5] root 7"),
        (("all_gather", (2, 2, 2), np.dtype("?"), 0, None, ""), "bool[2]"),
        (("all_gather", tuple(range(9)), np.dtype("?"), 0, None, ""), "bool[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        (("gather", 128, np.dtype("V128"), 0, None, "objects"), "root 9 of objects"),
        (("barrier", 0, np.dtype("u1"), 0, None, ""), ""),
    ],
)
def test_calls_are_described(recipe: tuple[Any, ...], shown: str) -> None:
    assert describe_call(recipe, (9, 7, 8)) == shown
