"""What the launcher of this host tells: which ranks are lost, as their host answers no more, and which are stopped
(`launch/losses.py`).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from asyncdist.concurrency import trace as events

VARIABLE: Final = "ASYNCDIST_LOSSES"
"""Where the launcher listens; `@` stands for the zero byte of an abstract name."""

OnLost: TypeAlias = Callable[[range, str], None]
OnStopped: TypeAlias = Callable[[frozenset[int]], None]


class _Reader(asyncio.Protocol):
    def __init__(self, on_lost: OnLost, on_stopped: OnStopped) -> None:
        self._on_lost = on_lost
        self._on_stopped = on_stopped
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "stopped" in told:
                self._on_stopped(frozenset(told["stopped"]))
                continue
            for first, stop in told["ranks"]:
                self._on_lost(range(first, stop), told["why"])


async def hear_losses(
    rank: int, world_size: int, environ: Mapping[str, str], on_lost: OnLost, on_stopped: OnStopped
) -> asyncio.BaseTransport | None:
    """Call `on_lost` with each range of ranks that the launcher has lost, until the transport is closed.

    `on_stopped` is called with all ranks whose processes are stopped, whenever others are than before.

    None if there is no launcher to tell, or this world's ranks are numbered otherwise than the launcher's.
    """
    address = environ.get(VARIABLE)
    if not address or (environ.get("RANK"), environ.get("WORLD_SIZE")) != (str(rank), str(world_size)):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)  # at once, or refused
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Reader(on_lost, on_stopped), sock=sock)
        return transport
    except OSError as error:
        sock.close()
        events.info("rank %d: the launcher cannot tell of losses: %s", rank, error)
        return None
