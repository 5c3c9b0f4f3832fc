"""Streams of whole worlds in virtual time: chunks, back-pressure, early ends and failures."""

from __future__ import annotations

import asyncio
import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.collectives.arguments import stream as call_stream
from asyncdist.collectives.arguments.stream import STREAM_WINDOW
from asyncdist.collectives.host.stream_operation import StreamOperation
from asyncdist.testing import SimulatedWorld, run_world

CHUNK = 100_000
"""Bytes; more than is sent without asking."""


async def consume(stream: dist.ChunkStream) -> list[dist.StreamChunk]:
    return [chunk async for chunk in stream]


def chunks_under_way(group: Group) -> int:
    return len(group._core._backend.running[0, 0]._under_way)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_chunks_come_in_order_and_complete(size: int) -> None:
    async def main(group: Group) -> None:
        rank, root = group.rank, 1 % size
        for total, chunk_bytes in ((1000, 64), (100_003, 80_000), (0, 10), (7, 100), (40_000, 80_000), (5, 1)):
            whole = np.arange(total, dtype="f4")
            x = whole.copy() if rank == root else np.zeros(total, "f4")
            stream = dist.broadcast_stream(x, root, chunk_bytes=chunk_bytes)
            seen = 0
            async for chunk in stream:
                assert (chunk.start, chunk.source) == (seen, root)
                assert np.array_equal(chunk.data, whole[seen : seen + chunk.data.size])
                assert np.may_share_memory(chunk.data, x)
                seen += chunk.data.size
            assert seen == total
            assert await stream.work is x
            assert await consume(stream) == []

            own = np.arange(total, dtype="i4") + rank
            flat = np.zeros((size, total), "i4")
            in_place = np.zeros((size, total), "i4")
            in_place[rank] = own
            for output, source in (
                (flat, own),
                ([np.zeros(total, "i4") for _ in range(size)], own),
                (in_place, in_place[rank]),
            ):
                chunks = await consume(group.all_gather_stream(output, source, chunk_bytes=chunk_bytes))
                assert sum(chunk.data.size for chunk in chunks) == size * total
                assert [chunk.source for chunk in chunks[:size]] == list(range(size))[: len(chunks)]
                for chunk in chunks:
                    expected = np.arange(chunk.start, chunk.start + chunk.data.size) + chunk.source
                    assert np.array_equal(chunk.data, expected)
                assert all(np.array_equal(output[other], np.arange(total) + other) for other in range(size))

    run_world(size, main)


def test_a_shifted_block_of_the_output_may_be_the_input() -> None:
    async def main(group: Group) -> None:
        whole = np.zeros(200_000)
        whole[1:100_001] = group.rank + 1
        await consume(group.all_gather_stream(whole, whole[1:100_001], chunk_bytes=CHUNK))
        assert (whole == np.repeat([1, 2], 100_000)).all()

    run_world(2, main)


def test_a_chunk_is_usable_while_the_next_is_in_flight() -> None:
    async def main(group: Group) -> None:
        x = np.full(8 * CHUNK, group.rank, "u1")
        stream = group.broadcast_stream(x, 0, chunk_bytes=CHUNK)
        if group.rank == 0:
            await stream.work
            return
        assert (x == group.rank).all()
        chunk = await anext(stream)
        assert (chunk.data == 0).all()
        assert not stream.work.done()
        chunk.data[:] = 9  # complete here and passed on: it is ours
        await consume(stream)
        assert (x[:CHUNK] == 9).all()
        assert (x[CHUNK:] == 0).all()

    for seed in range(3):
        run_world(3, main, seed=seed, latency_s=0.01)


@pytest.mark.parametrize("size", [2, 4])
def test_a_slow_consumer_stops_the_source_within_a_window_each(size: int) -> None:
    count = 64

    async def main(group: Group) -> None:
        x = np.full(count * CHUNK, group.rank, "u1")
        stream = group.broadcast_stream(x, 0, chunk_bytes=CHUNK)
        slow = group.rank == size - 1
        if slow:
            await asyncio.sleep(10)
            assert (x[STREAM_WINDOW * CHUNK :] == group.rank).all()
            assert (x[: STREAM_WINDOW * CHUNK] == 0).all()
            await anext(stream)
            await asyncio.sleep(10)
            assert (x[(STREAM_WINDOW + 1) * CHUNK :] == group.rank).all()
            assert (x[: (STREAM_WINDOW + 1) * CHUNK] == 0).all()
        else:
            seen = 0
            loop = asyncio.get_running_loop()
            async for _ in stream:
                seen += 1
                if loop.time() < 10:
                    assert seen <= STREAM_WINDOW * size
                    assert chunks_under_way(group) <= STREAM_WINDOW
        await consume(stream)
        assert (x == 0).all()

    run_world(size, main)


