"""`asyncdist ps` on hundreds of ranks of one host, which are stand-ins."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest
from punctual import assert_within, punctual

from asyncdist.inspect.dumps import document
from asyncdist.inspect.endpoint import LENGTH, PURPOSE, name_of
from asyncdist.store import TCPStore
from asyncdist_server.serving.threaded import serve_in_thread
from asyncdist_server.wire.auth import ServerHandshake

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def what_is_said(rank: int, ranks: int) -> dict[str, Any]:
    made: dict[str, Any] = document(rank, "asked", under_way=True, with_tasks=False)
    entry = {"kind": "collective", "operation": "all_reduce", "collective": "all_reduce", "group": "default"}
    entry |= {"group_id": "0", "tag": 0, "sequence": 3, "issued": made["time"] - 1, "waiting_for": [7]}
    made |= {"entries": [entry], "job": "many", "world": {"id": "0", "name": "default", "size": ranks}}
    made |= {"groups": [{"id": "0", "name": "default", "ranks": list(range(ranks))}], "places": {}}
    return made | {"loop_turns": True, "loop_late": 0.0001}


def stand_in(rank: int, ranks: int) -> Handler:
    said = json.dumps([what_is_said(rank, ranks)]).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ServerHandshake(None, purpose=PURPOSE)
        while not handshake.done and (data := await reader.read(1024)):
            writer.write(handshake.receive(data))
        writer.write(LENGTH.pack(len(said)) + said)
        writer.close()

    return answer


@pytest.mark.slow("hundreds of ranks")
@pytest.mark.parametrize("ranks", [200, pytest.param(1000, marks=pytest.mark.thorough)])
@punctual
def test_many_ranks_are_shown_within_three_seconds(ranks: int) -> None:
    lines, took_s = asyncio.run(shown(ranks))
    assert len(lines) == ranks
    assert all("waits  waits in all_reduce #3 of group default" in line for line in lines), lines[:3]
    assert_within(3.0, took_s)


async def shown(ranks: int) -> tuple[list[str], float]:
    """What `ps` prints of them, and how long it took, the start of the interpreter included."""
    names = [f"\0{name_of('many', 'default', rank)}many" for rank in range(ranks)]
    servers = [await asyncio.start_unix_server(stand_in(rank, ranks), name) for rank, name in enumerate(names)]
    infos = [msgpack.packb({"endpoint": ["here", 1, name.encode(), []]}) for name in names]
    with serve_in_thread() as server:
        async with TCPStore("127.0.0.1", server.port, namespace="many") as store:
            await store.set("world/default/1/terms", msgpack.packb({"world_size": ranks}))
            await store.multi_set([f"world/default/1/info/{rank}" for rank in range(ranks)], infos)
            began_s = time.monotonic()
            where = ["--store", f"127.0.0.1:{server.port}", "--namespace", "many"]
            command = [sys.executable, "-m", "asyncdist", "ps", *where]
            asking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            printed, _ = await asking.communicate()
            took_s = time.monotonic() - began_s
    for each in servers:
        each.close()
    return printed.decode().splitlines()[2:], took_s
