"""What a world agrees on about algorithms when it is joined, and what its groups make of it."""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import replace

import numpy as np
import pytest

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.host import backend as aio
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.deadline import Deadline
from asyncdist.errors import DistError
from asyncdist.init import open_world
from asyncdist.plan.cost.constants import ASYNCIO
from asyncdist.plan.selection.tuning import DEFAULT_TUNING, Tuning
from asyncdist.store import HashStore
from asyncdist.testing import run_world
from asyncdist.transport.in_memory import MemoryMesh, MemoryNetwork
from asyncdist.world.init_method import InitMethod, StoreSource


async def open_worlds(main, environs, tunings=None):
    """Run `main(group)` on one rank per environment; returns results and exceptions in rank order."""
    loop = asyncio.get_running_loop()
    network, store = MemoryNetwork(loop, None, 0.0), HashStore()

    def make_mesh(rank, size, world_id, secret, resolve, owner, config):
        return MemoryMesh(network, rank, size, owner, world_id)

    async def join(rank):
        async with asyncio.timeout(20):
            group = await open_world(
                StoreSource(store, owned=False),
                InitMethod(rank, len(environs)),
                "default",
                10.0,
                Deadline.after(10.0, loop.time()),
                environ=environs[rank],
                make_mesh=make_mesh,
                tuning=tunings[rank] if tunings else None,
            )
            async with group:
                return await main(group)

    tasks = [loop.create_task(join(rank), context=contextvars.copy_context()) for rank in range(len(environs))]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await store.close()


async def tuning_of(group):
    return group.world.tuning


async def test_rank_0_decides_for_all():
    mine = Tuning(replace(ASYNCIO, alpha_s=1e-3, cores=3), 2, (("all_reduce", "ring"),))
    assert await open_worlds(tuning_of, [{}, {}], [mine, DEFAULT_TUNING]) == [mine, mine]


async def test_the_environment_of_rank_0_counts_for_all(tmp_path):
    algo = {"ASYNCDIST_ALGO": "all_reduce:ring_2d", "ASYNCDIST_TUNING": "off"}
    found = await open_worlds(tuning_of, [{**algo, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, {}])
    assert found[0] == found[1]
    assert (found[0].ranks_per_host, found[0].overrides) == (2, (("all_reduce", "ring_2d"),))
    assert found[0].constants.alpha_s == ASYNCIO.alpha_s


async def test_another_override_than_rank_0_has_is_an_error():
    first, second = await open_worlds(tuning_of, [{}, {"ASYNCDIST_ALGO": "all_reduce:ring"}])
    assert isinstance(second, DistError)
    assert "must be the same on all ranks" in str(second)
    assert isinstance(first, Tuning | DistError)


async def test_what_rank_0_publishes_is_checked():
    class Hostile(Tuning):
        def to_terms(self):
            return {**super().to_terms(), "ranks_per_host": -1}

    found = await open_worlds(tuning_of, [{}, {}], [Hostile(), None])
    assert all(isinstance(error, DistError) and "what rank 0 published" in str(error) for error in found)


def test_groups_plan_for_the_hosts_of_their_ranks():
    async def main(group):
        group.world.tuning = Tuning(ASYNCIO, 2)
        pairs = group.make_subgroup([0, 1], None, "pair"), group.make_subgroup([1, 2], None, "across")
        found = [one._core._backend._tuning.ranks_per_host for one in pairs if one is not None]
        await group.barrier()
        return found

    assert run_world(4, main) == [[2], [2, 1], [1], []]


def test_simulated_worlds_depend_on_no_host():
    assert run_world(2, tuning_of) == [DEFAULT_TUNING, DEFAULT_TUNING]


def test_candidates_are_traced_once_per_shape(monkeypatch):
    seen = []

    def note(subject, name, **fields):
        if subject == "tune":
            seen.append((name, fields))

    async def main(group):
        array = np.ones(1000, np.float32)
        for _ in range(3):
            await group.all_reduce(array)
        return None

    monkeypatch.setattr(events, "tracing", "tune".__eq__)
    monkeypatch.setattr(events, "emit", note)
    run_world(2, main)
    chosen = [fields for name, fields in seen if name == "chosen"]
    assert sorted(fields["rank"] for fields in chosen) == [0, 1]
    first = seen[0][1]
    assert seen[0][0] == "candidate"
    assert first["algorithm"] == chosen[0]["algorithm"] == "recursive_doubling"
    assert (first["collective"], first["world"], first["bytes"]) == ("all_reduce", 2, 4000)
    assert first["gb_per_s"] == pytest.approx(4000 / first["predicted_us"] / 1e3, rel=0.05)


def test_what_cannot_go_by_records_is_not_planned_as_if_it_did(monkeypatch):
    """Of a MiB by a custom operation the chunks were left at 32 KiB, as if it were put out in one go."""
    asked = {0: [], 1: []}
    plan_for = aio.plan_for

    def noting(collective, rank, *args, in_records, **how):
        asked[rank].append(in_records)
        return plan_for(collective, rank, *args, in_records=in_records, **how)

    monkeypatch.setattr(aio, "plan_for", noting)

    async def main(group):
        ones, uneven = np.ones(8), [np.ones(3), np.ones(5)]
        await group.all_reduce(ones)
        await group.all_reduce(ones, ReduceOp.custom(np.add))
        await group.all_reduce(ones, ReduceOp.PREMUL_SUM(2.0))
        await group.all_gather([np.ones(8), np.ones(8)], ones)
        await group.all_gather(uneven, uneven[group.rank].copy())
        await group.reduce_scatter(uneven[group.rank].copy(), uneven)

    run_world(2, main)
    assert asked[0] == asked[1] == [True, False, False, True, False, True]


def test_a_shape_is_planned_once_per_group(monkeypatch):
    """Issuing a known shape asks neither the selector nor the plan cache."""
    planned = []
    plan_for = aio.plan_for
    monkeypatch.setattr(aio, "plan_for", lambda *args, **how: planned.append(args) or plan_for(*args, **how))

    async def main(group):
        array = np.ones(8)
        for _ in range(5):
            await group.all_reduce(array)

    run_world(2, main)
    assert len(planned) == 2  # one per rank
