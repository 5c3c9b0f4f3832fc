"""The order between the caller's streams and ours.

Operations start after the work that was queued before the call: `ready_for`. Streams wait for an operation's end:
`Tail`. Each thread has a current stream of its own, so a call that crosses to another thread takes its stream along:
`carried`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from asyncdist.arrays.device import LEGACY_STREAM, DeviceArray, device_array
from asyncdist.collectives.arguments.call import Call
from asyncdist.cuda import Event, Runtime, Stream, provider
from asyncdist.gpu.threads import close_all
from asyncdist.work import Work


class EventPool:
    """Events that are used again: to make an event costs about as much as to record one. From any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._free: list[deque[Event]] = [deque() for _ in range(runtime.device_count())]
        self._closed = False

    def recorded(self, stream: Stream) -> Event:
        """An event, recorded on `stream` now."""
        try:
            event = self._free[stream.device].pop()
        except IndexError:
            event = self._runtime.new_event(stream.device)
        try:
            event.record(stream)
        except BaseException:
            self.give((event,))
            raise
        return event

    def give(self, events: Iterable[Event]) -> None:
        """Give back events that no stream waits for any more and nobody will ask."""
        if self._closed:
            close_all(*events)
        else:
            for event in events:
                self._free[event.device].append(event)

    def close(self) -> None:
        """Close the events that are here now, and the others when they are given back."""
        self._closed = True
        for free in self._free:
            while free:
                close_all(free.pop())


def ready_after(runtime: Runtime, pool: EventPool, arrays: Sequence[DeviceArray]) -> tuple[Event, ...]:
    """Events, recorded now on the streams that write and read the arrays.

    These are the calling thread's current stream of each GPU, and the streams that the arrays' producers name.
    """
    streams: dict[tuple[int, int], Stream] = {}
    current: dict[int, Stream] = {}
    for array in arrays:
        device = array.device
        if not array.ordered and device not in current:
            stream = current[device] = runtime.current_stream(device)
            streams[device, stream.handle or LEGACY_STREAM] = stream
        handle = array.stream or LEGACY_STREAM
        if array.stream is not None and (device, handle) not in streams:
            streams[device, handle] = runtime.external_stream(handle, device)
    ready: list[Event] = []
    try:
        ready.extend(map(pool.recorded, streams.values()))
    except BaseException:
        pool.give(ready)
        raise
    return tuple(ready)


def ready_for(runtime: Runtime, pool: EventPool, call: Call) -> tuple[Event, ...]:
    """As `ready_after`, for all arrays of a call and of its members."""
    if not call.members:  # without a detour: small operations count microseconds
        arrays: Any = (*call.inputs, *call.outputs)
        for array in arrays:
            if array.stream is not None:
                break
        else:
            assert call.device is not None
            return (pool.recorded(runtime.current_stream(call.device)),)
    return ready_after(runtime, pool, _arrays_of(call))


def _arrays_of(call: Call) -> list[Any]:
    return [*call.inputs, *call.outputs, *chain.from_iterable(map(_arrays_of, call.members))]


def devices_of_call(call: Call) -> tuple[Any, ...]:
    """The GPUs of a call's arrays: one, except in the multi-device forms."""
    if not call.members:
        return (call.device,)
    return tuple(dict.fromkeys(member.device for member in call.members))


def callers_stream(runtime: Runtime, stream: Any, device: int) -> Stream:
    """The stream that a user names: None (the current stream), a handle, or a stream of cupy, torch or others.

    Raises TypeError for anything else.
    """
    if stream is None:
        return runtime.current_stream(device)
    if isinstance(stream, Stream):
        return stream
    for attribute in ("cuda_stream", "ptr"):  # torch's and cupy's
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return runtime.external_stream(handle, device)
    if hasattr(stream, "__cuda_stream__"):
        return runtime.external_stream(int(stream.__cuda_stream__()[1]), device)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return runtime.external_stream(stream, device)
    raise TypeError(f"stream must be a CUDA stream of cupy or torch, or its handle, not {type(stream).__name__}")


class Tail:
    """Where an operation ends on the GPU, for streams that wait for it: see `Work.wait_stream`."""

    __slots__ = ("_callbacks", "_events", "_number", "_operation", "_runtime")

    def __init__(self, runtime: Runtime, operation: str, number: int | None = None) -> None:
        self._runtime = runtime
        self._operation = operation
        self._number = number
        self._events: Sequence[Event] = ()
        self._callbacks: tuple[Callable[[], object], ...] = ()

    def queued(self, events: Sequence[Event]) -> None:
        """The operation is on streams of the GPU; `events` are recorded after it."""
        self._events = events
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, ()
            for callback in callbacks:
                callback()

    def when_queued(self, callback: Callable[[], object]) -> None:
        """Call `callback` once `queued` was called; now, if it was."""
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
    """Tell the operation's `Tail`, if it has one, that all of the operation is on streams of the GPU now."""
    if isinstance(work.on_device, Tail):
        work.on_device.queued(events)


def carried(value: Any) -> Any:
    """`value`, or its stand-in for another thread. GPU arrays in lists are replaced too."""
    if value is None or isinstance(value, int | str | np.ndarray):
        return value
    if type(value) in (list, tuple):
        return [carried(one) for one in value] if value and not _is_plain(value[0]) else value
    array = device_array(value)
    if array is None:
        return value
    found = None if array.ordered else provider.find()
    if found is not None:
        array.stream, array.ordered = found.runtime.current_stream(array.device).handle or LEGACY_STREAM, True
    return array


def _is_plain(value: Any) -> bool:
    """Whether a list that begins with `value` holds no GPU arrays, and must stay the caller's list."""
    while type(value) in (list, tuple) and value:
        value = value[0]
    return (
        value is None or isinstance(value, int | float | str | bytes | dict | np.ndarray) or device_array(value) is None
    )
