"""Long payloads read where they lie in another process: results are right, and those that may not read get copies."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest
from jobs import finish, run_ranks, start_ranks
from single_copy_kit import PRELUDE

from asyncdist_server.wire.auth import new_token

OFF = {"ASYNCDIST_SINGLE_COPY": "off"}

FORMS = """
import zlib
import ml_dtypes

LAST = dist.ReduceOp.custom(lambda left, right: left * 0 + right, commutative=False, name="last")
LARGEST = dist.ReduceOp.custom(np.maximum, name="largest")

async def main():
    async with dist.init_process_group() as group:
        rank, size, digests, read_by = group.rank, group.size, {}, {}

        steps = np.arange(3 << 20) * 3 % 13

        def values(count, dtype=np.float64, salt=0, who=rank):
            first = (7 * who + salt) * 9 % 13  # nine steps of three are one more than two rounds
            return steps[first : first + count].astype(dtype)

        async def one(name, out, work):
            global reads
            before = reads
            await work
            read_by[name] = reads - before
            arrays = out if isinstance(out, list) else [out]
            digests[name] = [zlib.crc32(x.tobytes()) for x in arrays]

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


@pytest.mark.slow("every form of every collective on long vectors, twice")
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.thorough) for size in (2, 4))])
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


AGAIN = """
from asyncdist.transport.shared_memory import process_memory
process_memory._huge_page_bytes = lambda: 2 << 20
asked, madvise = set(), process_memory.madvise

def counted(address, nbytes, advice):
    asked.add(address // (2 << 20))
    return madvise(address, nbytes, advice)

process_memory.madvise = counted

async def main():
    async with dist.init_process_group() as group:
        x = np.ones(1 << 20)
        for _ in range(5):
            await group.all_reduce(x)
        assert (x == group.size**5).all()
        print(x.ctypes.data // (2 << 20) + 1 in asked)
dist.run(main())
"""


@pytest.mark.parametrize(("word", "moves"), [("auto", "True\n"), ("off", "False\n")])
def test_a_vector_that_is_reduced_again_moves_to_huge_pages(word: str, moves: str) -> None:
    ended = run_ranks(PRELUDE + AGAIN, 2, {"ASYNCDIST_HUGE_PAGES": word})
    assert [(rank.stdout, rank.stderr) for rank in ended] == [(moves, "")] * 2


PROTECTED = f"""
keep_capabilities(0)
{MINE} libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
"""
BESIDE_ROOT = f"""
{MINE}
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS: the interpreter's files are still to be read
    os.setresuid(65534, 65534, 65534)
    keep_capabilities(1 << 2)  # CAP_DAC_READ_SEARCH
"""
ANOTHER_USER = f"{BESIDE_ROOT}else: keep_capabilities(0)\n"
PID_NAMESPACE = f"""
{MINE}
    assert not libc.unshare(0x20000000)  # CLONE_NEWPID
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert os.getpid() == 1
"""


@pytest.mark.parametrize(
    "own", [PROTECTED, ANOTHER_USER, BESIDE_ROOT, PID_NAMESPACE], ids=["protected", "user", "root", "pids"]
)
def test_ranks_that_may_not_be_read_are_sent_copies_and_one_line_says_so(own: str) -> None:
    if own is not PROTECTED and os.geteuid():
        pytest.skip("root only")
    ended = run_ranks(PRELUDE + own + FEW, 3, {"ASYNCDIST_DEBUG": "INFO", "ASYNCDIST_TOKEN": new_token()})
    said = [sum("cannot be read" in line for line in rank.stderr.splitlines()) for rank in ended]
    # Who is protected can read the others. Where users differ nobody reads the other, though root could; and the number
    # of a process outside means nothing within a namespace.
    assert said == {PROTECTED: [1, 0, 1], PID_NAMESPACE: [0, 2, 0]}.get(own, [1, 2, 1]), ended[1].stderr
    assert [rank.stdout for rank in ended] == ["0\n"] * 3


