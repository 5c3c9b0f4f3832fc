"""kill -9 at every step of a pop, and the client is lost with the daemon: the item is back, unless it had arrived."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_kit import Daemon
from server_kit import SocketClient

from asyncdist.store import TCPStore
from asyncdist_server.journal.journal_thread import FAILPOINT_VARIABLE
from asyncdist_server.wire import messages as m

DEADLINE_S = 60.0
PROGRAM = """
import asyncdist_server.engine.engine as engine
from asyncdist_server.cli import main
engine.CLIENT_LINGER_S = 0.3
main(prog_name="asyncdist-server")
"""


class ForgetfulDaemon(Daemon):
    """It remembers clients that went away for less than a second."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", PROGRAM, *super().command()[3:]]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ForgetfulDaemon]:
    made = ForgetfulDaemon(tmp_path / "data", 0)
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            made.communicate()


@pytest.mark.parametrize("place", ["begun", "written", "committed"])
@pytest.mark.parametrize("count", [2, 3], ids=["the pop's commit", "the confirmation's commit"])
def test_a_kill_in_each_commit_of_a_pop(running: ForgetfulDaemon, place: str, count: int) -> None:
    running.start()
    with SocketClient(running.port) as other:
        other.ask(m.QUEUE_PUSH, b"q", b"1")
        other.ask(m.QUEUE_PUSH, b"q", b"2")
    running.stop()
    running.start(**{FAILPOINT_VARIABLE: f"{place}:{count}"})  # the first is that of a client that came
    with SocketClient(running.port, client_id=b"it is lost......") as lost:
        lost.send((m.QUEUE_POP, b"q", 0))
        if count == 2:
            with pytest.raises((EOFError, ConnectionResetError)):
                lost.reply()
        else:
            assert lost.reply() == (1, m.OK, b"1")
            lost.send()
        running.communicate()
    assert running.process is not None
    assert running.process.returncode == -9
    running.start()
    arrived = count == 3 and place == "committed"
    asyncio.run(expect_items(running.port, [b"2"] if arrived else [b"1", b"2"]))
    running.kill()
    running.start()
    asyncio.run(expect_items(running.port, [b"2"] if arrived else [b"1", b"2"]))


async def expect_items(port: int, expected: list[bytes]) -> None:
    """See what is in the queue when everybody is forgotten, and leave it there."""
    async with TCPStore("127.0.0.1", port, namespace="job") as store:
        async with asyncio.timeout(DEADLINE_S):
            while (await store.status())["clients_away"]:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.02)
        items = []
        while await store.queue_len("q"):
            items.append(await store.queue_pop("q"))
        assert items == expected
        for item in items:
            await store.queue_push("q", item)
