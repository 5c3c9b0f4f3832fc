"""The program every measuring process runs: connect to the runner, then measure what it asks for.

Commands (run a case; bind to a core or run anywhere; connect to another candidate's server; leave) and answers are
JSON lines over a Unix socket of the runner's. Between two commands the process sleeps, so that candidates can stay
connected while another one is measured. When the runner goes, the process ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from bench.model import Case, Rank, RankContext
from bench.process import die_with_parent, pin_threads

COMMAND_LIMIT_BYTES = 1 << 20
"""The longest command line; a case is some hundred bytes."""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop when it is installed, as `asyncdist.run` does."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


async def serve(rank: Rank, number: int, control: str) -> None:
    """Open the candidate, answer the runner's commands until it says ``close`` or goes away, close the candidate."""
    reader, writer = await asyncio.open_unix_connection(control, limit=COMMAND_LIMIT_BYTES)

    async def answer(**values: object) -> None:
        writer.write(json.dumps(values).encode() + b"\n")
        await writer.drain()

    borrowers: dict[str, Rank] = {}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    await answer(rank=number, pid=os.getpid())
    try:
        await rank.open()
        await answer(ready=True)
        while line := await reader.readline():
            command = json.loads(line)
            if command.get("close"):
                break
            if "pinned" in command:
                pin_threads({cores[number % len(cores)]} if command["pinned"] else set(cores))
                await answer(pinned=command["pinned"])
                continue
            if "beside" in command:
                borrowers[command["beside"]] = await rank.beside(command["address"])
                await answer(ready=True)
                continue
            record = await borrowers.get(command.get("of", ""), rank).measure(Case(**command["case"]))
            await answer(**asdict(record))
        for each in (*borrowers.values(), rank):
            await each.close()
        await answer(closed=True)
    except Exception as error:
        await answer(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        writer.close()


def main() -> None:
    """Read the process's description (JSON, first argument) and run it."""
    description = json.loads(sys.argv[1])
    die_with_parent()
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", description["rank"]))
    module, _, name = description["entry"].partition(":")
    context = RankContext(
        rank=number,
        world_size=description["world_size"],
        directory=description["directory"],
        address=description["address"],
        options=description["options"],
    )
    rank: Rank = getattr(importlib.import_module(module), name)(context)
    runner = getattr(rank, "run", run)
    runner(serve(rank, number, description["control"]))


if __name__ == "__main__":
    main()
