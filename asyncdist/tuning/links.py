"""What messages between hosts cost: measured by two ranks of a world that has several, as only such a world can."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from asyncdist.group.process_group import ProcessGroup
from asyncdist.plan.cost.constants import Link

__all__ = ["measure_link"]

LATENCY_SHARE: Final = 0.3
"""Of the time, for messages without bytes."""

TRIPS_MAX: Final = 1000
"""Round trips after which the median is known well enough."""

FIRST_BYTES: Final = 64 << 10
MAX_BYTES: Final = 64 << 20
"""Bytes of the first and of the longest message. In between each is twice as long as the one before, until one takes
STREAM_SHARE of the time: by then TCP has found out what the link takes."""

STREAM_SHARE: Final = 0.1

FEWEST: Final = 3
"""Samples that are taken however slow a link is."""

_END: Final = -1


async def measure_link(
    group: ProcessGroup,
    budget_s: float,
    report: Callable[[str, float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Measure the link between the two ranks of `group` in about `budget_s`; both return the same.

    `report(phase, share done)` is called as it proceeds. A message's latency is half a median round trip, seconds per
    byte are those of the longest message, less a round trip. Raises what a message does; cancelling leaves the other
    rank waiting.
    """
    found = np.zeros(2)
    if group.rank == 0:
        found[:] = await _ask(group, budget_s, report, clock)
        await group.send(found, 1)
    else:
        await _answer(group)
        await group.recv(found, 0)
    alpha_s, beta_s = map(float, found)
    return Link(alpha_s, beta_s)


async def _ask(
    group: ProcessGroup, budget_s: float, report: Callable[[str, float], None], clock: Callable[[], float]
) -> tuple[float, float]:
    answer = np.empty(1, np.int64)

    async def trip(payload: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
        began_s = clock()
        await group.send(np.array([payload.size], np.int64), 1)
        if payload.size:
            await group.send(payload, 1)
        await group.recv(answer, 1)
        return clock() - began_s

    nothing = np.empty(0, np.uint8)
    await trip(nothing)  # connects
    trips: list[float] = []
    began_s = clock()
    while len(trips) < FEWEST or (len(trips) < TRIPS_MAX and clock() - began_s < LATENCY_SHARE * budget_s):
        trips.append(await trip(nothing))
        report("latency", min(1.0, (clock() - began_s) / budget_s))
    round_trip_s = statistics.median(trips)
    payload = np.ones(FIRST_BYTES, np.uint8)
    while await trip(payload) < STREAM_SHARE * budget_s and payload.size < MAX_BYTES:
        payload = np.ones(2 * payload.size, np.uint8)
    streams: list[float] = []
    while len(streams) < FEWEST or clock() - began_s < budget_s:
        streams.append(await trip(payload))
        report("bandwidth", min(1.0, (clock() - began_s) / budget_s))
    await group.send(np.array([_END], np.int64), 1)
    stream_s = statistics.median(streams)
    return round_trip_s / 2, max(stream_s - round_trip_s, stream_s / 2) / payload.size


async def _answer(group: ProcessGroup) -> None:
    number, payload = np.empty(1, np.int64), np.empty(0, np.uint8)
    while True:
        await group.recv(number, 0)
        size = int(number[0])
        if size == _END:
            return
        if size:
            if payload.size != size:
                payload = np.empty(size, np.uint8)
            await group.recv(payload, 0)
        await group.send(number, 0)