NO_LONGER = """
class Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("so", ctypes.c_uint8), ("not", ctypes.c_uint8), ("k", ctypes.c_uint32))

class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("program", ctypes.POINTER(Instruction)))

def deny(call, error):
    # By seccomp: load the call's number; if it is this one, refuse it; allow it
    steps = (0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)
    program = (Instruction * 4)(*steps)
    assert not libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    assert not libc.prctl(22, 2, ctypes.byref(Filter(4, program)), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

async def main():
    keep_capabilities(0)
    async with dist.init_process_group() as world:
        group = dist.new_group()
        await works_with_all(group)
        if DENIED and group.rank == 0:
            deny({"x86_64": 310}.get(os.uname().machine, 270), DENIED)  # process_vm_readv
        elif not DENIED and group.rank == 1:
            libc.prctl(4, 0, 0, 0, 0)  # as `os.setuid` does
        await world.barrier()
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
            except dist.DistError as error:
                print(f"{type(error).__name__}: {error}")
            await works_with_all(dist.new_group())  # with copies
dist.run(main())
"""


UNREADABLE = r"\d+ bytes at 0x\w+ of process \d+ cannot be read: [A-Z][a-z ]+"
DENIED = [0, errno.EPERM, errno.EACCES]
"""How a filter of its own system calls refuses reading to rank 0; 0: none does, and rank 1 protects itself."""


@pytest.mark.parametrize("denied", DENIED)
def test_messages_of_a_process_that_can_be_read_no_longer_travel(denied: int) -> None:
    ended = run_ranks(PRELUDE + f"MESSAGES, DENIED = True, {denied}" + NO_LONGER, 2)
    assert ended[0].stdout == "3\n"  # one try each: from then on copies come
    assert int(ended[1].stdout) == 0 if denied else int(ended[1].stdout) > 12  # who cannot read is not sure what can be


@pytest.mark.parametrize("denied", DENIED)
def test_a_collective_that_reads_a_process_that_can_be_read_no_longer_says_so(denied: int) -> None:
    reader, lender = (rank.stdout for rank in run_ranks(PRELUDE + f"MESSAGES, DENIED = False, {denied}" + NO_LONGER, 2))
    assert re.fullmatch(rf"DistError: group \S+, rank 0, all_reduce #5: of rank 1, {UNREADABLE}\n", reader)
    assert re.fullmatch(rf"GroupAbortedError: .*: rank 0 failed in .*: of rank 1, {UNREADABLE}\n", lender)


HOLE = """
async def main():
    async with dist.init_process_group() as world:
        group, rank = dist.new_group(), world.rank
        await works_with_all(group)
        x = np.full(1 << 18, rank + 1, np.int64)
        hole = ctypes.c_void_p((x.ctypes.data + x.nbytes // 2 & -4096) + 5 * 4096)
        if rank == 0:
            assert not libc.mprotect(hole, ctypes.c_size_t(4096), 0)  # PROT_NONE
        try:
            await group.broadcast(x, 0)
        except dist.DistError as error:
            print(f"{type(error).__name__}: {error}")
        assert rank or not libc.mprotect(hole, ctypes.c_size_t(4096), 3)  # PROT_READ | PROT_WRITE
        await works_with_all(world)
        other = dist.new_group()
        for _ in range(2):
            x[:] = rank + 1
            await other.broadcast(x, 0)
            assert (x == 1).all()
dist.run(main())
"""


def test_an_array_with_a_hole_ends_the_groups_collectives_and_no_more() -> None:
    lender, *readers = (rank.stdout for rank in run_ranks(PRELUDE + HOLE, 3))
    own, aborted = (
        re.compile(text + rf": of rank 0, {UNREADABLE}\n") for text in ("DistError: .*", "GroupAbortedError: .*")
    )
    assert any(map(own.fullmatch, readers))
    assert all(own.fullmatch(reader) or aborted.fullmatch(reader) for reader in readers)
    assert not lender or aborted.fullmatch(lender), "all who read may have given up before it hears why"


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
