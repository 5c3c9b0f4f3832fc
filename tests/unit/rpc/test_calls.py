"""Calls between ranks: values, errors, limits, and what does not keep to the rules."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
from rpc_kit import (
    LARGE,
    Group,
    echo,
    on_rank_0,
    seen,
)

import asyncdist as dist
from asyncdist import rpc
from asyncdist.arrays.objects import encode
from asyncdist.rpc.messages import CALL, HEAD, Keys
from asyncdist.rpc.registry import look_up
from asyncdist.testing import run_world
from asyncdist.transport.protocol.operations import SendOp
from asyncdist.work import Work


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_values_come_back_as_they_went(seed: int | None, rank: int) -> None:
    small, large = np.arange(10.0), np.arange(LARGE, dtype=np.uint8)
    strided = np.arange(2 * LARGE, dtype=np.int16).reshape(-1, 2)[:, 1]

    async def body(_group: Group) -> Any:
        return await rpc.call(rank, "echo", 1, (2, "x"), small, large, strided, key={"y": None, "z": large})

    values, named = on_rank_0(2, body, seed=seed)
    assert values[:2] == [1, (2, "x")]
    for sent, came in zip((small, large, strided), values[2:], strict=True):
        assert came.dtype == sent.dtype
        assert np.array_equal(came, sent)
        assert came.flags.writeable
    assert np.array_equal(named["key"]["z"], large)


def test_calls_are_issued_at_the_call_and_may_be_many() -> None:
    async def body(_group: Group) -> Any:
        works = [rpc.call(1, "sleep", 1.0 - number / 1000, number) for number in range(200)]
        return [await work for work in works]

    assert on_rank_0(2, body, max_calls=7) == list(range(200))


def test_no_more_calls_are_under_way_than_allowed() -> None:
    async def body(_group: Group) -> Any:
        works = [rpc.call(1, "sleep", 5.0) for _ in range(20)]
        await asyncio.sleep(1)
        assert seen["begun"] == 7
        assert rpc.statistics()["calls waiting"] == 13
        for work in works:
            await work

    on_rank_0(2, body, max_calls=7)


def test_a_caller_that_exceeds_the_limit_is_told() -> None:
    async def main(group: Group) -> None:
        async with rpc.serve(max_calls=5 if group.rank == 0 else 2):
            if group.rank == 0:
                works = [rpc.call(1, "sleep", 1.0) for _ in range(3)]
                with pytest.raises(dist.RemoteError, match="max_calls=2"):
                    await works[2]
                await works[0]

    run_world(2, main)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("fail", "KeyError", "'why'"),
        ("nowhere", "LookupError", "nothing is registered as 'nowhere'"),
        ("unsendable", "TypeError", "object"),
        ("fail_later", "UnprintableError", "its text raises ValueError"),
        ("count", "TypeError", "use rpc.stream"),
    ],
)
def test_errors_come_with_their_traceback(name: str, kind: str, text: str) -> None:
    async def body(_group: Group) -> None:
        arguments = {"fail": ["why"], "count": [3]}.get(name, [])
        with pytest.raises(dist.RemoteError, match=rf"rank 0, rpc '{name}' \(rank 1\): raised {kind}") as caught:
            await rpc.call(1, name, *arguments)
        assert (caught.value.rank, caught.value.kind) == (1, kind)
        assert text in str(caught.value)
        assert "Traceback (most recent call last)" in caught.value.traceback or not name.startswith("fail")
        if name == "fail":
            assert "raise KeyError(text)" in caught.value.traceback
            assert "serving.py" not in caught.value.traceback

    on_rank_0(2, body)


def test_wrong_calls_raise_here() -> None:
    async def body(_group: Group) -> None:
        with pytest.raises(TypeError, match="cannot be encoded"):
            rpc.call(1, "echo", object())
        with pytest.raises(ValueError, match="rank"):
            rpc.call(2, "echo")
        with pytest.raises(ValueError, match="timeout"):
            rpc.call(1, "echo", timeout=-1)
        with pytest.raises(RuntimeError, match="serves the group already"):
            async with rpc.serve():
                pass
        with ThreadPoolExecutor() as threads, pytest.raises(RuntimeError, match="another thread"):
            threads.submit(copy_context().run, rpc.call, 1, "echo").result()

    on_rank_0(2, body)


async def test_calls_need_a_server() -> None:
    async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1):
        with pytest.raises(RuntimeError, match=r"async with rpc.serve\(\)"):
            rpc.call(0, "echo")
        with pytest.raises(ValueError, match="max_calls"):
            async with rpc.serve(max_calls=0):
                pass


def test_names_are_taken_once() -> None:
    def other() -> None:
        pass

    with pytest.raises(ValueError, match="'echo' is registered already"):
        rpc.register("echo")(other)
    with pytest.raises(ValueError, match="'timeout'"):
        rpc.register(lambda timeout: timeout)
    with pytest.raises(LookupError):
        look_up("other")
    assert rpc.register("echo")(echo) is echo


@pytest.mark.parametrize(
    ("head", "payload"),
    [
        (b"", b""),
        (HEAD.pack(77, 1, 0), b""),
        (HEAD.pack(CALL, 1, 0), b"nonsense"),
        (HEAD.pack(CALL, 1, 0), bytes(encode([1, 2]))),
    ],
)
def test_nonsense_breaks_the_pair_and_nothing_else(head: bytes, payload: bytes) -> None:
    async def main(group: Group) -> Any:
        with contextlib.suppress(dist.PeerLostError):
            async with rpc.serve():
                await asyncio.sleep(1)
                if group.rank == 0:
                    keys = Keys(group.group_id, 0)
                    group.world.mesh.post_send(1, SendOp(keys.requests, memoryview(payload), head, Work, None))  # type: ignore[arg-type]
                    await asyncio.sleep(1)
                    with pytest.raises(dist.PeerLostError):
                        await rpc.call(1, "echo")
                elif group.rank == 2:
                    await asyncio.sleep(2)
                    return await rpc.call(1, "echo", "still")
        return None

    assert run_world(3, main)[2] == [["still"], {}]
