"""Object collectives of whole worlds in virtual time: torch's rules, refusals, and pickle."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.arrays.host import encode_meta
from asyncdist.arrays.objects import OBJECT_META
from asyncdist.collectives.arguments import items as call_items
from asyncdist.collectives.arguments.items import Item
from asyncdist.testing import SimulatedWorld, run_world


class Plain:
    """Something only pickle can send."""


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_object_collective_does_as_in_torch(size: int) -> None:
    async def main(group: Group) -> None:
        rank, last = group.rank, size - 1
        mine = {"rank": rank, ("a", 1): {rank}, "array": np.full((rank, 2), rank)}

        everyone: list[Any] = [None] * size
        assert await dist.all_gather_object(everyone, mine) is everyone
        assert [one["rank"] for one in everyone] == list(range(size))
        for other, one in enumerate(everyone):
            assert one["array"].shape == (other, 2)
            one["array"] += 1
        assert (mine["array"] == rank).all()

        gathered: list[Any] | None = [None] * size if rank == last else None
        assert await dist.gather_object("x" * rank, gathered, dst=last) is gathered
        assert gathered is None or gathered == ["x" * other for other in range(size)]

        listed: list[Any] = [1, (2, None), np.arange(20_000)] if rank == last else [0, 0, 0]
        third = listed[2]
        assert await dist.broadcast_object_list(listed, src=last) is listed
        assert listed[:2] == [1, (2, None)]
        assert np.array_equal(listed[2], np.arange(20_000))
        assert rank != last or listed[2] is third

        out = [None, "kept"]
        assert await dist.scatter_object_list(out, [f"for {r}" for r in range(size)] if rank == 0 else None) is out
        assert out == [f"for {rank}", "kept"]

    run_world(size, main)


def test_roots_are_the_first_rank_by_default_and_group_ranks_may_name_them() -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group([2, 1], sort_ranks=False)
        if group.rank == 0:
            with pytest.raises(ValueError, match="not a member"):
                sub.all_gather_object([None, None], 1)
            with pytest.raises(ValueError, match="not a member"):
                dist.broadcast_stream(np.zeros(1), 1, sub)
            return
        for roots, expected in (({}, 2), ({"group_src": 1}, 1), ({"src": 1}, 1)):
            listed = [group.rank]
            await dist.broadcast_object_list(listed, group=sub, **roots)
            assert listed == [expected]

    run_world(3, main)


def test_scatter_object_list_looks_at_the_sources_list_only() -> None:
    """As in torch's own example, where the other ranks give `[None, None]`."""

    async def main(group: Group) -> None:
        got: list[Any] = [None]
        await group.scatter_object_list(got, ["foo", 12] if group.rank == 0 else [None, Plain(), 3], 0)
        assert got == [["foo", 12][group.rank]]

    run_world(2, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_gather_object([None], 1), ValueError, "one entry per rank: 2, but holds 1"),
        (lambda g: g.all_gather_object((None, None), 1), TypeError, "object_list must be a list, not tuple"),
        (lambda g: g.all_gather_object([None] * 2, Plain()), TypeError, r"test_objects\.Plain"),
        (lambda g: g.all_gather_object([None] * 2, [1, {"k": Plain()}]), TypeError, r"\[1\]\['k'\]"),
        (lambda g: g.all_gather_object([None] * 2, b"x" * 100, max_bytes=50), ValueError, "above max_bytes=50 B"),
        (lambda g: g.all_gather_object([None] * 2, 1, max_bytes=-1), ValueError, "max_bytes must not be negative"),
        (lambda g: g.all_gather_object([None] * 2, 1, max_bytes=None), TypeError, "max_bytes must be a number"),
        (lambda g: g.broadcast_array(np.zeros(1), max_bytes="1"), TypeError, "max_bytes must be a number"),
        (lambda g: g.gather_array(np.zeros(1), max_total_bytes=None), TypeError, "max_total_bytes must be a number"),
        (lambda g: g.all_gather_object([None] * 2, memoryview(b"abc")[::2]), TypeError, "not contiguous"),
        (lambda g: g.gather_object(1), ValueError, "object_gather_list must be given"),
        (lambda g: g.gather_object(1, [None] * 3), ValueError, "one entry per rank: 2, but holds 3"),
        (lambda g: g.gather_object(1, [None] * 2, 1), ValueError, "must not be given on ranks other"),
        (lambda g: g.gather_object(1, None, 2), ValueError, "root=2"),
        (lambda g: g.broadcast_object_list(3), TypeError, "must be a list"),
        (lambda g: g.scatter_object_list([]), ValueError, "at least one place"),
        (lambda g: g.scatter_object_list([None]), ValueError, "input_list must be given"),
        (lambda g: g.scatter_object_list([None], [1]), ValueError, "one entry per rank: 2, but holds 1"),
        (lambda g: dist.broadcast_object_list([1], src=0, group_src=0), ValueError, "not both"),
        (lambda g: g.all_gather_array([1]), TypeError, "array must be a numpy array"),
        (lambda g: g.broadcast_array(), ValueError, "array must be given on the source"),
        (lambda g: g.broadcast_array(np.zeros(1), 1), ValueError, "array must be None"),
        (lambda g: g.scatter_array([np.zeros(1)]), ValueError, "one entry per rank: 2, but holds 1"),
        (lambda g: g.scatter_array([np.zeros(1), "x"]), TypeError, r"arrays\[1\]"),
        (lambda g: g.scatter_array(np.zeros(2)), TypeError, "arrays must be a list"),
        (lambda g: g.scatter_array([np.zeros(1)] * 2, 1), ValueError, "arrays must be None"),
        (lambda g: g.scatter_array(), ValueError, "arrays must be given"),
        (lambda g: g.all_gather_array(np.zeros(1), max_total_bytes=-1), ValueError, "max_total_bytes"),
    ],
)
def test_wrong_arguments_are_refused_and_the_group_goes_on(call: Any, error: type[Exception], message: str) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                await group.all_gather_object([None] * 2, group.rank)
        got: list[Any] = [None, None]
        await group.all_gather_object(got, group.rank)
        assert got == [0, 1]

    run_world(2, main)


