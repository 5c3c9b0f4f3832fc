"""A rank of tests/soak/vanish_soak.py: all_reduce without end, or something that keeps it from its loop; what it hears.

vanish_rank.py reduce | compute SECONDS | hold SECONDS | stop SECONDS
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time

import numpy as np

import asyncdist as dist
from asyncdist.errors import GroupAbortedError, PeerLostError

ELEMENTS = 1 << 17


def occupy(how: str, seconds: float) -> None:
    """Compute in pure Python, hold the interpreter's lock, or be stopped by a signal."""
    if how == "hold":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL gives the lock to nobody
    elif how == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        until_s, count = time.monotonic() + seconds, 0
        while time.monotonic() < until_s:
            count += 1


async def main(how: str, seconds: float = 0.0) -> None:
    x = np.ones(ELEMENTS, np.float32)
    async with dist.init_process_group() as group:
        try:
            await group.all_reduce(x)
            print("began", flush=True)
            if how != "reduce":
                occupy(how, seconds)
                await group.all_reduce(x)
                print("went on", flush=True)
            while how == "reduce":
                x[:] = 1
                await group.all_reduce(x)
                await asyncio.sleep(0)
        except (PeerLostError, GroupAbortedError) as error:
            print(f"heard {time.time():.3f} {error}", flush=True)
            raise


dist.run(main(sys.argv[1], *map(float, sys.argv[2:])))
