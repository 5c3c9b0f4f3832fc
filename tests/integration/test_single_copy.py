"""Long payloads read where they lie in another process: what is right there, what forbids it, and what dies in it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from jobs import finish, free_port, run_ranks, start_ranks
from punctual import assert_within, punctual
from socket_world import socket_world

import asyncdist as dist
from asyncdist.transport.shared_memory.process_memory import ProcessMemory

OFF = {"ASYNCDIST_SINGLE_COPY": "off"}
NAMED_S = 1.0
"""How soon a failure is to name the rank."""

PRELUDE = """
import ctypes, json, random
from asyncdist.plan.cost import constants
from asyncdist.transport.shared_memory.process_memory import OwnMemory, ProcessMemory, RemoteBytes

object.__setattr__(constants.SHARED_MEMORY, "read_s", 1e-15)  # all plans that can read rather than copy do
reads, read = 0, ProcessMemory.read

def counted(self, address, target, nbytes):
    global reads
    reads += 1
    read(self, address, target, nbytes)

ProcessMemory.read = counted
libc = ctypes.CDLL(None, use_errno=True)

def keep_capabilities(kept):
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(kept, kept)
    assert not libc.capset(header, none), ctypes.get_errno()

async def works_with_all(group, count=400_001):
    for _ in range(2):  # at the second there is a lane
        x = np.full(count, group.rank + 1, np.int64)
        await group.all_reduce(x)
        assert (x == group.size * (group.size + 1) // 2).all()
        whole = np.empty(count * group.size, np.int64)
        await group.all_gather_into_tensor(whole, x + group.rank)
        assert (whole.reshape(group.size, -1) == x[0] + np.arange(group.size)[:, None]).all()
        sent = [group.isend(x + group.rank, other) for other in range(group.size) if other != group.rank]
        for other in range(group.size):
            if other != group.rank:
                got = np.empty(count, np.int64)
                await group.recv(got, other)
                assert (got == x[0] + other).all()
        await asyncio.gather(*sent)
    await group.barrier()
"""

FORMS = """
import hashlib
import ml_dtypes

LAST = dist.ReduceOp.custom(lambda left, right: left * 0 + right, commutative=False, name="last")
LARGEST = dist.ReduceOp.custom(np.maximum, name="largest")

async def main():
    async with dist.init_process_group() as group:
        rank, size, digests, read_by = group.rank, group.size, {}, {}

        def values(count, dtype=np.float64, salt=0, who=rank):
            return ((np.arange(count) * 3 + 7 * who + salt) % 13).astype(dtype)

        async def one(name, out, work):
            global reads
            before = reads
            await work
            read_by[name] = reads - before
            arrays = out if isinstance(out, list) else [out]
            digests[name] = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:16]

        bf16 = np.dtype(ml_dtypes.bfloat16)
        for op, dtype in (("SUM", np.float64), ("AVG", np.float32), ("MAX", np.int16), ("BXOR", np.uint8),
                          ("SUM", bf16), ("SUM", np.complex64), ("PRODUCT", np.int64)):
            count = (2 << 20) // np.dtype(dtype).itemsize + 5
            x = values(count, dtype)
            await one(f"all_reduce {op} {np.dtype(dtype)}", x, group.all_reduce(x, getattr(dist.ReduceOp, op)))
        count = 400_003
        for name, op in (("premul", dist.ReduceOp.PREMUL_SUM(0.5 + rank)), ("last", LAST), ("largest", LARGEST)):
            x = values(count)
            await one(f"all_reduce {name}", x, group.all_reduce(x, op))
            out = np.zeros(count)
            await one(f"reduce_scatter_tensor {name}", out, group.reduce_scatter_tensor(out, values(count * size), op))
        for root in range(2):
            x = values(count)
            await one(f"reduce {root}", x if rank == root else [], group.reduce(x, root))
            x = values(count)
            await one(f"broadcast {root}", x, group.broadcast(x, root))
            outs = [np.zeros(count - who) for who in range(size)]
            await one(f"gather {root}", outs, group.gather(values(count - rank), outs if rank == root else None, root,
                                                         uneven=True))
            outs, out = [np.zeros(count) for who in range(size)], np.zeros(count)
            await one(f"even gather {root}", outs, group.gather(values(count), outs if rank == root else None, root))
            parts = [values(count - who, salt=who) for who in range(size)] if rank == root else None
            await one(f"scatter {root}", out, group.scatter(out[rank:], parts, root, uneven=True))
            parts = [values(count, salt=who) for who in range(size)] if rank == root else None
            await one(f"even scatter {root}", out, group.scatter(out, parts, root))
            x = await group.broadcast_array(values(count).reshape(-1, 1) if rank == root else None, root)
            assert x.shape == (count, 1) and (x[:, 0] == values(count, who=root)).all()
        await one("scan", x := values(count), group.scan(x))
        await one("exscan", (x := values(count))[: 0 if rank == 0 else None], group.exscan(x))
        outs = [np.zeros(count + who) for who in range(size)]
        await one("uneven all_gather", outs, group.all_gather(outs, values(count + rank)))
        outs = [np.zeros(count) for who in range(size)]
        await one("all_gather", outs, group.all_gather(outs, values(count)))
        out = np.zeros((size, count))
        await one("all_gather_into_tensor", out, group.all_gather_into_tensor(out, values(count)))
        out[rank] = values(count, salt=1)
        await one("all_gather_into_tensor in place", out, group.all_gather_into_tensor(out, out[rank]))
        out = np.zeros((count, 2 * size)).T[::2]
        await one("strided all_gather", list(out), group.all_gather(list(out), values(2 * count)[::2]))
        out = np.zeros(count + rank)
        await one("reduce_scatter", out, group.reduce_scatter(out, [values(count + to, salt=to) for to in range(size)]))
        x = values(count * size).reshape(size, -1)
        await one("reduce_scatter_tensor in place", x[rank], group.reduce_scatter_tensor(x[rank], x))
        outs = [np.zeros(count + who + 2 * rank) for who in range(size)]
        given = [values(count + rank + 2 * to, salt=to) for to in range(size)]
        await one("all_to_all", outs, group.all_to_all(outs, given))
        out, got = np.zeros(count * size), [count + who - rank for who in range(size)]
        out, given = np.zeros(sum(got)), [count + rank - to for to in range(size)]
        await one("split all_to_all_single", out, group.all_to_all_single(out, values(sum(given)), got, given))
        x = values(count * size)
        await one("all_to_all_single in place", x, group.all_to_all_single(x, x))
        xs = [values(count, salt=number) for number in range(3)]
        await one("all_reduce_coalesced", xs, group.all_reduce_coalesced(xs))
        objects = [None] * size
        await group.all_gather_object(objects, bytes([rank]) * 2_000_000)
        assert objects == [bytes([who]) * 2_000_000 for who in range(size)]
        async with group.broadcast_stream(x := values(count), 1, chunk_bytes=1 << 20) as stream:
            assert sum([chunk.data.size async for chunk in stream]) == count
        assert (x == values(count, who=1)).all()
        xs = [values(count + tag, salt=tag) for tag in range(6)]  # several at once, some in new lanes
        works = [group.all_reduce(x, tag=tag % 3) for tag, x in enumerate(xs)]
        works.append(group.isend(values(800_000), (rank + 1) % size))
        works.append(group.irecv(out := np.zeros(800_000), (rank - 1) % size))
        await one("at once", [*xs, out], asyncio.gather(*works))
        print(json.dumps([digests, read_by]))