@pytest.mark.parametrize("size", [2, 3])
def test_other_operations_in_the_same_place_raise_everywhere(size: int) -> None:
    async def mixed(group: Group, first: Any, second: Any) -> None:
        with pytest.raises(dist.CollectiveError):
            await (first(group) if group.rank == 0 else second(group))

    block = np.zeros(3)
    calls = [
        lambda g: g.all_gather_object([None] * g.size, 1),
        lambda g: g.all_gather_array(np.zeros(2)),
        lambda g: g.all_gather([np.zeros(3) for _ in range(g.size)], block),
        lambda g: g.all_gather([np.zeros(30_000) for _ in range(g.size)], np.zeros(30_000)),
        lambda g: g.all_reduce(np.zeros(3)),
        lambda g: g.all_gather_stream(np.zeros(3 * g.size), block).work,
        lambda g: g.all_gather_stream(np.zeros(30_000 * g.size), np.zeros(30_000)).work,
        lambda g: g.all_gather_stream(np.zeros(30_000 * g.size), np.zeros(30_000), chunk_bytes=100_000).work,
    ]
    for one in range(len(calls)):
        for other in range(len(calls)):
            if one != other:
                run_world(size, lambda group, a=calls[one], b=calls[other]: mixed(group, a, b))


def test_lists_of_other_lengths_and_kinds_are_told_apart() -> None:
    async def lengths(group: Group) -> None:
        if group.rank:
            with pytest.raises(dist.CollectiveMismatchError):
                await group.broadcast_object_list([1, 2, 3], 0)
        else:
            await group.broadcast_object_list([1, 2], 0)
            assert isinstance(await outcome(group.barrier()), dist.CollectiveMismatchError)

    async def kinds(group: Group) -> None:
        if group.rank:
            with pytest.raises(dist.CollectiveMismatchError):
                await group.broadcast_array(None, 0)
        else:
            await group.broadcast_object_list([1], 0)
            assert isinstance(await outcome(group.barrier()), dist.CollectiveMismatchError)

    run_world(2, lengths)
    run_world(2, kinds)


@pytest.mark.parametrize(("limit", "fits"), [(800, True), (799, False)])
def test_an_item_above_the_limit_is_refused_naming_its_sender(limit: int, fits: bool) -> None:
    async def main(group: Group) -> None:
        limits = {"max_bytes": limit if group.rank == 1 else 1 << 20}
        got = await outcome(group.all_gather_array(np.zeros(100 if group.rank == 0 else 1), **limits))
        if fits:
            assert [array.size for array in got] == [100, 1, 1]
        elif group.rank == 1:
            assert isinstance(got, dist.CollectiveMismatchError)
            assert "rank 0 sent float64[100] of 800 B, above max_bytes=799 B" in str(got)

    run_world(3, main)


