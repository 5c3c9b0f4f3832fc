"""Backends, event loops, several worlds, and pairs that break."""

from __future__ import annotations

import asyncio
import contextvars
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import run_world


def test_backends_have_names_and_can_be_registered() -> None:
    from asyncdist.collectives.backend import GroupBackend, parse_backend
    from asyncdist.collectives.host.backend import HostBackend

    assert parse_backend(None) == parse_backend("cpu:aio") == ("aio", None)
    assert parse_backend("Gloo") == parse_backend("cpu:gloo,cuda:aio") == ("aio", "aio")
    assert parse_backend("cuda:aio") == (None, "aio")
    for text, message in {
        "foo": "unknown or unavailable backend 'foo'",
        "nccl": "'nccl' is not available: .*",
        "cpu:aio,tpu:aio": "malformed",
        "cpu:": "malformed",
        "cpu:aio,cpu:aio": "malformed",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_backend(text)
    for take in (dist.Backend, parse_backend):
        with pytest.raises(TypeError, match="a backend's name is a str, not int"):
            take(3)  # type: ignore[operator]
    started: list[str] = []

    def factory(mesh: Any, group_id: int, ranks: tuple[int, ...], rank: int) -> GroupBackend:
        class Counting(HostBackend):
            def start(self, call: Any, *arguments: Any) -> None:
                started.append(call.collective)
                super().start(call, *arguments)

        from asyncdist.collectives.executor.buffers import ScratchPool

        return Counting(mesh, group_id, ranks, rank, loop=asyncio.get_running_loop(), pool=ScratchPool())

    dist.Backend.register_backend("counting", factory)
    try:
        with pytest.raises(ValueError, match="registered already"):
            dist.Backend.register_backend("COUNTING", factory)
        assert dist.is_backend_available("counting")

        async def main(group: Group) -> None:
            sub = dist.new_group(backend="Counting")
            assert dist.get_backend(sub) == "counting" == dist.Backend.COUNTING  # type: ignore[attr-defined]
            await dist.barrier(sub)

        run_world(2, main)
        assert started == ["barrier", "barrier"]
    finally:
        del dist.Backend._factories["counting"]
        del dist.Backend.COUNTING  # type: ignore[attr-defined]
    assert not dist.is_nccl_available()
    assert dist.is_mpi_available() is (find_spec("mpi4py") is not None)
    assert dist.is_gloo_available()


def test_calls_from_another_loop_are_refused() -> None:
    async def main(group: Group) -> None:
        errors: list[BaseException] = []

        async def elsewhere() -> None:
            try:
                group.barrier()
            except RuntimeError as error:
                errors.append(error)

        import threading

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        thread.join()
        assert "another event loop" in str(errors[0])

    run_world(1, main)


def test_a_send_that_expires_ends_nothing_else() -> None:
    async def main(group: Group) -> None:
        pair = dist.new_group([0, 1])
        if group.rank == 0:
            said = (
                r"isend \(rank 1\): did not end within 2 s: rank 1 has posted no receive for it; "
                r"the message \(7.629 MiB, tag 3\) is withdrawn"
            )
            with pytest.raises(dist.CollectiveTimeoutError, match=said) as late:
                await group.isend(np.zeros(1_000_000), 1, 3, timeout=2)
            assert late.value.missing == (1,)
            await group.isend(np.ones(1), 1)
        elif group.rank == 1:
            await asyncio.sleep(3)
            said = r"recv \(rank 0\): did not end within 2 s: rank 0 has sent no message of tag 3 for it"
            with pytest.raises(dist.CollectiveTimeoutError, match=said):
                await group.recv(np.zeros(1_000_000), 0, 3, timeout=2)
            with pytest.raises(dist.CollectiveTimeoutError, match="no rank has sent a message of tag 3 for it"):
                await group.recv(np.zeros(1_000_000), None, 3, timeout=2)
            got = np.zeros(1)
            await group.recv(got, 0)
            assert got == 1
        await group.barrier()
        if isinstance(pair, dist.ProcessGroup):
            await pair.barrier()

    run_world(3, main)


def test_a_receive_that_expires_in_the_middle_of_its_message_ends_nothing_else() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            await group.isend(np.ones(10_000_000), 1)
            await group.isend(np.full(1, 2.0), 1)
        else:
            got = np.zeros(10_000_000)
            work = group.irecv(got, 0)
            while not got[0]:  # noqa: ASYNC110 - nobody tells how far it has come
                await asyncio.sleep(0)
            work._expire(0.1)  # as after that time
            with pytest.raises(dist.CollectiveTimeoutError) as late:
                await work
            assert late.value.missing == (0,)
            assert "only a part of a message of tag 0 has come from rank 0" in str(late.value)
            got[:] = 3
            after = np.zeros(1)
            await group.recv(after, 0)
            assert after == 2
            assert (got == 3).all()
        await group.barrier()

    run_world(2, main)


def test_a_send_to_oneself_that_expires_frees_its_array() -> None:
    async def main(group: Group) -> None:
        x = np.zeros(1_000_000)
        with pytest.raises(dist.CollectiveTimeoutError):
            await group.isend(x, 0, timeout=2)
        sent = group.isend(np.ones(1_000_000), 0)
        await group.recv(x, 0)
        assert (x == 1).all()
        await sent
        await group.barrier()

    run_world(1, main)
    run_world(2, lambda group: main(group) if group.rank == 0 else group.barrier())


def test_without_a_group_there_is_none() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.get_rank()

    async def main() -> None:
        with pytest.raises(ValueError, match="not been initialized"):
            dist.all_reduce(np.zeros(1))

    dist.run(main())


def test_a_world_cannot_be_initialized_twice_in_one_context() -> None:
    async def main(group: Group) -> None:
        with pytest.raises(ValueError, match="initialized already"):
            await dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    run_world(1, main)


async def test_several_worlds_of_one_process_and_who_finds_which() -> None:
    async def default_name() -> str:
        return dist.get_default_group().name

    def elsewhere() -> asyncio.Task[str]:
        return asyncio.get_running_loop().create_task(default_name(), context=contextvars.Context())

    store = dist.HashStore()
    async with dist.init_process_group(store=store, rank=0, world_size=1, group_name="one"):
        assert await elsewhere() == "one"
        async with dist.init_process_group(store=store, rank=0, world_size=1, group_name="two") as two:
            assert dist.get_default_group() is two
            with pytest.raises(ValueError, match="one, two"):
                await elsewhere()
            x = np.ones(1)
            await dist.all_reduce(x)
        assert dist.get_default_group().name == "one"
        assert await elsewhere() == "one"
    assert not dist.is_initialized()
    await store.close()