def test_a_slow_consumer_stops_an_all_gather() -> None:
    async def main(group: Group) -> None:
        output = np.full((3, 64 * CHUNK), 255, "u1")
        stream = group.all_gather_stream(output, np.full(64 * CHUNK, group.rank, "u1"), chunk_bytes=CHUNK)
        if group.rank == 1:
            await asyncio.sleep(10)
            assert (output[:, STREAM_WINDOW * CHUNK :] == 255).all()
        seen = 0
        async for _ in stream:
            seen += 1
            if asyncio.get_running_loop().time() < 10:
                assert seen <= 3 * STREAM_WINDOW * 3
        assert seen == 3 * 64
        assert all((output[other] == other).all() for other in range(3))

    run_world(3, main)


@pytest.mark.parametrize("how", ["break", "aclose", "with", "never", "close"])
def test_leaving_early_harms_nobody(how: str) -> None:
    async def main(group: Group) -> None:
        sub = dist.new_group()
        x = np.full(20 * CHUNK, group.rank, "u1")
        stream = sub.broadcast_stream(x, 0, chunk_bytes=CHUNK)
        work = stream.work
        if group.rank == 1:
            if how == "break":
                async for _ in stream:
                    break
                del stream
                gc.collect()
            elif how == "aclose":
                await anext(stream)
                await stream.aclose()
                assert await consume(stream) == []
            elif how == "with":
                async with stream:
                    await anext(stream)
            elif how == "never":
                del stream
                gc.collect()
            else:
                await anext(stream)
                await sub.close()
                assert work.is_success()
        else:
            assert len(await consume(stream)) == 20
        await work
        assert (x == 0).all()
        if how != "close":
            await sub.barrier()

    run_world(3, main)


def test_order_is_that_of_the_calls_whatever_the_consumers_do() -> None:
    async def main(group: Group) -> None:
        x, y = np.full(10 * CHUNK, group.rank, "u1"), np.ones(50_000)
        stream = group.broadcast_stream(x, 2, chunk_bytes=CHUNK)
        summed = group.all_reduce(y)
        second = group.broadcast_stream(x.copy(), 1, chunk_bytes=CHUNK)
        await summed
        assert (y == 3).all()
        assert len(await consume(second)) == 10
        assert len(await consume(stream)) == 10
        assert (x == 2).all()

    run_world(3, main)


def test_cancelling_the_wait_loses_no_chunk() -> None:
    async def main(group: Group) -> None:
        x = np.zeros(6 * CHUNK, "u1")
        if group.rank == 0:
            await asyncio.sleep(5)
        stream = group.broadcast_stream(x, 0, chunk_bytes=CHUNK)
        if group.rank == 1:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task is iterating"):
                await anext(stream)
            assert (await waiting).start == 0
            assert len(await consume(stream)) == 5
        else:
            await stream.work

    run_world(2, main)


def test_a_lost_rank_ends_the_iteration_everywhere() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        await group.barrier()
        loop = asyncio.get_running_loop()
        if group.rank != 1:
            await asyncio.sleep(1)
        stream = group.all_gather_stream(
            np.zeros((3, 400 * CHUNK), "u1"), np.ones(400 * CHUNK, "u1"), chunk_bytes=CHUNK
        )
        if group.rank == 1:
            await asyncio.sleep(1.05)
            world.kill(1)
            assert isinstance(await outcome(stream.work), dist.DistError)
            return
        with pytest.raises(dist.PeerLostError, match="all_gather_stream #1") as lost:
            await consume(stream)
        assert lost.value.rank == 1
        assert loop.time() < 2.1
        with pytest.raises(dist.PeerLostError):
            await anext(stream)

    for seed in range(3):
        run_world(3, main, seed=seed, latency_s=0.01, pass_world=True)


def test_an_abort_reaches_a_consumer_that_is_behind() -> None:
    async def main(group: Group) -> None:
        x = np.zeros(40 * CHUNK, "u1")
        stream = group.broadcast_stream(x, 0, chunk_bytes=CHUNK)
        if group.rank == 0:
            await asyncio.sleep(1)
            group.abort("enough")
        else:
            await asyncio.sleep(2)
        with pytest.raises(dist.GroupAbortedError, match="enough"):
            await consume(stream)

    run_world(3, main)