@pytest.mark.parametrize(("limit", "fits"), [(1600, True), (1599, False)])
def test_items_that_together_exceed_the_limit_are_refused(limit: int, fits: bool) -> None:
    async def main(group: Group) -> None:
        limits = {"max_total_bytes": limit if group.rank == 1 else 1 << 20}
        got = await outcome(group.all_gather_array(np.zeros(100), **limits))
        if fits:
            assert len(got) == 3
        elif group.rank == 1:
            assert isinstance(got, dist.CollectiveMismatchError)
            assert "1.562 KiB with what came before, above max_total_bytes=1.562 KiB" in str(got)

    run_world(3, main)


def test_uneven_arrays_of_any_dtype_come_as_copies() -> None:
    async def main(group: Group) -> None:
        rank, size = group.rank, group.size
        mine = np.full((rank, 2, 1), rank, ["f4", "i8", "?", "c16", "u1"][rank % 5])
        work = group.all_gather_array(mine)
        got = await work
        assert work.result() is got
        for other, array in enumerate(got):
            assert (array.dtype, array.shape) == (np.dtype(["f4", "i8", "?", "c16", "u1"][other % 5]), (other, 2, 1))
            assert (array == np.array(other).astype(array.dtype)).all()
            assert array.flags.writeable
            assert not np.may_share_memory(array, mine)
        large = np.arange(100_000 * (rank + 1), dtype="f4")[::2]
        got = await group.gather_array(large, 1 % size)
        if rank == 1 % size:
            assert [array.tolist()[-1] for array in got] == [100_000.0 * (r + 1) - 2 for r in range(size)]
        else:
            assert got is None
        sent = np.asfortranarray(np.arange(60_000).reshape(2, -1)) if rank == size - 1 else None
        received = await group.broadcast_array(sent, size - 1)
        assert np.array_equal(received, np.arange(60_000).reshape(2, -1))
        assert sent is None or received is sent
        blocks = [np.full(40_000 * r, r) for r in range(size)] if rank == 0 else None
        block = await group.scatter_array(blocks)
        assert block.shape == (40_000 * rank,)
        assert (block == rank).all()
        assert blocks is None or not np.may_share_memory(block, blocks[0])

    for size in (1, 2, 3, 6, 12):
        run_world(size, main)


def test_lists_of_objects_go_from_rank_to_rank() -> None:
    async def main(group: Group) -> None:
        other = 1 - group.rank
        sent = group.send_object_list([group.rank, {"array": np.arange(50_000)}], other)
        places: list[Any] = [None, None]
        assert await dist.recv_object_list(places) == other
        assert places[0] == other
        assert places[1]["array"].size == 50_000
        await sent
        if group.rank == 0:
            await dist.send_object_list([1], 1)
            await dist.send(np.zeros(3), 1)
            await dist.send_object_list([1], 1)
            await dist.send_object_list(["x" * 1000], 1)
            await dist.send_object_list(["end"], 1)
            with pytest.raises(TypeError, match=r"the object\[0\]"):
                dist.send_object_list([Plain()], 1)
            with pytest.raises(TypeError, match="must be a list"):
                dist.send_object_list("text", 1)
            await group.barrier()
            return
        with pytest.raises(dist.CollectiveMismatchError, match="rank 0 sent 1 objects, but object_list has 2 places"):
            await group.recv_object_list([0, 0], 0)
        with pytest.raises(dist.CollectiveMismatchError, match="rank 0 sent an array"):
            await group.recv_object_list([0], 0)
        with pytest.raises(dist.CollectiveMismatchError, match="objects, which recv_object_list receives"):
            await group.recv(np.zeros(3), 0)
        with pytest.raises(dist.CollectiveMismatchError, match="above max_bytes=100 B"):
            await group.recv_object_list([0], 0, max_bytes=100)
        places = [0]
        work = group.recv_object_list(places, 0, timeout=5)
        assert await work == 0
        assert places == ["end"]
        with pytest.raises(TypeError, match="must be a list"):
            group.recv_object_list((0,), 0)  # type: ignore[arg-type]
        with pytest.raises(dist.CollectiveTimeoutError):
            await group.recv_object_list([0], 0, timeout=1)
        await group.barrier()

    run_world(2, main)