dist.run(main())
"""

READ = (
    "all_reduce SUM float64",
    "all_reduce AVG float32",
    "all_reduce SUM bfloat16",
    "all_reduce premul",
    "all_reduce largest",
    "reduce_scatter_tensor last",
    "broadcast 1",
    "even gather 1",
    "even scatter 0",
    "uneven all_gather",
    "all_gather_into_tensor in place",
    "reduce_scatter",
    "reduce_scatter_tensor in place",
    "all_to_all_single in place",
    "all_reduce_coalesced",
    "at once",
)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_are_those_of_copies_bit_for_bit(size: int) -> None:
    read, copied = ([json.loads(rank.stdout) for rank in run_ranks(PRELUDE + FORMS, size, env)] for env in ({}, OFF))
    for name in copied[0][0]:
        assert [rank[0][name] for rank in read] == [rank[0][name] for rank in copied], name
    assert not any(sum(rank[1].values()) for rank in copied)
    assert ", ".join(name for name in READ if not any(rank[1][name] for rank in read)) == ""


FEW = """
async def main():
    async with dist.init_process_group() as group:
        await works_with_all(group)
        print(reads)
dist.run(main())
"""
MINE = "if os.environ['RANK'] == '1':"


def test_where_all_can_all_read_and_say_nothing() -> None:
    for rank in run_ranks(PRELUDE + FEW, 3):
        assert int(rank.stdout) > 0
        assert rank.stderr == ""


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_that_neither_lends_nor_reads(size: int) -> None:
    for rank in run_ranks(PRELUDE + f"{MINE} os.environ['ASYNCDIST_SINGLE_COPY'] = 'off'" + FEW, size):
        assert (rank.stdout, rank.stderr) == ("0\n", "")


PROTECTED = f"""
keep_capabilities(0)
{MINE} libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
"""
ANOTHER_USER = """
if os.environ["RANK"] != "1":
    keep_capabilities(0)
