"""Subscribers of other hosts: what travels, who sends it, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from pathlib import Path

import msgpack
import numpy as np
import pytest
from waiting import eventually
from weights_kit import joined, model, on_hosts, serving, version_of

from asyncdist import HashStore, weights
from asyncdist.errors import RemoteProtocolError
from asyncdist.weights import peer as peers
from asyncdist.weights.members import Member, view_of
from asyncdist.weights.staging import Ref, Stage

MIB = 1 << 20


@pytest.fixture
async def store():
    async with HashStore() as opened:
        yield opened


def big(version):
    """4 MiB, of which a sixteenth changes from version to version."""
    array = np.arange(MIB, dtype=np.float32)
    for changed in range(version + 1):
        begin = changed % 16 * (MIB // 16)
        array[begin : begin + MIB // 16] = changed
    return {"w": array}


async def test_only_blocks_that_have_changed_travel(store, monkeypatch):
    on_hosts(monkeypatch, "trainer", "server")
    into = {}
    async with weights.publish("policy", store=store) as publisher, serving(store.clone(), into):
        await publisher.commit(0, big(0))
        await weights.wait_ready("policy", 0, store=store, timeout=10)
        assert publisher.bytes_given == 4 * MIB
        for version in range(1, 5):
            before = publisher.bytes_given
            await publisher.commit(version, big(version))
            await weights.wait_ready("policy", version, store=store, timeout=10)
            assert (into["w"] == big(version)["w"]).all()
            assert publisher.bytes_given - before == MIB // 4
        before = publisher.bytes_given
        await publisher.commit(5, big(4))
        await weights.wait_ready("policy", 5, store=store, timeout=10)
        assert publisher.bytes_given == before


async def test_where_there_is_no_shared_memory_the_bytes_travel(store, monkeypatch):
    def refused(*_arguments):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncdist.weights.staging.Segment", refused)
    into = {}
    async with weights.publish("policy", store=store) as publisher, serving(store.clone(), into):
        for version in (1, 2, 3):
            await publisher.commit(version, model(version))
            await weights.wait_ready("policy", version, store=store, timeout=10)
            assert version_of(into) == version
        assert publisher.bytes_given


async def test_those_who_have_a_version_give_it_on(store, monkeypatch):
    """Eight hosts: the trainer sends it to a few, and those to the others."""
    on_hosts(monkeypatch, "trainer", *[f"h{number}" for number in range(8)])
    served = [{} for _ in range(8)]
    async with weights.publish("policy", store=store) as publisher, contextlib.AsyncExitStack() as stack:
        for into in served:
            await stack.enter_async_context(serving(store.clone(), into))
        await joined(store, 9)
        await publisher.commit(1, big(1))
        await weights.wait_ready("policy", 1, count=8, store=store, timeout=20)
        assert all((into["w"] == big(1)["w"]).all() for into in served)
        assert 4 * MIB <= publisher.bytes_given <= 3 * 4 * MIB


@pytest.mark.parametrize("hosts", [["here"] * 7, ["trainer", *[f"h{number}" for number in range(6)]]])
async def test_late_subscribers_cost_the_trainer_nothing(store, monkeypatch, hosts):
    on_hosts(monkeypatch, *hosts)
    async with weights.publish("policy", store=store) as publisher, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serving(store.clone(), {}))
        await publisher.commit(1, big(1))
        await weights.wait_ready("policy", 1, store=store, timeout=10)
        assert publisher.bytes_given == 4 * MIB
        late = [{} for _ in range(5)]
        for into in late:
            await stack.enter_async_context(serving(store.clone(), into))
        await weights.wait_ready("policy", 1, count=6, store=store, timeout=20)
        assert all((into["w"] == big(1)["w"]).all() for into in late)
        assert publisher.bytes_given == 4 * MIB


async def test_who_comes_later_waits_for_the_one_of_its_host_that_fetches(store, monkeypatch):
    """It has the lower rank, and would go first if both wanted the version at once."""
    on_hosts(monkeypatch, "trainer", "server", "server")
    sources, fetch_from = peers.Peer._sources, peers.Peer._fetch_from
    fetching, looked = asyncio.Event(), asyncio.Event()

    async def look(peer, ref, *, wait):
        if peer.rank == 1:
            await fetching.wait()
        found = await sources(peer, ref, wait=wait)
        if peer.rank == 1:
            looked.set()
        return found

    async def fetch(peer, *arguments):
        fetching.set()
        await looked.wait()
        return await fetch_from(peer, *arguments)

    monkeypatch.setattr(peers.Peer, "_sources", look)
    monkeypatch.setattr(peers.Peer, "_fetch_from", fetch)
    async with weights.publish("policy", store=store) as publisher, serving(store.clone(), {}):
        await joined(store, 2)
        async with serving(store.clone(), {}):
            await joined(store, 3)
            await publisher.commit(1, big(1))
            await weights.wait_ready("policy", 1, count=2, store=store, timeout=10)
            assert publisher.bytes_given == 4 * MIB


async def test_one_subscriber_of_a_host_fetches_and_the_others_get_it_from_that_one(store, monkeypatch):
    on_hosts(monkeypatch, "trainer", *["server"] * 4)
    async with weights.publish("policy", store=store) as publisher, contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(serving(store.clone(), {}))
        await joined(store, 5)
        await publisher.commit(1, big(1))
        await weights.wait_ready("policy", 1, count=4, store=store, timeout=20)
        assert publisher.bytes_given == 4 * MIB


async def test_bytes_that_are_not_what_was_committed_are_fetched_again(store, monkeypatch):
    on_hosts(monkeypatch, "trainer", "server")
    check, failures = Stage.check, []

    def failing(self, blocks, sums, source):
        if len(failures) < 2:
            failures.append(source)
            self.flat[100] += 1
        check(self, blocks, sums, source)

    monkeypatch.setattr(Stage, "check", failing)
    into = {}
    async with weights.publish("policy", store=store) as publisher, serving(store.clone(), into):
        await publisher.commit(1, big(1))
        await weights.wait_ready("policy", 1, store=store, timeout=10)
        assert (into["w"] == big(1)["w"]).all()
        assert len(failures) == 2
        assert publisher.bytes_given == 3 * 4 * MIB


async def test_a_source_that_goes_is_left_for_another(store, monkeypatch):
    """The first that has it is gone in the middle of what it sends, without a goodbye."""
    on_hosts(monkeypatch, "trainer", "first", "second")
    into = {}
    async with weights.publish("policy", store=store) as publisher, serving(store.clone(), {}) as first:
        await publisher.commit(1, big(1))
        await weights.wait_ready("policy", 1, store=store, timeout=10)
        send = peers.Peer._send

        async def dying(self, rank, request, payload):
            if self is first._peer and len(payload) > MIB // 4:
                self.mesh.abort()
                self.lease.abandon()
            await send(self, rank, request, payload)

        monkeypatch.setattr(peers.Peer, "_send", dying)
        async with serving(store.clone(), into):
            await weights.wait_ready("policy", 1, store=store, timeout=10)
            await eventually(lambda: into and (into["w"] == big(1)["w"]).all())
            assert publisher.bytes_given == 2 * 4 * MIB


@pytest.mark.parametrize("at", range(4))
async def test_a_publisher_that_is_gone_at_any_step_leaves_one_version(store, monkeypatch, at):
    """It goes, without a word, when it changes the state for the `at`th time: before it is asked to, or after."""
    changes = 0
    own = store.clone()
    compare_set = own.compare_set

    def counted(key, expected, desired):
        nonlocal changes
        if not key.endswith("state") or changes < 3:
            changes += key.endswith("state")
            return compare_set(key, expected, desired)
        changes += 1
        if at % 2:
            compare_set(key, expected, desired)
        raise asyncio.CancelledError if at < 2 else ConnectionError

    into, other = {}, {}
    async with serving(store.clone(), into), serving(store.clone(), other):
        publisher = weights.publish("policy", store=own)
        await publisher._open()
        await publisher.commit(1, model(1))
        await weights.wait_ready("policy", 1, count=2, store=store, timeout=10)
        monkeypatch.setattr(own, "compare_set", counted)
        changes = 3 if at < 2 else 2
        with contextlib.suppress(BaseException):
            async with asyncio.timeout(5):
                await publisher.commit(2, model(2))
        publisher._peer.mesh.abort()
        await own.close()
        committed = await _committed(store)
        await eventually(lambda: version_of(into) == version_of(other) == committed)
        async with weights.publish("policy", store=store) as new:
            assert new.version == committed
            await new.commit(3, model(3))
            await weights.wait_ready("policy", 3, count=2, store=store, timeout=10)
            assert version_of(into) == version_of(other) == 3


async def _committed(store):
    from asyncdist.weights.state import read

    return (await read(view_of(store, "policy"))).committed.version


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x01",
        *[msgpack.packb(words) for words in ([1, 0, 1], [1, 9, 1, b""], [1, 0, b"", b""], [None] * 4)],
    ],
)
async def test_what_is_no_request_is_refused(store, payload):
    async with weights.publish("policy", store=store) as publisher:
        with pytest.raises(RemoteProtocolError, match="rank 9 sent what is no request"):
            publisher._peer.control_received(9, payload)


async def test_requests_for_what_is_not_here_are_answered(store):
    """A version that is gone, blocks that a version does not have, answers to stop, and segments that were not lent."""
    async with weights.publish("policy", store=store) as publisher, serving(store.clone(), {}) as subscription:
        await publisher.commit(1, model(1))
        await weights.wait_ready("policy", 1, store=store, timeout=10)
        asking, asked = subscription._peer, publisher._peer
        for number in (-1, 99):
            asking._send_control(asked.rank, [7, 3, number, b""])
        asking._send_control(asked.rank, [7, 2, 0, b""])
        request = asking._ask(asked.rank, 1, publisher._ref.id, b"too many" * 9)
        await eventually(lambda: not asked._tasks)
        request = asking._ask(asked.rank, 0, 1 << 60, b"")
        with pytest.raises(peers._Refusal, match="no more"):
            await asking._heard(asked.rank, request)
        await publisher.commit(2, model(2))
        await weights.wait_ready("policy", 2, store=store, timeout=10)


def kept():
    """Descriptors that are open, and maps of versions."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("asyncdist-weights")


