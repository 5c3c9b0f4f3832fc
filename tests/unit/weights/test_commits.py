"""Commits: staged by all, then served by all at once, or by none."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from waiting import eventually
from weights_kit import joined, model, serving, version_of

from asyncdist import HashStore, weights
from asyncdist.errors import ClosedError, DistError, StoreTimeoutError
from asyncdist.testing.fake_cuda import fake_cuda
from asyncdist.transport.shared_memory.segment import AttachedSegment, Segment
from asyncdist.weights.peer import Peer
from asyncdist.weights.staging import Threads
from asyncdist.weights.state import read
from asyncdist.weights.subscriber import Subscription


@pytest.fixture
async def store():
    async with HashStore() as opened:
        yield opened


async def test_all_subscribers_serve_what_is_committed(store):
    served = [{}, {}, {}]
    async with contextlib.AsyncExitStack() as stack:
        for number, into in enumerate(served):
            await stack.enter_async_context(serving(store.clone(), into, label=f"s{number}"))
        async with weights.publish("policy", store=store) as publisher:
            for version in (1, 2, 3, 4):
                await publisher.commit(version, model(version))
                found = await weights.wait_ready("policy", version, count=3, store=store, timeout=10)
                assert found == {f"s{number}": version for number in range(3)}
                assert [version_of(into) for into in served] == [version] * 3
                assert served[0]["w"].shape == (2, 100_000)
            assert publisher.version == 4
            assert publisher.bytes_given == 0
    assert await weights.ready("policy", store=store) == {}


async def test_a_server_is_not_kept_from_its_requests_by_looking(store):
    async with serving(store.clone(), {}) as subscription:
        await joined(store, 1)
        assert subscription._peer.mesh.spinner is None


async def test_processes_of_a_host_map_the_same_memory(store):
    """A write of the publisher's into its stage is seen by both, which no copy would show."""
    served = [{}, {}]
    async with (
        serving(store.clone(), served[0]),
        serving(store.clone(), served[1]),
        weights.publish("policy", store=store) as publisher,
    ):
        await publisher.commit(1, model(1))
        await weights.wait_ready("policy", 1, count=2, store=store, timeout=10)
        publisher._current.flat[:4].view(np.float32)[0] = 77
        assert [into["w"][0, 0] for into in served] == [77, 77]