else:
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS: the interpreter's files are still to be read
    os.setresuid(65534, 65534, 65534)
    keep_capabilities(1 << 2)  # CAP_DAC_READ_SEARCH
"""
PID_NAMESPACE = f"""
{MINE}
    assert not libc.unshare(0x20000000)  # CLONE_NEWPID
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert os.getpid() == 1
"""


@pytest.mark.parametrize("own", [PROTECTED, ANOTHER_USER, PID_NAMESPACE], ids=["protected", "user", "pids"])
def test_ranks_that_may_not_be_read_are_sent_copies_and_one_line_says_so(own: str) -> None:
    if own is not PROTECTED and os.geteuid():
        pytest.skip("root only")
    ended = run_ranks(PRELUDE + own + FEW, 3, {"ASYNCDIST_DEBUG": "INFO"})
    said = [sum("cannot be read" in line for line in rank.stderr.splitlines()) for rank in ended]
    # Who is protected can read the others. Where users differ nobody can read the other; and the number of a process
    # outside means nothing within a namespace.
    assert said == {PROTECTED: [1, 0, 1], ANOTHER_USER: [1, 2, 1], PID_NAMESPACE: [0, 2, 0]}[own], ended[1].stderr
    assert [rank.stdout for rank in ended] == ["0\n"] * 3


NO_LONGER = """
async def main():
    keep_capabilities(0)
    async with dist.init_process_group() as group:
        await works_with_all(group)
        if group.rank == 1:
            libc.prctl(4, 0, 0, 0, 0)  # as `os.setuid` does
        await group.barrier()
        before = reads
        if MESSAGES:
            x = np.full(1_000_000, group.rank)
            await asyncio.gather(*(group.isend(x + number, 1 - group.rank, number) for number in range(3)),
                                 *(group.irecv(x, 1 - group.rank, number) for number in range(3)))
            await works_with_all(group)
            print(reads - before)
        else:
            try:
                await works_with_all(group)
            except dist.PeerLostError as error:
                print(error.rank, "cannot be read" in str(error))
try:
    dist.run(main())
except dist.PeerLostError:
    assert not MESSAGES
"""


def test_messages_of_a_process_that_can_be_read_no_longer_travel() -> None:
    ended = run_ranks(PRELUDE + "MESSAGES = True" + NO_LONGER, 2)
    assert ended[0].stdout == "3\n"  # one try each: from then on copies come
    assert int(ended[1].stdout) > 12


def test_a_collective_that_reads_a_process_that_can_be_read_no_longer_says_so() -> None:
    ended = run_ranks(PRELUDE + "MESSAGES = False" + NO_LONGER, 2)
    assert [rank.stdout for rank in ended] == ["1 True\n", "0 False\n"]


SECRET = """
import mmap

