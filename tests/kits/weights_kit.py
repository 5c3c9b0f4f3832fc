"""Publishers and subscribers of weights in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from asyncdist import Store, weights
from asyncdist.weights import peer

__all__ = ["Arrays", "joined", "model", "on_hosts", "serving", "version_of"]

Arrays = dict[str, np.ndarray[Any, Any]]


def model(version: float, elements: int = 100_000) -> Arrays:
    """Arrays of which every element is `version`."""
    return {"w": np.full((2, elements), version, np.float32), "b": np.full(3, version, np.float64)}


def version_of(arrays: Arrays) -> int:
    """The version that all elements are of."""
    values = {float(value) for array in arrays.values() for value in np.unique(array)}
    assert len(values) == 1, f"parts of versions {values}"
    return int(values.pop())


@contextlib.asynccontextmanager
async def serving(store: Store, into: Arrays, **options: Any) -> AsyncIterator[weights.Subscription]:
    """A subscriber to `policy` that takes every version."""
    async with weights.subscribe("policy", into=into, store=store, **options) as subscription:
        task = asyncio.create_task(_take_all(subscription))
        try:
            yield subscription
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _take_all(subscription: weights.Subscription) -> None:
    async for _version in subscription:
        pass


def on_hosts(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have the peers that come now be on these hosts, one after the other, and share no memory."""
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", "tcp")
    coming = iter(names)
    monkeypatch.setattr(peer, "host_id", lambda _directory: next(coming))


async def joined(store: Store, count: int) -> None:
    """Wait until so many peers are there, the publisher among them."""
    async with store.watch("weights/policy/members/") as watch:
        while len(await store.list_keys("weights/policy/members/")) < count:
            await anext(watch)
