"""Commits: staged by all, then served by all at once, or by none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from asyncdist import HashStore, weights


@contextlib.asynccontextmanager
async def serving(store, into, **options) -> AsyncIterator[weights.Subscription]:
    """A subscriber whose background work goes on."""
    async with weights.subscribe("policy", into=into, store=store, **options) as subscription:
        task = asyncio.create_task(_drain(subscription))
        try:
            yield subscription
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _drain(subscription):
    async for _version in subscription:
        pass


def model(value: float, elements: int = 200_000):
    return {"w": np.full((2, elements), value, np.float32), "b": np.full(3, value, np.float64)}


async def test_all_subscribers_serve_what_is_committed():
    served = [{}, {}, {}]
    async with HashStore() as store, contextlib.AsyncExitStack() as stack:
        for number, into in enumerate(served):
            await stack.enter_async_context(serving(store.clone(), into, label=f"s{number}"))
        async with weights.publish("policy", store=store) as publisher:
            for version in (1, 2, 3, 4):
                await publisher.commit(version, model(version))
                assert await weights.wait_ready("policy", version, count=3, store=store, timeout=10) == {
                    f"s{number}": version for number in range(3)
                }
                for into in served:
                    assert (into["w"] == version).all()
                    assert (into["b"] == version).all()
                    assert into["w"].shape == (2, 200_000)
            assert publisher.bytes_given == 0
