"""What an operation is made of, each part measured by itself: the interpreter's steps, hand-overs, copies of memory.

Parts of the machine are measured with two or more bare processes, forked and bound to cores; the interpreter's with two
ranks in this process, which carry out one all_reduce of 4 bytes after the other without ever waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import numpy as np
import uvloop

import asyncdist as dist
from asyncdist.transport.shared_memory.process_memory import OwnMemory, ProcessMemory

WARMUP: Final = 200
WORD: Final = struct.Struct("<Q")
LINES: Final = (0, 64)
"""Where either side's word is: in cache lines of their own."""
TIMEOUT_S: Final = 60.0
PASSES: Final = 10

CHUNK_BYTES: Final = 256 << 10
READ_BYTES: Final = 512 << 10

Samples = list[float]
Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
Pass: TypeAlias = Callable[[], object]
MakePass: TypeAlias = Callable[[int], Pass]
"""make(nbytes): what takes so many bytes somewhere."""


# The machine's parts.


def flags(rounds: int) -> Samples:
    """Half a round trip of two processes on two cores that write and read words of shared memory in Python."""
    return _ping_pong(rounds, (0, 1), _do_nothing)


def hand_overs(rounds: int) -> Samples:
    """The same on one core, where each gives the core away until it sees the other's word."""
    return _ping_pong(rounds, (0, 0), os.sched_yield)


def wake_ups(rounds: int, cores: tuple[int, int]) -> Samples:
    """Half a round trip of two event loops (uvloop) that sleep until their eventfd is written."""
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in cores]

    def side(index: int) -> Samples:
        return uvloop.run(_rung(bells[index], bells[1 - index], rounds, first=index == 0))

    try:
        return _halves(_together([lambda: side(0), lambda: side(1)], cores)[0])
    finally:
        for bell in bells:
            os.close(bell)


def passes(rounds: int, processes: int, nbytes: int, make: MakePass) -> Samples:
    """Seconds in which each of several processes takes its `nbytes` somewhere once: all share memory.

    One sample: from the first that begins `PASSES` such passes to the last that ends, divided by their number.
    """
    cores = os.cpu_count() or 1

    def one() -> Samples:
        once = make(nbytes)
        began_s = 0.0
        for number in range(1 + PASSES):
            if number == 1:
                began_s = time.monotonic()
            once()
        return [began_s, time.monotonic()]

    found = []
    for _ in range(rounds):
        spans = _together([one] * processes, [rank % cores for rank in range(processes)])
        found.append((max(ended for _, ended in spans) - min(began for began, _ in spans)) / PASSES)
    return found


def copying(nbytes: int) -> Pass:
    """From one array to another."""
    source, target = _two_arrays(nbytes)
    return lambda: np.copyto(target, source)


def adding(nbytes: int) -> Pass:
    """To another array."""
    source, target = _two_arrays(nbytes)
    return lambda: np.add(target, source, out=target)


