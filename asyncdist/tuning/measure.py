"""What the two processes of `asyncdist tune` measure, and what a message costs between two hosts of a world.

The processes run probes: plans of two ranks whose time is one constant of the cost model. Probes go through the same
runner, connection and frames as a collective, so that what is measured is what plans pay; only the call around it
(arguments, sequence numbers, the Work) is left out. `measure_link` needs a world that has several hosts.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from asyncdist.collectives.executor.buffers import NO_BUFFER, FlatBuffer
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import Execution, Resources
from asyncdist.group.process_group import ProcessGroup
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.cost.constants import Link
from asyncdist.plan.steps import Buffer, Plan, Slice
from asyncdist.transport.protocol.frame import key_prefix

__all__ = ["PROBE_WORLD", "Measured", "measure", "measure_link"]

SMALL_BYTES: Final = 8
"""Payload of a message whose existence is what costs."""

TRIPS: Final = 50
"""Round trips of one sample: 100 messages, a few milliseconds, so that starting and ending count for nothing."""

BURST: Final = 128
"""Small messages of one burst: as many as a connection may have under way on credit with room to spare."""

LARGE_BYTES: Final = 1 << 20
LARGE_MESSAGES: Final = 16
"""A large sample: 16 MiB, larger than any cache that matters, a few milliseconds."""

REDUCE_BYTES: Final = 1 << 20
REDUCE_VECTOR_BYTES: Final = 32 << 20
"""Reductions work on chunks of a vector that does not fit the cache, as those of large collectives do."""

LOOP_TURNS: Final = 1000

BATCH: Final = 8
"""Samples between two decisions whether to go on."""

MAX_SAMPLES: Final = 400


PROBE_WORLD: Final = 2

PROBE_TAG: Final = 1
"""Collectives of the tuning group, if any, have tag 0."""

PHASES: Final = ("latency", "overhead", "bandwidth", "both ways", "reduction", "loop")


class Measured(NamedTuple):
    """Medians, in seconds."""

    message_s: float
    """One small message, from one process to the other, both ends' work included."""
    overhead_s: float
    """One small message of a burst: what the busier end works for it."""
    byte_s: float
    """One byte of a large message, one way."""
    byte_cpu_s: float
    """Processor time of the busier end for that byte."""
    duplex_byte_s: float
    """One byte of a large message while as many come the other way."""
    reduced_byte_s: float
    """One byte of float32 reduced by numpy."""
    loop_turn_s: float
    """One turn of the event loop with nothing but itself to do."""


async def measure(group: ProcessGroup, budget_s: float, report: Callable[[str, float], None]) -> Measured:
    """Measure on a group of two; takes about `budget_s`. `report(phase, share done)` is called as it proceeds.

    Both ranks return the same. Cancelling leaves the group unusable.
    """
    bench = _Bench(group, budget_s / len(PHASES), report)
    await bench.meet()
    messages, _ = await bench.samples("latency", lambda rank: ping_pong(rank, TRIPS, SMALL_BYTES))
    bursts, _ = await bench.samples("overhead", lambda rank: one_way(rank, BURST, SMALL_BYTES))
    streams, cpu = await bench.samples("bandwidth", lambda rank: one_way(rank, LARGE_MESSAGES, LARGE_BYTES))
    duplex, _ = await bench.samples("both ways", lambda rank: both_ways(rank, LARGE_MESSAGES, LARGE_BYTES))
    large = LARGE_MESSAGES * LARGE_BYTES
    mine = [
        statistics.median(messages) / (2 * TRIPS),
        statistics.median(bursts) / BURST,
        statistics.median(streams) / large,
        statistics.median(cpu) / large,
        statistics.median(duplex) / large,
        bench.local("reduction", _reductions()) / REDUCE_BYTES,
        bench.local("loop", [await _loop_turns() for _ in range(BATCH)]) / LOOP_TURNS,
    ]
    values = np.array(mine)
    await bench.slowest(values)
    return Measured(*map(float, values))


