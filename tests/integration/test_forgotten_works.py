"""`python -X dev` and ASYNCDIST_CHECK=full tell of Works that nobody awaited."""

from __future__ import annotations

import os
import subprocess
import sys

import forked
import pytest

PROGRAM = """
import asyncio, sys
import numpy as np
import asyncdist as dist
from asyncdist import blocking

async def main(progress):
    async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, progress=progress) as group:
        dist.all_reduce(np.ones(3))
        await dist.all_reduce(np.ones(3))
        dist.barrier()

asyncio.run(main("loop"))
asyncio.run(main("thread"))
blocking.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
blocking.reduce(np.ones(3), 0, async_op=True)
blocking.reduce(np.ones(3), 0)
blocking.barrier(async_op=True).wait()
blocking.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("options", "check", "told"),
    [(["-X", "dev"], "", True), ([], "full", True), ([], "on", False)],
    ids=["dev", "full", "neither"],
)
def test_each_forgotten_work_is_told_once(options: list[str], check: str, told: bool) -> None:
    command = [sys.executable, *options, "-c", PROGRAM]
    environ = {**os.environ, "ASYNCDIST_CHECK": check}
    if options:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    else:
        ended = forked.run(command, 60, environ)
    assert ended.returncode == 0, ended.stderr
    warned = [line for line in ended.stderr.splitlines() if "was never awaited" in line]
    places = [line.partition(", issued at <string>:")[::2] for line in warned]
    expected = [("all_reduce #0", 9), ("barrier #2", 11)] * 2 + [("reduce #0", 16)]
    assert len(places) == (len(expected) if told else 0), ended.stderr
    for (before, after), (what, line) in zip(places, expected, strict=False):
        assert before.endswith(f"group default, rank 0, {what}"), ended.stderr
        assert after == f"{line}, was never awaited"