def copying_twice(nbytes: int) -> Pass:
    """In and out of `CHUNK_BYTES` that stay in the cache, as through shared memory."""
    source, target = _two_arrays(nbytes)
    room = np.ones(CHUNK_BYTES // 4, np.float32)

    def once() -> None:
        for start in range(0, source.size, room.size):
            part = source[start : start + room.size]
            room[: part.size] = part
            target[start : start + room.size] = room[: part.size]

    return once


def reading_a_process(nbytes: int) -> Pass:
    """As from another process, without a copy of its own. Raises OSError where the system does not let us."""
    source, target = _two_arrays(nbytes)
    own = _Own()
    length = READ_BYTES // source.itemsize

    def once() -> None:
        for start in range(0, source.size, length):
            own.read(source[start:].ctypes.data, target[start:].ctypes.data, target[start : start + length].nbytes)

    return once


def reading_and_adding(nbytes: int) -> Pass:
    """The same into a buffer that stays in the cache, and from there added to an array."""
    source, target = _two_arrays(nbytes)
    own = _Own()
    room = np.ones(READ_BYTES // 4, np.float32)

    def once() -> None:
        for start in range(0, source.size, room.size):
            part = target[start : start + room.size]
            own.read(source[start:].ctypes.data, room.ctypes.data, part.nbytes)
            np.add(part, room[: part.size], out=part)

    return once


class _Own:
    """This process, as another would read it."""

    def __init__(self) -> None:
        self._memory = OwnMemory()  # whose token has to stay
        self.read = ProcessMemory(os.getpid(), self._memory.token).read


def _two_arrays(nbytes: int) -> tuple[Array, Array]:
    return np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)


def _do_nothing() -> None:
    """Look again at once."""


def _ping_pong(rounds: int, cores: tuple[int, int], between: Callable[[], object]) -> Samples:
    page = mmap.mmap(-1, mmap.PAGESIZE)

    def side(index: int) -> Samples:
        own, other = LINES[index], LINES[1 - index]
        found = []
        for number in range(1, WARMUP + rounds + 1):
            began_s = time.perf_counter()
            if index == 0:
                WORD.pack_into(page, own, number)
            while WORD.unpack_from(page, other)[0] < number:
                between()
            if index == 1:
                WORD.pack_into(page, own, number)
            found.append(time.perf_counter() - began_s)
        return found[WARMUP:]

    try:
        return _halves(_together([lambda: side(0), lambda: side(1)], cores)[0])
    finally:
        page.close()


async def _rung(own: int, other: int, rounds: int, *, first: bool) -> Samples:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    found: Samples = []
    began_s = time.perf_counter()

    def rung() -> None:
        nonlocal began_s
        os.eventfd_read(own)
        now_s = time.perf_counter()
        found.append(now_s - began_s)
        began_s = now_s
        if len(found) == WARMUP + rounds:
            done.set_result(None)
            if first:
                return
        os.eventfd_write(other, 1)

    loop.add_reader(own, rung)
    if first:
        os.eventfd_write(other, 1)
    await asyncio.wait_for(done, TIMEOUT_S)
    loop.remove_reader(own)
    return found[WARMUP:]


def _halves(samples: Samples) -> Samples:
    return [sample / 2 for sample in samples]


def _together(work: Sequence[Callable[[], Samples]], cores: Sequence[int]) -> list[Samples]:
    """Run each in a process of its own, bound to a core, all at the same time; return their samples."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(len(work))

    def run(one: Callable[[], Samples], core: int, answer: Connection) -> None:
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})
        gate.wait(TIMEOUT_S)
        answer.send(one())

    children, answers = [], []
    for one, core in zip(work, cores, strict=True):
        answer, end = context.Pipe(duplex=False)
        child = context.Process(target=run, args=(one, core, end), daemon=True)
        child.start()
        end.close()
        children.append(child)
        answers.append(answer)
    try:
        return [_receive(answer) for answer in answers]
    finally:
        for child in children:
            child.kill()
            child.join()


def _receive(answer: Connection) -> Samples:
    if not answer.poll(TIMEOUT_S):
        raise TimeoutError(f"a part was not measured within {TIMEOUT_S:g} s")
    with contextlib.closing(answer):
        samples: Samples = answer.recv()
    return samples


# The interpreter's parts.

PARTS: Final = ("call", "last", "finish", "await")


def interpreter(rounds: int, ranks: int) -> dict[str, Samples]:
    """Parts of an all_reduce of 4 bytes through shared memory, without the waiting.

    `call`: the call of a rank that is not the last, up to its return; `last`: the call of the last, which ends in it;
    `finish`: the look of another that finds all there; `await`: awaiting what is done.
    """
    return uvloop.run(_all_in_one(rounds, ranks, _do_nothing))


def interpreter_on_a_shared_core(rounds: int, ranks: int) -> dict[str, Samples]:
    """The same beside another process that does it too, on the same core: it changes hands before each part."""

    def one() -> Samples:
        found = uvloop.run(_all_in_one(rounds, ranks, os.sched_yield))
        return [sample for name in PARTS for sample in found[name]]

    samples = _together([one, one], (0, 0))[0]
    return {name: samples[rounds * index : rounds * (index + 1)] for index, name in enumerate(PARTS)}


async def _all_in_one(rounds: int, ranks: int, between: Callable[[], object]) -> dict[str, Samples]:
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroup] = {}
    found: dict[str, Samples] = {}
    ready, done = asyncio.Barrier(ranks), asyncio.Barrier(ranks)

    async def rank(number: int) -> None:
        async with dist.init_process_group(
            store=store.clone(), rank=number, world_size=ranks, timeout=TIMEOUT_S
        ) as own:
            groups[number] = own
            await own.all_reduce(np.zeros(1, np.float32))
            await ready.wait()
            if number == 0:
                found.update(await _timed([groups[other] for other in range(ranks)], rounds, between))
            await done.wait()

    # Each rank in a context of its own, which knows one default group.
    await asyncio.gather(*[_in_context(rank(number)) for number in range(ranks)])
    return found


def _in_context(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(coroutine, context=Context())


async def _timed(groups: Sequence[dist.ProcessGroup], rounds: int, between: Callable[[], object]) -> dict[str, Samples]:
    arrays = [np.zeros(1, np.float32) for _ in groups]
    bells = [group.world.mesh.memory.doorbell for group in groups if group.world.mesh.memory is not None]
    if len(bells) != len(groups):
        raise RuntimeError("the ranks of this process do not share memory")
    found: dict[str, Samples] = {name: [] for name in PARTS}
    for number in range(WARMUP + rounds):
        for bell in bells:
            bell.stay_awake()  # as a rank is that looks by itself
        works, spans = [], []
        for group, array in zip(groups, arrays, strict=True):
            between()
            began_s = time.perf_counter()
            works.append(group.all_reduce(array))
            spans.append(time.perf_counter() - began_s)
        between()
        began_s = time.perf_counter()
        bells[0].poll()
        polled_s = time.perf_counter()
        for bell in bells[1:]:
            bell.poll()
        if not all(work.done() for work in works):
            raise RuntimeError("an all_reduce whose ranks are all here did not end")
        awaiting_s = time.perf_counter()
        await works[0]
        awaited_s = time.perf_counter()
        if number >= WARMUP:
            for name, span_s in zip(
                PARTS, (spans[0], spans[-1], polled_s - began_s, awaited_s - awaiting_s), strict=True
            ):
                found[name].append(span_s)
    return found
