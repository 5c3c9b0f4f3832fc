"""Tail: where an operation on GPU arrays ends on the GPU, for streams that are to wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.cuda import Event, Runtime
from asyncdist.gpu.streams import callers_stream
from asyncdist.work import Work

__all__ = ["Tail", "tail_of", "tell_queued"]


class Tail:
    """See `Work.wait_stream`."""

    __slots__ = ("_callbacks", "_events", "_number", "_operation", "_runtime")

    def __init__(self, runtime: Runtime, operation: str, number: int | None = None) -> None:
        self._runtime = runtime
        self._operation = operation
        self._number = number
        self._events: Sequence[Event] = ()
        self._callbacks: tuple[Callable[[], object], ...] = ()

    def queued(self, events: Sequence[Event]) -> None:
        """The operation is on the GPU's queues; `events` are recorded after it."""
        self._events = events
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, ()
            for callback in callbacks:
                callback()

    def when_queued(self, callback: Callable[[], object]) -> None:
        """Call it once `queued` was called; now, if it was."""
        if self._events:
            callback()
        else:
            self._callbacks = (*self._callbacks, callback)

    def wait(self, stream: Any) -> None:
        """Let `stream` wait for the operation."""
        if not self._events:
            number = "" if self._number is None else f" #{self._number}"
            raise asyncio.InvalidStateError(
                f"{self._operation}{number} is not queued on the GPU yet, so that no stream can wait for it: "
                "`await work.enqueued()` first"
            )
        for event in self._events:
            callers_stream(self._runtime, stream, event.device).wait_event(event)


def tail_of(work: Work[Any]) -> Tail:
    """The tail that the backend gave to `work`."""
    tail = work.on_device
    assert isinstance(tail, Tail), "every operation on GPU arrays has one"
    return tail


def tell_queued(work: Work[Any], *events: Event) -> None:
    """All of an operation is on the GPU's queues now, if anybody wants to know."""
    if isinstance(work.on_device, Tail):
        work.on_device.queued(events)
