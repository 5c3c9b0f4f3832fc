"""Where uvloop cannot be had, everything runs on asyncio's own event loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from socket_world import LIMIT_S

PROGRAM = """
import sys

sys.modules["uvloop"] = None  # importing it raises ImportError

import asyncio

import numpy as np

import asyncdist as dist
import asyncdist.blocking as blocking
from asyncdist_server import serve_in_thread


async def main():
    store = await dist.TCPStore.connect("127.0.0.1", server.port)
    async with dist.init_process_group(store=store, rank=0, world_size=1) as group:
        x = np.ones(3)
        await group.all_reduce(x)
        return type(asyncio.get_running_loop()).__module__


with serve_in_thread() as server:
    print(dist.run(main()))
blocking.init_process_group(init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
x = np.ones(3)
blocking.all_reduce(x)
blocking.destroy_process_group()
print(x.tolist(), [name for name in sys.modules if name.startswith("uvloop.")])
"""


def test_programs_scripts_and_the_daemon_run_on_asyncio(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["asyncio.unix_events", "[1.0, 1.0, 1.0] []"]
