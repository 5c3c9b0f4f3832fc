"""The order between the caller's streams and ours: operations start after what was queued before the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from asyncdist.arrays.device import LEGACY_STREAM, DeviceArray
from asyncdist.collectives.arguments.call import Call
from asyncdist.cuda import Event, Runtime, Stream
from asyncdist.gpu.closing import close_all

__all__ = ["EventPool", "callers_stream", "devices_of_call", "ready_after", "ready_for"]


class EventPool:
    """Events that are used again and again, as making one costs about as much as recording it. From any thread."""

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
        """Give back events that nobody will ask about, nor have a stream wait for."""
        if self._closed:
            close_all(*events)
        else:
            for event in events:
                self._free[event.device].append(event)

    def close(self) -> None:
        """Close those that are here, and the others as they are given back."""
        self._closed = True
        for free in self._free:
            while free:
                close_all(free.pop())


def ready_after(runtime: Runtime, pool: EventPool, arrays: Sequence[DeviceArray]) -> tuple[Event, ...]:
    """Events, recorded now, on the streams that the arrays are written and read on.

    These are the calling thread's current stream of each GPU, and those that the arrays' producers name.
    """
    streams: dict[tuple[int, int], Stream] = {}
    current: dict[int, Stream] = {}
    for array in arrays:
        device = array.device
        if not array.ordered and device not in current:
            stream = current[device] = runtime.current_stream(device)
            streams[device, stream.handle or LEGACY_STREAM] = stream
        if array.stream is not None and (device, array.stream or LEGACY_STREAM) not in streams:
            handle = array.stream or LEGACY_STREAM
            streams[device, handle] = runtime.external_stream(handle, device)
    ready: list[Event] = []
    try:
        ready.extend(map(pool.recorded, streams.values()))
    except BaseException:
        pool.give(ready)
        raise
    return tuple(ready)


def ready_for(runtime: Runtime, pool: EventPool, call: Call) -> tuple[Event, ...]:
    """As `ready_after`, for all arrays of a call, its members' too."""
    if not call.members:  # without a detour: small operations count microseconds
        arrays: Any = (*call.inputs, *call.outputs)
        for array in arrays:
            if array.stream is not None:
                break
        else:
            assert call.device is not None
            return (pool.recorded(runtime.current_stream(call.device)),)
    return ready_after(runtime, pool, _arrays_of(call))


def _arrays_of(call: Call) -> list[DeviceArray]:
    found: list[Any] = [*call.inputs, *call.outputs]
    for member in call.members:
        found += _arrays_of(member)
    return found


def devices_of_call(call: Call) -> tuple[Any, ...]:
    """The GPUs of a call's arrays: one, but for the multi-device forms."""
    if not call.members:
        return (call.device,)
    return tuple(dict.fromkeys(member.device for member in call.members))


def callers_stream(runtime: Runtime, stream: Any, device: int) -> Stream:
    """A stream as a user names it: None (the current one), a handle, or cupy's, torch's or another library's stream.

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