@pytest.mark.parametrize("hosts", [("here", "here", "here"), ("trainer", "first", "second")])
async def test_commits_leave_no_descriptors_and_no_memory(store, monkeypatch, hosts):
    if len(set(hosts)) > 1:
        on_hosts(monkeypatch, *hosts)
    async with (
        weights.publish("policy", store=store) as publisher,
        serving(store.clone(), {}),
        serving(store.clone(), {}),
    ):
        counts = []
        for version in range(1, 16):
            await publisher.commit(version, model(version))
            await weights.wait_ready("policy", version, count=2, store=store, timeout=10)
            gc.collect()
            await asyncio.sleep(0)
            counts.append(kept())
        assert max(counts[10:])[0] <= max(counts[:5])[0] + 2
        assert max(mapped for _, mapped in counts[10:]) <= max(mapped for _, mapped in counts[:5]) + 2
        before = len(os.listdir("/proc/self/fd"))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize(
    ("members", "near", "wait", "asked"),
    [
        ({1: ("a", -1, 0)}, "a", True, {1}),
        ({1: ("a", -1, 0), 2: ("a", 7, 0)}, "a", True, {2}),
        ({1: ("a", -1, 0), 2: ("b", 7, 0)}, "a", True, {1}),
        ({1: ("b", -1, 0), 2: ("b", 7, 0), 3: ("c", 0, 0)}, "a", True, {2, 3}),
        ({1: ("b", -1, 0), 2: ("a", 7, 3)}, "a", True, set()),
        ({1: ("b", -1, 0), 2: ("a", 7, -3)}, "a", True, set()),
        ({1: ("b", -1, 0), 2: ("a", 7, 3)}, "a", False, {1}),
        ({1: ("b", -1, 0), 9: ("a", 7, 3)}, "a", True, {1}),
        ({1: ("b", -1, 0), 9: ("a", 7, -3)}, "a", True, set()),
        ({1: ("b", -1, 0), 9: ("a", 7, -2)}, "a", True, {1}),
        ({1: ("b", -1, 0), 2: ("b", 7, 0)}, "a", False, {1, 2}),
    ],
)
async def test_whom_a_subscriber_asks(store, members, near, wait, asked):
    """Members: host, what is served (-1: a publisher), what it wants or fetches (0: it has it). Ours is rank 5."""
    async with weights.publish("policy", store=store) as publisher:
        asking = publisher._peer
        asking.rank, asking.member = 5, asking.member._replace(host=near)
        for rank, (host, serves, gets) in members.items():
            member = Member("", host, b"", () if gets else (3,), gets, serves)
            await asking.view.set(f"members/{rank}", member.pack())
        assert set(await asking._sources(Ref(3, 1, b"", 1, ""), wait=wait)) == asked
