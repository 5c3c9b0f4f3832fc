"""Which subscribers serve which version: for load balancers, and for programs that wait."""

from __future__ import annotations

import asyncio
import contextlib

from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import StoreTimeoutError
from asyncdist.store import Store
from asyncdist.weights.members import followed_values, values_of, view_of


async def ready(name: str, *, store: Store) -> dict[str, int]:
    """Return the version that each subscriber of the weights `name` serves, by its label; those without one left out.

    What it reads are plain keys, for load balancers that are not written in Python: `weights/NAME/ready/LABEL` is the
    number as text, and is there for as long as the subscriber lives. Raises DistStoreError.
    """
    view = view_of(store, name)
    return _versions(await values_of(view, await view.list_keys("ready/")))


async def wait_ready(
    name: str, version: int, *, count: int = 1, store: Store, timeout: Timeout = INHERIT
) -> dict[str, int]:
    """Wait until `count` subscribers serve `version` or a higher one; return them as `ready` does.

    `timeout` is in seconds, by default the store's. StoreTimeoutError says how many there are. May be cancelled.
    """
    view = view_of(store, name)
    found: dict[str, int] = {}
    try:
        async with asyncio.timeout(timeout_seconds(timeout, store.timeout)):
            async with contextlib.aclosing(followed_values(view, "ready/", bytes)) as every:
                async for values in every:
                    found = {one: number for one, number in _versions(values).items() if number >= version}
                    if len(found) >= count:
                        return found
        raise AssertionError("the store's changes have no end")
    except TimeoutError as error:
        if isinstance(error, StoreTimeoutError):
            raise
        text = f"weights '{name}': {len(found)} of {count} subscribers serve version {version} or a higher one"
        raise StoreTimeoutError(text, [f"weights/{name}/ready/"]) from error


def _versions(values: dict[str, bytes]) -> dict[str, int]:
    return {key.removeprefix("ready/"): int(value) for key, value in values.items()}