@pytest.mark.parametrize("allowing", [{0, 1, 2}, {0, 1}, {1, 2}, {0}, set()])
def test_pickle_only_where_every_rank_allows_it(allowing: set[int]) -> None:
    async def main(loop: asyncio.AbstractEventLoop) -> None:
        world = SimulatedWorld(3, loop, None, 0.0)

        async def rank_main(rank: int) -> None:
            async with await world.join(rank, allow_pickle=rank in allowing) as group:
                got: list[Any] = [None] * 3
                if len(allowing) == 3:
                    await group.all_gather_object(got, Plain())
                    assert all(isinstance(one, Plain) for one in got)
                    return
                with pytest.raises(TypeError, match=r"Plain; .* if every rank gives allow_pickle=True"):
                    group.all_gather_object(got, Plain())
                # A rank that pickles nevertheless is refused by all others, which go on.
                if rank == 0:
                    group.world.allow_pickle = True
                work = group.all_gather_object(got, Plain() if rank == 0 else 1)
                result = await outcome(work)
                if rank == 0:
                    assert isinstance(result[0], Plain)
                else:
                    assert isinstance(result, dist.RemoteProtocolError)
                    assert "what rank 0 sent: the object is pickled" in str(result)
                    assert got == [None] * 3
                await group.all_gather_object(got, rank)
                assert got == [0, 1, 2]

        tasks = [loop.create_task(rank_main(rank), context=contextvars.copy_context()) for rank in range(3)]
        await asyncio.gather(*tasks)
        await world.store.close()

    from asyncdist.testing.loop import VirtualTimeLoop

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main(runner.get_loop()))


def test_a_rank_that_dies_is_named() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await group.barrier()
        await asyncio.sleep(2 if group.rank == 2 else 1)
        if group.rank == 2:
            work = group.all_gather_array(np.zeros(100_000))
            world.kill(2)
            assert isinstance(await outcome(work), dist.DistError)
            return
        error = await outcome(group.all_gather_array(np.zeros(100_000)))
        assert isinstance(error, dist.PeerLostError)
        assert error.rank == 2

    for seed in range(5):
        run_world(4, main, seed=seed, latency_s=0.01, pass_world=True)


def test_a_time_out_names_who_is_missing() -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            await asyncio.sleep(20)
            return
        with pytest.raises(dist.CollectiveTimeoutError, match=r"all_gather_object .*missing: rank 1"):
            await group.all_gather_object([None] * 3, 1, timeout=2)

    run_world(3, main)


@pytest.mark.parametrize(
    ("meta", "objects", "message"),
    [
        (b"\xff", False, "ranks differ in collective #0: rank 0 runs hostile"),
        (b"", True, "ranks differ in collective #0: rank 0 runs hostile"),
        (encode_meta(np.dtype("f8"), (3,)), True, "ranks differ in collective #0"),
        (encode_meta(np.dtype("f8"), (3,)), False, r"rank 0 describes float64\[3\], but sent 16 bytes"),
        (OBJECT_META, True, "what rank 0 sent: the bytes are no object"),
        (encode_meta(np.dtype("f8"), (0, 2**63)), False, "but sent 16 bytes"),
    ],
)
def test_what_a_hostile_rank_sends_is_an_error(meta: bytes, objects: bool, message: str) -> None:
    async def main(group: Group) -> None:
        def prepare() -> Any:
            terms = group._terms(1 << 20)
            call: Any = call_items.all_gather_array(np.zeros(2), terms)
            if objects:
                call = call_items.all_gather_object([None] * 2, 1, terms)
            if group.rank == 0:
                call.contributed = [Item(meta, memoryview(bytearray(16)))]
                call.finish = len
            return call

        work = group._collective("hostile", 0, 5.0, prepare)
        if group.rank == 1:
            with pytest.raises(dist.DistError, match=message):
                await work
        else:
            await outcome(work)

    run_world(2, main)


def test_a_shape_that_numpy_refuses_is_an_error_of_that_rank_alone() -> None:
    async def main(group: Group) -> None:
        def prepare() -> Any:
            call: Any = call_items.all_gather_array(np.zeros(0), group._terms(1 << 20))
            if group.rank == 0:
                call.contributed = [Item(encode_meta(np.dtype("f8"), (0, 2**63)), memoryview(bytearray(0)))]
                call.finish = len
            return call

        got = await outcome(group._collective("hostile", 0, 5.0, prepare))
        if group.rank == 1:
            assert isinstance(got, dist.RemoteProtocolError)
            assert "rank 0 sent float64[0, 9223372036854775808], which numpy refuses" in str(got)
        await group.barrier()

    run_world(2, main)
