"""``python -m bench.anatomy``: what small and large all_reduces through shared memory are made of.

The parts are measured by themselves: those of the machine by bare forked processes bound to cores, the interpreter's
by ranks in one process that never wait. They are added up for some all_reduces, which are measured beside them. So the
tables show what the sum leaves out, and why a figure is not lower than the sum. ``--write`` puts the tables into
docs/benchmarks/anatomy.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import statistics
import struct
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import click
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

import asyncdist as dist
from asyncdist.transport.shared_memory.process_memory import OwnMemory, ProcessMemory
from bench.candidates import ASYNCDIST_DOORBELL, TRANSPORTS
from bench.machine import about
from bench.model import PROMISES, SMOKE, Case, Cell, Profile, Subject, format_bytes, percentile
from bench.report import markdown_table
from bench.runner import run_subject

WARMUP: Final = 200
WORD: Final = struct.Struct("<Q")
LINES: Final = (0, 64)
"""Where either side's word is: in cache lines of their own."""
TIMEOUT_S: Final = 60.0
PASSES_IN_SAMPLE: Final = 10

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


def time_passes(rounds: int, processes: int, nbytes: int, make: MakePass) -> Samples:
    """Seconds in which each of several processes takes its `nbytes` somewhere once: all share memory.

    One sample: from the first that begins `PASSES_IN_SAMPLE` passes to the last that ends, divided by their number.
    """
    cores = os.cpu_count() or 1

    def one() -> Samples:
        once = make(nbytes)
        began_s = 0.0
        for number in range(1 + PASSES_IN_SAMPLE):
            if number == 1:
                began_s = time.monotonic()
            once()
        return [began_s, time.monotonic()]

    found = []
    for _ in range(rounds):
        spans = _together([one] * processes, [rank % cores for rank in range(processes)])
        found.append((max(ended for _, ended in spans) - min(began for began, _ in spans)) / PASSES_IN_SAMPLE)
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


PATH: Final = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "anatomy.md"
ROUNDS: Final = 3000
PASSES: Final = 5
RANKS: Final = (2, 4)
SPINNING, SLEEPING = TRANSPORTS["shm"].name, ASYNCDIST_DOORBELL.name
BESIDE: Final = "beside another process"
LARGE: Final = 64 << 20
READ: Final = "read as another process's by process_vm_readv"
READ_AND_ADDED: Final = "read like that and added to an array, 512 KiB at a time"
WAYS: Final = {
    "copied": copying,
    "added to another array": adding,
    "copied in and out of 256 KiB in the cache": copying_twice,
    READ: reading_a_process,
    READ_AND_ADDED: reading_and_adding,
}
PARTS_HEADER: Final = ("part", "min", "p50", "p99")
SUMS_HEADER: Final = ("all_reduce", "parts", "sum", "measured p50")


class Row(NamedTuple):
    """An all_reduce and what it is made of."""

    nbytes: int
    ranks: int
    candidate: str
    formula: str
    sum_s: float


@click.command()
@click.option("--write", is_flag=True, help="Write docs/benchmarks/anatomy.md.")
@click.option("--profile", type=click.Choice([PROMISES.name, SMOKE.name]), default=PROMISES.name, show_default=True)
def main(write: bool, profile: str) -> None:
    """Measure the parts of an all_reduce, add them up, and measure the whole."""
    machine = about()
    smoke = profile == SMOKE.name
    found = measure_parts(50 if smoke else ROUNDS, 1 if smoke else PASSES, LARGE >> (6 if smoke else 0))
    rows = sums({name: statistics.median(samples) for name, samples in found.items()})
    cells = measure_wholes(SMOKE if smoke else PROMISES)
    tables = (PARTS_HEADER, _part_rows(found)), (SUMS_HEADER, _sum_rows(rows, cells))
    console = Console()
    for header, lines in tables:
        table = Table(*header)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for cell in cells:
        for measurement in cell.measurements.values():
            if measurement.failure is not None or measurement.wrong:
                raise SystemExit(f"{cell.case.label}, {cell.ranks} ranks: {measurement.failure or 'wrong results'}")
    if write:
        PATH.write_text(_document(machine, *[markdown_table(header, lines) for header, lines in tables]))