class _Bench:
    """Runs probes of both ranks in step, for as long as rank 0 says."""

    def __init__(self, group: ProcessGroup, phase_s: float, report: Callable[[str, float], None]) -> None:
        self._group = group
        self._phase_s = phase_s
        self._report = report
        self._number = 0
        large = np.ones(LARGE_MESSAGES * LARGE_BYTES, np.uint8)
        self._source = FlatBuffer(large)
        self._target = FlatBuffer(large.copy())

    async def meet(self) -> None:
        """Connect, and warm up."""
        await self._group.barrier()

    async def samples(self, phase: str, plan: Callable[[int], Plan]) -> tuple[list[float], list[float]]:
        """Seconds, and seconds of this process's time, of each run."""
        program = Program(plan(self._group.rank))
        taken: list[float] = []
        worked: list[float] = []
        began = time.perf_counter()
        go_on = True
        while go_on:
            for _ in range(BATCH):
                await self._group.barrier()
                worked_before, before = time.process_time(), time.perf_counter()
                await Probe(self._group, program, self._number, self._source, self._target).run()
                taken.append(time.perf_counter() - before)
                worked.append(time.process_time() - worked_before)
                self._number += 1
            share = max((time.perf_counter() - began) / self._phase_s, len(taken) / MAX_SAMPLES)
            self._report(phase, min(share, 1.0))
            go_on = await self._decide(share < 1)
        return taken[BATCH // 2 :], worked[BATCH // 2 :]  # the first runs warm up

    def local(self, phase: str, durations: Iterator[float] | list[float]) -> float:
        """The median of what needs no other rank."""
        began = time.perf_counter()
        taken = []
        for duration in durations:
            taken.append(duration)
            share = (time.perf_counter() - began) / self._phase_s
            if share >= 1 or len(taken) >= MAX_SAMPLES:
                break
        self._report(phase, 1.0)
        return statistics.median(taken)

    async def slowest(self, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        """Replace each value by the greater of the two ranks'."""
        other = np.empty_like(values)
        sent, received = self._group.isend(values, 1 - self._group.rank), self._group.irecv(other, 1 - self._group.rank)
        await received
        await sent
        np.maximum(values, other, out=values)

    async def _decide(self, go_on: bool) -> bool:
        flag = np.array([go_on], np.uint8)
        await self._group.broadcast(flag, 0)
        return bool(flag[0])


def _reductions() -> Iterator[float]:
    """Seconds of each reduction of a chunk, through two vectors and again: neither operand is in the cache."""
    vector = np.ones(REDUCE_VECTOR_BYTES // 4, np.float32)
    incoming = np.zeros_like(vector)
    step = REDUCE_BYTES // 4
    while True:
        for start in range(0, vector.size, step):
            target, operand = vector[start : start + step], incoming[start : start + step]
            before = time.perf_counter()
            np.add(operand, target, out=target)
            yield time.perf_counter() - before


async def _loop_turns() -> float:
    before = time.perf_counter()
    for _ in range(LOOP_TURNS):
        await asyncio.sleep(0)
    return time.perf_counter() - before


def ping_pong(rank: int, trips: int, nbytes: int) -> Plan:
    """A message to and fro, `trips` times: 2 x trips messages, each sent when the one before has arrived."""
    builder = PlanBuilder("barrier", "ping_pong", rank, PROBE_WORLD)
    piece = Slice(Buffer.INPUT, 0, nbytes)
    arrived: int | None = None
    for trip in range(trips):
        target = Slice(Buffer.OUTPUT, trip * nbytes, nbytes)
        if rank == 0:
            builder.send(1, piece, after=(arrived,))
            arrived = builder.recv(1, target)
        else:
            arrived = builder.recv(0, target)
            builder.send(0, piece, after=(arrived,))
    return builder.build()


def one_way(rank: int, messages: int, nbytes: int) -> Plan:
    """`messages` messages from rank 0 to rank 1, as many at a time as the connection takes, and a signal back."""
    builder = PlanBuilder("barrier", "one_way", rank, PROBE_WORLD)
    if rank == 0:
        for number in range(messages):
            builder.send(1, Slice(Buffer.INPUT, number * nbytes, nbytes))
        builder.await_signal(1)
    else:
        arrived = [builder.recv(0, Slice(Buffer.OUTPUT, number * nbytes, nbytes)) for number in range(messages)]
        builder.signal(0, after=arrived)
    return builder.build()


def both_ways(rank: int, messages: int, nbytes: int) -> Plan:
    """The same in both directions at once, without a signal."""
    builder = PlanBuilder("barrier", "both_ways", rank, PROBE_WORLD)
    for number in range(messages):
        builder.send(1 - rank, Slice(Buffer.INPUT, number * nbytes, nbytes))
        builder.recv(1 - rank, Slice(Buffer.OUTPUT, number * nbytes, nbytes))
    return builder.build()


class Probe(Execution):
    """One run of a compiled probe on `group`, of two ranks. Make it, then await `run`."""

    __slots__ = ("_done",)

    def __init__(
        self, group: ProcessGroup, program: Program, number: int, source: FlatBuffer, target: FlatBuffer
    ) -> None:
        world = group.world
        self._done: asyncio.Future[None] = world.loop.create_future()
        peers = [None if rank == group.rank else world.mesh.peer(group.ranks[rank]) for rank in range(PROBE_WORLD)]
        resources = Resources(world.loop, peers, world.pool)
        super().__init__(
            resources, program, (source, target, NO_BUFFER), key_prefix(group.group_id, PROBE_TAG, number), 0
        )

    def ended(self, error: BaseException | None) -> None:
        if not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    async def run(self) -> None:
        """Start and wait for the end; raises what a message failed with. Cancelling leaves the group unusable."""
        self.start()
        await self._done


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