def secret(nbytes, address=0):
    # By memfd_secret: the process alone can read it, as it can what belongs to a device
    fd = libc.syscall(447, 0)
    if fd < 0:
        sys.exit("no such memory")
    os.ftruncate(fd, nbytes)
    place = libc.mmap(address, nbytes, 3, 0x11 if address else 1, fd, 0)  # MAP_SHARED, MAP_FIXED
    assert place != ctypes.c_void_p(-1).value and (not address or place == address)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(place), np.int64)

async def main():
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
    nbytes = 5 << 20
    x = np.full(nbytes // 8, 7, np.int64)
    if HOLED:
        middle = (x.ctypes.data + nbytes // 2) & -4096
        hole = secret(4096, middle)
        x[:] = 7
    else:
        x = secret(nbytes)
        x[:] = 7
    async with dist.init_process_group() as group:
        await works_with_all(group)
        before = reads
        if group.rank == 1:  # the others' arrays can be read
            x = x.copy()
        for number in range(4):
            got = np.zeros_like(x)
            if group.rank == 0:
                await group.send(x, 1)
                await group.recv(x, 1)
            else:
                await group.recv(got, 0)
                assert (got == x).all()
                x += 1
                await group.send(x, 0)
        assert (x == 11).all()
        print(reads - before)
        try:
            await group.broadcast(x, 0)
            await group.all_reduce(x)
            assert (x == 22).all()
            print("done")
        except dist.PeerLostError as error:
            print(error.rank)
"""


@pytest.mark.parametrize("holed", [False, True])
def test_memory_that_the_kernel_reads_for_nobody_else(holed: bool) -> None:
    """A device's is so from its first byte to its last. One that only begins and ends as others is no array's."""
    ended = finish(start_ranks(PRELUDE + SECRET + f"HOLED = {holed}\ndist.run(main())", 2))
    if "no such memory" in ended[0].stderr:
        pytest.skip("no memfd_secret")
    # Reading up to the hole and after it fails once, and copies come from then on.
    assert [rank.stdout for rank in ended] == ["20\ndone\n", "3\ndone\n" if holed else "0\ndone\n"], ended


DYING = """
import threading

async def main():
    group = await dist.init_process_group(timeout=60)
    rank, victim, count = group.rank, 1, 3_000_000
    x = np.empty(count, np.int64)
    whole = np.empty(count * group.size, np.int64)
    number = 0
    try:
        while True:
            if number == 3 and rank == victim:
                after_s = random.random() * 0.04
                print(time.time() + after_s, flush=True)
                threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            x[:] = rank + number
            if KIND == "all_reduce":
                await group.all_reduce(x)
                assert (x == group.size * number + 3).all(), "altered"
            elif KIND == "broadcast":
                await group.broadcast(x, victim)
                assert (x == victim + number).all(), "altered"
            elif KIND == "all_to_all":
                await group.all_to_all_single(whole, np.repeat(x, group.size))
                assert (whole.reshape(group.size, -1) == np.arange(group.size)[:, None] + number).all(), "altered"
            else:
                got = np.empty_like(x)
                await asyncio.gather(group.isend(x, (rank + 1) % 3, number), group.irecv(got, (rank - 1) % 3, number))
                assert (got == (rank - 1) % 3 + number).all(), "altered"
            number += 1
    except dist.DistError as error:
        told_s = time.time()
        x[:] = -1
        assert reads and number >= 3
        print(json.dumps([type(error).__name__, getattr(error, "rank", None), told_s]))
    group.abort("enough")

try:
    dist.run(main())
except dist.DistError:
    pass
"""


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_to_all", "ring"])
@punctual
def test_a_rank_killed_while_others_read_from_it(kind: str) -> None:
    ended = finish(start_ranks(PRELUDE + f"KIND = {kind!r}" + DYING, 3))
    assert ended[1].returncode == -signal.SIGKILL
    killed_s = float(ended[1].stdout)
    for rank in (ended[0], ended[2]):
        assert rank.returncode == 0, rank.stderr
        name, lost, told_s = json.loads(rank.stdout)
        if kind == "ring" and name == "GroupAbortedError":  # of the rank that heard first
            continue
        assert (name, lost) == ("PeerLostError", 1)
        assert_within(NAMED_S, told_s - killed_s)


TAKEN_BACK = """
async def main():
    dice = random.Random(int(os.environ["SEED"]))  # the same on all ranks
    options = {"progress": "thread"} if THREAD else {}
    async with dist.init_process_group(**options) as world:
        rank, count = world.rank, 1_500_000
        data, got = np.empty(count, np.int64), np.empty(count * world.size, np.int64)
        ends = {"well": 0, "badly": 0}
        for number in range(12):
            group = dist.new_group()
            await works_with_all(group, 50_000)
            who, after_s = dice.randrange(world.size), dice.choice((0, dice.random() * 0.006, dice.random() * 0.02))
            kind = dice.choice(("all_reduce", "broadcast", "all_gather", "all_to_all"))
            late_s = [dice.choice((0, 0, dice.random() * 0.01)) for _ in range(world.size)]
            await world.barrier()
            await asyncio.sleep(late_s[rank])
            data[:] = number + rank
            call = {
                "all_reduce": lambda: group.all_reduce(data),
                "broadcast": lambda: group.broadcast(data, who),
                "all_gather": lambda: group.all_gather_into_tensor(got, data),
                "all_to_all": lambda: group.all_to_all_single(got[:count], data),
            }[kind]
            try:
                work = call()
                if rank == who:
                    await asyncio.sleep(after_s)
                    if not work.done():
                        group.abort("changed my mind")
                        data[:], got[:] = -666, -666
                        raise dist.GroupAbortedError("mine; with a thread the operation may have ended well meanwhile")
                await work
            except dist.DistError:
                data[:], got[:] = -666, -666
                ends["badly"] += 1
            else:
                ends["well"] += 1
                block = count // world.size
                if kind == "all_reduce":
                    assert (data == world.size * number + world.size * (world.size - 1) // 2).all()
                elif kind == "broadcast":
                    assert (data == number + who).all()
                elif kind == "all_gather":
                    assert (got.reshape(world.size, -1) == number + np.arange(world.size)[:, None]).all()
                else:
                    assert (got[:count].reshape(world.size, -1) == number + np.arange(world.size)[:, None]).all()
            await world.barrier()
            try:
                await group.close()
            except dist.DistError:
                pass
        print(json.dumps([ends, reads]))
dist.run(main())
"""


@pytest.mark.parametrize("thread", [False, True])
def test_what_was_lent_and_taken_back_is_nobodys_result(thread: bool) -> None:
    """Who gives up alters the arrays at once: others have ended well before, or do not."""
    ended = run_ranks(PRELUDE + f"THREAD = {thread}" + TAKEN_BACK, 3, {"SEED": "5"})
    assert all(json.loads(rank.stdout)[1] > 0 for rank in ended)
    assert any(json.loads(rank.stdout)[0]["badly"] > 1 for rank in ended)


ALTERED = """
import mmap

STEPS = mmap.mmap(os.open(os.environ["STEPS"], os.O_RDWR), 4096)
left = 0

def held_up(self, address, target, nbytes):
    global left
    left -= nbytes
    if left == 0:
        STEPS[0] = 1
        while STEPS[0] == 1:
            time.sleep(0.0001)
    counted(self, address, target, nbytes)

ProcessMemory.read = held_up

async def main():
    global left
    async with dist.init_process_group() as world:
        await works_with_all(world)
        group = dist.new_group()
        await works_with_all(group)
        before, rank = reads, world.rank
        x = np.full(COUNT, rank + 1, np.int64)
        got = np.zeros(COUNT * 2, np.int64)
        await world.barrier()
        left = COUNT * 8 * rank
        if KIND == "send":
            work = group.isend(x, 1) if rank == 0 else group.irecv(got[:COUNT], 0)
        elif KIND == "broadcast":
            work = group.broadcast(x, 0)
        elif KIND == "all_gather":
            work = group.all_gather_into_tensor(got, x)
        else:
            work = group.all_reduce(x)
        try:
            if rank == 0:
                while not STEPS[0] and not work.done():
                    await asyncio.sleep(0)
                assert not work.done()
                group.abort("changed my mind")
                x[:] = -666
                STEPS[0] = 2
            await work
            print("done")
        except dist.GroupAbortedError as error:
            print(error.rank)
        assert rank == 0 or reads > before
        await world.barrier()
        try:
            await group.close()
        except dist.DistError:
            pass
dist.run(main())
"""


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather", "send"])
def test_what_was_altered_while_it_was_read_is_no_result(kind: str, tmp_path: Path) -> None:
    """One item, or the last piece of a message: that it was read is all that is missing."""
    steps = tmp_path / "steps"
    steps.write_bytes(bytes(4096))
    count = 600_000 if kind == "send" else 200_000
    ended = run_ranks(PRELUDE + f"KIND, COUNT = {kind!r}, {count}" + ALTERED, 2, {"STEPS": str(steps)}, 20.0)
    assert [rank.stdout for rank in ended] == ["0\n", "0\n"]


MESSAGES = """
SIZES = (1000, (4 << 20) - 8, 4 << 20, (4 << 20) + 8, 5_000_000, 8 << 20, 16 << 20)

async def main():
    async with dist.init_process_group(**({"progress": "thread"} if THREAD else {})) as group:
        plan = random.Random(7)  # the same on all ranks
        rank, size = group.rank, group.size

        def data(number, count, who):
            return np.arange(count) % 1009 + number * 31 + who * 7

        for round in range(3):
            works, awaited = [], []
            for number in range(12):
                a, b = plan.sample(range(size), 2)
                count, late, both = plan.choice(SIZES) // 8, plan.random() < 0.4, plan.random() < 0.5
                any_source, tag = not both and plan.random() < 0.5, round * 100 + number
                for source, target in ((a, b), (b, a)) if both else ((a, b),):
                    if rank == source:
                        works.append(group.isend(data(number, count, source), target, tag))
                    if rank == target:
                        if late:
                            await asyncio.sleep(0.002)
                        got = np.zeros(count, np.int64)
                        withdrawn = group.irecv(np.zeros(count, np.int64), source, 10_000)
                        works.append(group.irecv(got, None if any_source else source, tag))
                        assert withdrawn.cancel()
                        awaited.append((got, number, source))
            waiting = [asyncio.ensure_future(wait(work)) for work in works]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()  # who stops waiting ends nothing
            for work in works:
                await work
            for got, number, source in awaited:
                assert (got == data(number, len(got), source)).all(), (number, source)
        assert reads
        await group.barrier()

async def wait(work):
    await work

dist.run(main())
"""


@pytest.mark.parametrize("thread", [False, True])
def test_messages_both_ways_late_withdrawn_and_from_anybody(thread: bool) -> None:
    run_ranks(PRELUDE + f"THREAD = {thread}" + MESSAGES, 3)


LATE = """
async def main():
    async with dist.init_process_group() as group:
        await works_with_all(group)
        x, ends = np.empty(1_500_000, np.int64), {"well": 0, "late": 0}
        for number in range(30):
            await group.barrier()
            x[:] = number
            in_time, late = number % 3 == 0, number % 3 == 1
            if group.rank == 0:
                limit_s = 30 if in_time else 0.0005 if late else random.random() * 0.01
                try:
                    await group.send(x, 1, number, timeout=limit_s)
                    ends["well"] += 1
                except dist.DistError:
                    ends["late"] += 1
                x[:] = -1
            else:
                await asyncio.sleep(0.005 if late else random.random() * 0.005)
                try:
                    await group.recv(x, 0, number, timeout=30 if in_time else 0.05)
                    assert (x == number).all()
                    ends["well"] += 1
                except dist.DistError:
                    ends["late"] += 1
        print(json.dumps(ends))
        await group.barrier()
dist.run(main())
"""


def test_a_message_whose_sender_waits_no_longer_is_whole_or_never_comes() -> None:
    """Arrays of a send that timed out are altered at once."""
    sender, receiver = (json.loads(rank.stdout) for rank in run_ranks(PRELUDE + LATE, 2))
    for rank in (sender, receiver):
        assert rank["well"] >= 10
        assert rank["late"] >= 10
        assert rank["well"] + rank["late"] == 30


WAITING = """
import asyncdist.blocking as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
for number in range(3):
    x = np.full(1_000_000, rank + number)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert (x == size * number + size * (size - 1) // 2).all()
    got = np.empty_like(x)
    sent = dist.isend(np.full(1_000_000, rank), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    assert (got == (rank - 1) % size).all()
assert reads
dist.destroy_process_group()
"""


def test_functions_that_wait() -> None:
    run_ranks(PRELUDE + WAITING, 3)


async def test_ranks_of_one_process_and_of_several_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the process that it is part of."""
    pids = []
    read = ProcessMemory.read

    def counted(self: ProcessMemory, address: int, target: int, nbytes: int) -> None:
        pids.append(self._pid)
        read(self, address, target, nbytes)

    monkeypatch.setattr(ProcessMemory, "read", counted)
    async with socket_world(2) as one, socket_world(3) as other:
        for groups in (one, other, one):
            before = len(pids)
            works, got = [], [np.zeros(1_000_000) for _ in groups]
            for group, into in zip(groups, got, strict=True):
                works.append(group.isend(np.full(1_000_000, group.rank + 1.0), (group.rank + 1) % group.size))
                works.append(group.irecv(into, (group.rank - 1) % group.size))
            await asyncio.gather(*works)
            assert [into.min() for into in got] == [into.max() for into in got] == [len(groups), *range(1, len(groups))]
            for _ in range(2):
                arrays = [np.full(4_000_000, group.rank + 1.0) for group in groups]
                await asyncio.gather(*(group.all_reduce(array) for group, array in zip(groups, arrays, strict=True)))
                assert all((array == len(groups) * (len(groups) + 1) / 2).all() for array in arrays)
            assert len(pids) > before
    assert set(pids) == {os.getpid()}


FORKED = """
async def forks():
    global child
    async with dist.init_process_group(timeout=30) as group:
        await works_with_all(group)
        x = np.full(3_000_000, group.rank + 1)
        works = [group.all_reduce(x), group.isend(y := np.full(3_000_000, group.rank), 1 - group.rank),
                 group.irecv(got := np.zeros(3_000_000, int), 1 - group.rank)]
        for _ in range(random.randrange(10)):
            await asyncio.sleep(0)
        child = os.fork()
        if not child:  # its memory is its own from now on
            x[:] = y[:] = got[:] = -1
            return
        await asyncio.gather(*works)
        assert (x == 3).all() and (got == 1 - group.rank).all() and (y == group.rank).all()
        await works_with_all(group)

async def again():
    async with dist.init_process_group(timeout=30) as group:
        await works_with_all(group)

def worlds():
    dist.run(forks())
    os.environ["MASTER_PORT"] = os.environ["CHILDS_PORT" if not child else "PARENTS_PORT"]
    global reads
    reads = 0
    dist.run(again())  # parents among themselves, and children
    assert reads
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

child = 1
worlds()
"""


def test_forked_while_others_read() -> None:
    run_ranks(PRELUDE + FORKED, 2, {"PARENTS_PORT": str(free_port()), "CHILDS_PORT": str(free_port())})


def _spawned(rank: int, port: int) -> None:
    async def main() -> None:
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2}
        async with dist.init_process_group(**where) as group:
            x = np.full(1_000_000, float(rank))
            sent = group.isend(x, 1 - rank)
            got = np.zeros_like(x)
            await group.recv(got, 1 - rank)
            await sent
            assert (got == 1 - rank).all()
            assert group.world.mesh.memory.connections[1 - rank].loans.reads
            await group.barrier()

    dist.run(main())


def test_spawned_by_multiprocessing() -> None:
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    processes = [spawn.Process(target=_spawned, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
