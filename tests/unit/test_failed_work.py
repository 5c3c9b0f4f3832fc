"""A failed Work, awaited by several tasks and again and again: each gets an exception with a history of its own."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from typing import Any

import numpy as np
import pytest

from asyncdist.errors import CollectiveTimeoutError, PeerLostError
from asyncdist.work import Work


def failed() -> Work[Any]:
    work: Work[Any] = Work(asyncio.get_running_loop(), "all_reduce")
    error = PeerLostError("rank 3 is gone", 3)
    error.__cause__ = ConnectionResetError("reset")
    work._fail(error)
    return work


async def asked(work: Work[Any], how: str) -> Any:
    if how == "result":
        return work.result()
    return await (work if how == "await" else work.wait(timeout=1))


async def test_every_waiter_gets_an_exception_of_its_own() -> None:
    work: Work[Any] = Work(asyncio.get_running_loop(), "all_reduce")

    async def first() -> None:
        await work

    async def second() -> None:
        await work

    waiting = asyncio.gather(first(), second(), return_exceptions=True)
    await asyncio.sleep(0)
    work._fail(CollectiveTimeoutError("late", [1, 2]))
    errors = await waiting
    for error, own, other in zip(errors, (first, second), (second, first), strict=True):
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1, 2)
        functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        assert own.__name__ in functions
        assert other.__name__ not in functions
    assert errors[0] is not errors[1]


@pytest.mark.parametrize("ask", ["await", "result", "wait"])
async def test_a_traceback_does_not_grow(ask: str) -> None:
    work, lengths = failed(), set()
    for _ in range(5):
        with pytest.raises(PeerLostError) as caught:
            await asked(work, ask)
        assert caught.value.rank == 3
        assert isinstance(caught.value.__cause__, ConnectionResetError)
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1


async def test_who_was_told_keeps_nothing_of_what_the_others_had() -> None:
    work = failed()

    async def waiting() -> weakref.ref[np.ndarray[Any, Any]]:
        array = np.zeros(10)
        with pytest.raises(PeerLostError):
            await work
        return weakref.ref(array)

    array = await waiting()
    gc.collect()
    assert array() is None
    assert isinstance(work.exception(), PeerLostError)