async def test_memory_is_used_again_only_when_nobody_reads_it(store):
    into = {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
        kept = []
        for version in range(1, 8):
            await publisher.commit(version, model(version))
            await weights.wait_ready("policy", version, store=store, timeout=10)
            if version % 2:
                kept.append(into["w"][1])
            assert [version_of({"w": view}) for view in kept] == list(range(1, version + 1, 2))
        before = publisher._current.memory
        kept.clear()
        for version in (8, 9, 10, 11):
            await publisher.commit(version, model(version))
            await weights.wait_ready("policy", version, store=store, timeout=10)
            await eventually(lambda: all(not stage.lent for stage in publisher._spares))
        assert before in [stage.memory for stage in [*publisher._spares, publisher._current]]


async def test_what_is_served_no_more_is_unmapped_by_a_thread(store, monkeypatch):
    """For a gibibyte that takes 30 ms, in which the loop would answer no request."""
    unmapped = []

    def release(segment):
        actual(segment)
        unmapped.append((segment._map.closed, threading.current_thread().name[:-2]))

    actual = AttachedSegment.release
    monkeypatch.setattr(AttachedSegment, "release", release)
    into = {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
        for version in (1, 2):
            await publisher.commit(version, model(version))
            await weights.wait_ready("policy", version, store=store, timeout=10)
        await eventually(lambda: unmapped == [(True, "asyncdist-weights")])
        assert version_of(into) == 2


async def test_arrays_of_a_gpu_are_published_as_they_are_at_the_call(store):
    into = {}
    with fake_cuda(1, mode="threads") as cuda:
        stream, array = cuda.runtime.new_stream(0), cuda.runtime.empty((2, 3), device=0)
        async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
            for version in (1, 2):
                with cuda.runtime.use(stream):
                    array.set(version)
                    committing = asyncio.create_task(publisher.commit(version, {"w": array, "b": np.zeros(1)}))
                    await asyncio.sleep(0)
                await committing
                await weights.wait_ready("policy", version, store=store, timeout=10)
                assert into["w"].shape == (2, 3)
                assert (into["w"] == version).all()
            with pytest.raises(ValueError, match=r"arrays\['w'\] is not C-contiguous"):
                await publisher.commit(3, {"w": array[:, :1]})


async def test_what_servers_that_left_have_mapped_is_not_kept_for_them(store):
    async with weights.publish("policy", store=store) as publisher:
        for version in range(1, 8):
            async with serving(store.clone(), {}):
                await publisher.commit(version, model(version))
                await weights.wait_ready("policy", version, store=store, timeout=10)
            await eventually(lambda: not publisher._peer._lenders)


async def test_memory_that_is_being_sent_is_not_written(store):
    async with weights.publish("policy", store=store) as publisher:
        for version in range(1, 6):
            await publisher.commit(version, model(version))
            if version == 1:
                first = publisher._current
                first.sending += 1
            assert version == 1 or publisher._current.memory is not first.memory


async def test_a_server_whose_lease_was_lost_is_ready_again_at_what_it_serves(store):
    async with serving(store.clone(), {}) as subscription, weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
        await weights.wait_ready("policy", 1, store=store, timeout=10)
        first = subscription._peer
        first.lease.abandon()
        await eventually(lambda: subscription._peer not in (None, first))
        await weights.wait_ready("policy", 1, store=store, timeout=10)


async def test_closing_beside_a_commit_that_connects_anew_ends_both(store, monkeypatch):
    async with weights.publish("policy", store=store) as publisher:
        publisher._peer.lease.abandon()
        open_peer = Peer.open

        async def closed_meanwhile(*arguments, **options):
            await publisher.close()
            return await open_peer(*arguments, **options)

        monkeypatch.setattr(Peer, "open", closed_meanwhile)
        with pytest.raises(ClosedError):
            await publisher.commit(1, model(1))
        assert publisher._peer is None


async def test_a_subscriber_that_cannot_serve_a_version_keeps_it_from_all(store):
    first, second = {}, model(0, elements=5)
    async with (
        serving(store.clone(), first, label="one"),
        serving(store.clone(), second, label="two"),
        weights.publish("policy", store=store) as publisher,
    ):
        await publisher.commit(1, model(1, elements=5))
        await weights.wait_ready("policy", 1, count=2, store=store, timeout=10)
        with pytest.raises(weights.WeightsError, match=r"two cannot serve version 2.*'w' is float32\[2, 6\], where"):
            await publisher.commit(2, model(2, elements=6))
        assert (version_of(first), version_of(second), publisher.version) == (1, 1, 1)
        await publisher.commit(3, model(3, elements=5))
        await weights.wait_ready("policy", 3, count=2, store=store, timeout=10)
        assert (version_of(first), version_of(second)) == (3, 3)


async def test_one_that_comes_and_cannot_serve_what_is_committed_is_told_and_keeps_nobody(store):
    into = {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
        wrong = weights.subscribe("policy", into=model(0, elements=3), store=store.clone(), label="wrong")
        with pytest.raises(weights.WeightsError, match=r"wrong.*version 1 cannot be served here: 'w' is float32"):
            await anext(wrong)
        await publisher.commit(2, model(2))
        await weights.wait_ready("policy", 2, store=store, timeout=10)
        assert version_of(into) == 2


async def test_a_new_publisher_takes_over(store):
    into = {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as old:
        await old.commit(1, model(1))
        async with weights.publish("policy", store=store) as new:
            assert new.version == 1
            with pytest.raises(weights.WeightsError, match="another publisher has taken over"):
                await old.commit(2, model(2))
            await new.commit(3, model(3))
            await weights.wait_ready("policy", 3, store=store, timeout=10)
            assert version_of(into) == 3


async def test_a_late_subscriber_gets_the_version_after_its_publisher_has_gone(store):
    first, second = {}, {}
    async with serving(store.clone(), first):
        async with weights.publish("policy", store=store) as publisher:
            await publisher.commit(5, model(5))
            await weights.wait_ready("policy", 5, store=store, timeout=10)
        async with serving(store.clone(), second):
            await weights.wait_ready("policy", 5, count=2, store=store, timeout=10)
            assert version_of(second) == 5
        async with weights.publish("policy", store=store) as publisher:
            await publisher.commit(6, model(6))
            await weights.wait_ready("policy", 6, store=store, timeout=10)
            assert version_of(first) == 6
            assert version_of(second) == 5


async def test_what_nobody_has_any_more_keeps_no_subscriber_from_what_comes(store):
    """All that served the last version are gone. Who comes then waits for the next, and stages it."""
    async with weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
    into = {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
        await joined(store, 2)
        for _ in range(20):
            await asyncio.sleep(0)
        await publisher.commit(2, model(2), timeout=10)
        await weights.wait_ready("policy", 2, store=store, timeout=10)
        assert version_of(into) == 2


async def test_without_into_a_subscriber_is_ready_when_it_asks_for_the_next(store):
    async with weights.publish("policy", store=store) as publisher:
        async with weights.subscribe("policy", store=store.clone(), label="s") as subscription:
            await publisher.commit(1, model(1))
            version = await anext(subscription)
            assert (version.number, version_of(version.arrays)) == (1, 1)
            assert await weights.ready("policy", store=store) == {}
            waiting = asyncio.ensure_future(anext(subscription))
            assert await weights.wait_ready("policy", 1, store=store, timeout=10) == {"s": 1}
            await publisher.commit(2, model(2))
            assert (await waiting).number == 2
            await publisher.commit(3, model(3))
            await publisher.commit(4, model(4))
            await eventually(lambda: subscription.version == 4)
            assert (await anext(subscription)).number == 4
            assert version_of(version.arrays) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


async def test_a_subscriber_that_hangs_is_named_and_the_version_taken_back(store, monkeypatch):
    into, slow = {}, {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
        async with serving(store.clone(), slow, label="slow") as subscription:
            await weights.wait_ready("policy", 1, count=2, store=store, timeout=10)
            hang = asyncio.Event()
            get = Subscription._get

            async def hanging(self, *arguments, **options):
                if self is subscription:
                    await hang.wait()
                await get(self, *arguments, **options)

            monkeypatch.setattr(Subscription, "_get", hanging)
            with pytest.raises(
                weights.WeightsError, match=r"version 2 was not staged by all within 0.2 s.*missing slow"
            ):
                await publisher.commit(2, model(2), timeout=0.2)
            assert (version_of(into), version_of(slow)) == (1, 1)
            hang.set()
            await publisher.commit(3, model(3))
            await weights.wait_ready("policy", 3, count=2, store=store, timeout=10)


async def test_a_cancelled_commit_is_made_or_taken_back(store):
    into = {}
    async with serving(store.clone(), into), weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
        for turns in range(0, 60, 3):
            task = asyncio.create_task(publisher.commit(turns + 2, model(turns + 2)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            state = await read(publisher._peer.view)
            assert state.staged is None
            assert state.committed.version == publisher.version
            await eventually(lambda: into and version_of(into) == publisher.version)
        await publisher.commit(99, model(99))
        await weights.wait_ready("policy", 99, store=store, timeout=10)


async def test_a_publisher_closed_during_a_commit_leaves_no_descriptor(store, monkeypatch):
    segments = []

    def made(*arguments):
        segments.append(Segment(*arguments))
        return segments[-1]

    async def do(threads, jobs):
        await actual(threads, jobs)
        await filled.wait()

    actual, filled = Threads.do, asyncio.Event()
    monkeypatch.setattr("asyncdist.weights.staging.Segment", made)
    monkeypatch.setattr(Threads, "do", do)
    async with weights.publish("policy", store=store) as publisher:
        committing = asyncio.create_task(publisher.commit(1, model(1)))
        await eventually(lambda: segments)
        await publisher.close()
        filled.set()
        with pytest.raises(DistError):
            await committing
        assert [segment.fd for segment in segments] == [-1]
        with pytest.raises(ClosedError):
            await publisher.commit(2, model(2))


@pytest.mark.parametrize("turns", range(4))
async def test_a_subscriber_that_is_closed_twice_leaves(store, turns):
    async with weights.publish("policy", store=store), serving(store.clone(), {}) as subscription:
        await joined(store, 2)
        closing = asyncio.create_task(subscription.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        await subscription.close()
        await closing
        assert len(await store.list_keys("weights/policy/members/")) == 1


async def test_a_publisher_whose_closing_is_cancelled_leaves_no_descriptor(store):
    publisher = weights.publish("policy", store=store)
    async with publisher:
        await publisher.commit(1, model(1))
        segment = publisher._current.segment
        closing = asyncio.create_task(publisher.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert segment.fd == -1


async def test_a_cancelled_subscriber_leaves_nothing(store):
    async with weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
        for turns in range(0, 60, 3):
            subscription = weights.subscribe("policy", into={}, store=store)
            task = asyncio.create_task(anext(subscription))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await subscription.close()
        assert await store.list_keys("weights/policy/ready/") == []
        await eventually(lambda: not publisher._peer._tasks)
        await publisher.commit(2, model(2), timeout=5)
        assert len(await store.list_keys("weights/policy/members/")) == 1


async def test_break_leaves_a_subscriber_at_work(store):
    into = {}
    async with weights.publish("policy", store=store) as publisher:
        await publisher.commit(1, model(1))
        async with weights.subscribe("policy", into=into, store=store.clone()) as subscription:
            async for _version in subscription:
                break
            await publisher.commit(2, model(2))
            await eventually(lambda: version_of(into) == 2)


async def test_wrong_arguments(store):
    async with weights.publish("policy", store=store) as publisher:
        for arrays, error in (({}, ValueError), ({1: np.zeros(1)}, ValueError), ({"w": "no"}, TypeError)):
            with pytest.raises(error):
                await publisher.commit(1, arrays)
        with pytest.raises(TypeError, match="version"):
            await publisher.commit("1", model(1))
        with pytest.raises(ValueError, match="64 bits"):
            await publisher.commit(1 << 63, model(1))
        with pytest.raises(TypeError, match="into"):
            weights.subscribe("policy", into={"w": "no"}, store=store)
    with pytest.raises(ClosedError):
        await publisher.commit(1, model(1))


async def test_nobody_is_ready_in_time(store):
    with pytest.raises(StoreTimeoutError, match="'policy': 0 of 2 subscribers serve version 7 or a higher one"):
        await weights.wait_ready("policy", 7, count=2, store=store, timeout=0.05)
