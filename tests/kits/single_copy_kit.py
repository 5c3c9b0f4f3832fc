"""What the tests of reading other processes' memory share: programs of ranks that count what they read."""

from __future__ import annotations

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

async def works_with_all(group, count=200_001):
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
