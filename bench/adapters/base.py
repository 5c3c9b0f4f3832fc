"""The interface between the measuring loop and the libraries it measures.

An adapter prepares an operation outside the timed part (views, tensors, argument lists) and hands out a function
without arguments, so that all libraries are timed by the same lines. A blocking library's function returns None when
it is done; an awaitable library's returns what is to be awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cases import RankContext
from bench.operations import Buffers
from bench.verify import Array

Start = Callable[[], Any]
"""Start an operation; return an awaitable, or None when it is done."""


class Adapter:
    """One rank of one library; a subclass overrides what its library offers."""

    in_place = True
    """Whether reductions and broadcasts work on one array, as a user of this library would call them."""
    verifies = True
    """Whether the results mean anything (raw copies have none)."""
    wait: Callable[[Any], object] | None = None
    """Wait for a handle of `send` or `receive`; None where handles are awaited."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.rank = context.rank
        self.size = context.world_size
        self._sub_worlds: list[Callable[[Any], Any]] = []

    async def open(self) -> None:
        """Join the world."""

    async def close(self) -> None:
        """Leave it."""

    def allocate(self, elements: int) -> Array:
        """Return an array of float32 that the library likes best."""
        return np.empty(elements, np.float32)

    def barrier(self) -> Any:
        """Enter a barrier; an awaitable, or None when it is over."""
        raise NotImplementedError

    async def pass_barrier(self) -> None:
        """Enter a barrier and wait for its end, outside the timed part."""
        work = self.barrier()
        if work is not None:
            await work

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        """Return the function that starts ``operation`` on ``buffers`` once."""
        raise NotImplementedError

    def message(self, array: Array) -> Any:
        """Return what `send` and `receive` take in place of ``array``."""
        return array

    def send(self, array: Any, peer: int) -> Any:
        """Send what `message` made; a handle for `wait`, or None when the array may be reused."""
        raise NotImplementedError

    def receive(self, array: Any, peer: int) -> Any:
        """Post a receive into what `message` made; a handle for `wait`."""
        raise NotImplementedError

    def objects(self, operation: str) -> Callable[[Any], Any]:
        """Return the function that carries out ``operation`` on this rank's object (to scatter: on the root's list, and
        on anything elsewhere) and returns the list of objects it gets, or an awaitable of it.
        """
        raise NotImplementedError

    def issue(self, array: Any) -> Any:
        """Start an all_reduce of what `message` made without waiting; a handle for `wait`."""
        raise NotImplementedError

    def sub_worlds(self, count: int) -> list[Callable[[Any], Any]]:
        """Return `issue` for each of so many groups of all ranks, made when they are first asked for."""
        while len(self._sub_worlds) < count:
            self._sub_worlds.append(self.new_world())
        return self._sub_worlds[:count]

    def new_world(self) -> Callable[[Any], Any]:
        """Make another group of all ranks and return its `issue`."""
        raise NotImplementedError