def measure_parts(rounds: int, passes: int, nbytes: int) -> dict[str, list[float]]:
    """Return the samples of each part in seconds, by its name; copies and additions as seconds for `LARGE` bytes."""
    found = {
        "a word seen by the other core": flags(rounds),
        "the core given to another process": hand_overs(rounds),
        "woken by an eventfd, on another core": wake_ups(rounds, (0, 1)),
        "woken by an eventfd, on the same core": wake_ups(rounds, (0, 0)),
    }
    for ranks in RANKS:
        for name, samples in interpreter(rounds, ranks).items():
            found[_python(name, ranks)] = samples
    for name, samples in interpreter_on_a_shared_core(rounds, RANKS[-1]).items():
        found[f"{_python(name, RANKS[-1])}, {BESIDE}"] = samples
    for processes in (1, *RANKS):
        for what, make in WAYS.items():
            samples = time_passes(passes, processes, nbytes, make)
            found[_pass(processes, what)] = [sample * LARGE / nbytes for sample in samples]
    return found


def sums(parts_s: Mapping[str, float]) -> list[Row]:
    """Return the all_reduces that are measured, with what their parts add up to."""
    two, four = ({name: parts_s[_python(name, ranks)] for name in PARTS} for ranks in RANKS)
    word, hand_over = parts_s["a word seen by the other core"], parts_s["the core given to another process"]
    woken = parts_s["woken by an eventfd, on another core"]
    told = two["finish"] + two["await"]
    reads, additions = ({ranks: parts_s[_pass(ranks, what)] for ranks in RANKS} for what in (READ, READ_AND_ADDED))
    return [
        Row(4, 2, SPINNING, "call, word, finish, await", two["call"] + word + told),
        Row(
            4,
            2,
            SLEEPING,
            "woken from the barrier, finish, await; call, woken, finish, await",
            two["call"] + 2 * (woken + told),
        ),
        Row(
            4,
            4,
            SPINNING,
            "call, finish and await of the two ranks of a core, two hand-overs, a word",
            2 * (four["call"] + four["finish"] + four["await"]) + 2 * hand_over + word,
        ),
        Row(LARGE, 2, SPINNING, "half of it read and added, half read, by 2 at once", (additions[2] + reads[2]) / 2),
        Row(LARGE, 4, SPINNING, "3/4 of it read and added, 3/4 read, by 4 at once", 0.75 * (additions[4] + reads[4])),
    ]


def measure_wholes(profile: Profile) -> list[Cell]:
    """Return the cells of the all_reduces, pinned and free."""

    def cases(profile: Profile) -> list[Case]:
        sizes = (4, LARGE) if profile.neighbors else (4, 1 << 20)
        return [Case("all_reduce", nbytes, *profile.samples(large=nbytes > 4)) for nbytes in sizes]

    return run_subject(Subject("anatomy", "all_reduce", RANKS, cases, (TRANSPORTS["shm"], ASYNCDIST_DOORBELL)), profile)


def _python(part: str, ranks: int) -> str:
    what = {
        "call": "a call, not the last",
        "last": "the last call, which ends in it",
        "finish": "the look that finds all there",
        "await": "awaiting what is done",
    }[part]
    return f"Python, {ranks} ranks: {what}"


def _pass(processes: int, what: str) -> str:
    return f"{format_bytes(LARGE)} {what}, by {processes} at once" if processes > 1 else f"{format_bytes(LARGE)} {what}"


def _part_rows(found: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    return [(name, *(_time(percentile(samples, at)) for at in (0, 0.5, 0.99))) for name, samples in found.items()]


def _sum_rows(rows: Sequence[Row], cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        whole = {
            cell.mode: cell.measurements[row.candidate]
            for cell in cells
            if cell.ranks == row.ranks and (cell.case.nbytes > 4) == (row.nbytes > 4)
        }
        measured = ", ".join(f"{_time(one.p50_s())} {mode}" for mode, one in whole.items() if one.runs_s)
        how = ", by doorbell" if row.candidate == SLEEPING else ""
        name = f"{format_bytes(row.nbytes)}, {row.ranks} ranks{how}"
        lines.append((name, row.formula, _time(row.sum_s), measured))
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-4 else f"{seconds * 1e3:.2f} ms"


def _document(machine: Mapping[str, str], measured: str, summed: str) -> str:
    versions = {**machine, "load after": f"{os.getloadavg()[0]:.2f}"}
    facts = "\n".join(f"- {name}: {value}" for name, value in versions.items())
    return f"""# What an all_reduce is made of

Taken by `python -m bench.anatomy --write`. The parts are measured by themselves: those of the machine by bare processes
bound to cores, those of the interpreter by ranks in one process that never wait. Sums are of their medians.

They leave out that the ranks do not begin at the same moment: a sample is the slowest rank's time, so what the last one
still has to do for the barrier before it counts too, another `finish` and `await`. With two ranks on a core the slowest
may wait for the whole turn of a third: its `finish`, `await` and `call`. Where ranks sleep, whoever has to be woken
from the barrier begins that much later, and the other, whose time counts, sleeps as long: that sum has both.

{measured}

{summed}

## Machine and versions

{facts}
"""


if __name__ == "__main__":
    main()