def test_a_time_out_ends_the_iteration() -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            await asyncio.sleep(20)
            return
        with pytest.raises(dist.CollectiveTimeoutError, match="missing: rank 1"):
            await consume(group.all_gather_stream(np.zeros(3 * CHUNK), np.zeros(CHUNK), timeout=2))

    run_world(3, main)


def test_a_chunk_that_cannot_begin_ends_the_stream_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the consumer is who lets it begin."""

    async def main(group: Group) -> None:
        if group.rank == 1:
            running = StreamOperation._program

            def short(operation: StreamOperation, index: int) -> Any:
                if index == STREAM_WINDOW + 1 and operation.backend.rank == 1:
                    raise MemoryError("no room")
                return running(operation, index)

            monkeypatch.setattr(StreamOperation, "_program", short)
        await group.barrier()
        stream = group.broadcast_stream(np.zeros(100 * CHUNK, "u1"), 0, chunk_bytes=CHUNK)
        with pytest.raises(dist.DistError, match="no room") as failed:
            await consume(stream)
        assert group.rank == 1 or isinstance(failed.value, dist.GroupAbortedError)
        with pytest.raises(dist.DistError, match="no room"):
            await stream.work

    run_world(2, main)


def test_other_chunk_sizes_are_a_mismatch() -> None:
    async def main(group: Group) -> None:
        x = np.zeros(10 * CHUNK, "u1")
        stream = group.all_gather_stream(np.zeros(20 * CHUNK, "u1"), x, chunk_bytes=CHUNK + group.rank)
        with pytest.raises(dist.CollectiveMismatchError):
            await consume(stream)

    run_world(2, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.broadcast_stream([1], 0), TypeError, "tensor must be"),
        (lambda g: g.broadcast_stream(np.zeros(3), 2), ValueError, "root=2"),
        (lambda g: g.broadcast_stream(np.zeros(6)[::2], 0), ValueError, "not C-contiguous"),
        (lambda g: g.broadcast_stream(np.zeros(3), 0, chunk_bytes=0), ValueError, "chunk_bytes must be positive"),
        (lambda g: g.broadcast_stream(np.zeros(3), 0, chunk_bytes=1.5), TypeError, "chunk_bytes must be an int"),
        (lambda g: g.broadcast_stream(np.frombuffer(b"abc", "u1"), 1), ValueError, "read-only"),
        (lambda g: g.all_gather_stream(np.zeros(3), np.zeros(2)), ValueError, "2 times the 2 elements"),
        (lambda g: g.all_gather_stream(np.zeros(4, "f4"), np.zeros(2)), ValueError, "dtype"),
        (lambda g: g.all_gather_stream([np.zeros(2)], np.zeros(2)), ValueError, "one array per rank"),
        (lambda g: g.all_gather_stream(np.zeros((4, 2))[:, 0], np.zeros(2)), ValueError, "not C-contiguous"),
    ],
)
def test_wrong_arguments_are_refused_and_the_group_goes_on(call: Any, error: type[Exception], message: str) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                await consume(group.all_gather_stream(np.zeros(2), np.zeros(1)))
        await group.barrier()

    run_world(2, main)


def test_there_are_as_many_chunks_as_the_limit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "MAX_CHUNKS", 10)

    async def main(group: Group) -> None:
        assert len(await consume(group.broadcast_stream(np.zeros(10), 0, chunk_bytes=8))) == 10
        with pytest.raises(ValueError, match="11 chunks, at most 10 are allowed"):
            group.broadcast_stream(np.zeros(11), 0, chunk_bytes=8)

    run_world(2, main)


def test_the_examples_of_the_document_work() -> None:
    text = (Path(__file__).parents[3] / "docs" / "streaming.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert source is not None
    namespace: dict[str, Any] = {}
    exec(source[1], namespace)

    async def main(group: Group) -> None:
        weights = np.arange(300_000.0) if group.rank == 0 else np.zeros(300_000)
        installed = np.zeros(300_000)

        def install(start: int, data: Any) -> None:
            installed[start : start + data.size] = data

        await namespace["receive_weights"](weights, install)
        assert np.array_equal(installed, np.arange(300_000.0))
        asked = []
        await namespace["check_everybody"](np.zeros(10), lambda source, data: asked.append(source) or source < 1)
        assert asked == [0, 1]

    run_world(3, main)
