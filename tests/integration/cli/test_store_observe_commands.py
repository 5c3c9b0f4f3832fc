"""`asyncdist store watch|status|waits` against a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from asyncdist.cli.store_commands import store_group
from asyncdist.store import TCPStore
from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with serve_in_thread() as running:
        yield running


def invoke(server: ThreadedServer, *arguments: str) -> str:
    where = ("--store", f"127.0.0.1:{server.port}", "--namespace", "job")
    result = CliRunner().invoke(store_group, [*where, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def asking(server: ThreadedServer, *arguments: str) -> str:
    """Run a command while a client of rank 5 waits for a key that never comes."""
    output: list[str] = []

    async def main() -> None:
        async with TCPStore("127.0.0.1", server.port, namespace="job", rank=5) as store:
            waiting = asyncio.ensure_future(store.wait(["absent"]))
            await store.num_keys()
            await asyncio.to_thread(lambda: output.append(invoke(server, *arguments)))
            waiting.cancel()

    asyncio.run(main())
    return output[0]


def test_waits_names_the_client_and_the_key(server: ThreadedServer) -> None:
    assert invoke(server, "waits") == "nobody waits\n"
    line = asking(server, "waits")
    assert "wait absent" in line
    assert "rank 5" in line
    assert "pid" in line
    assert "of job" in asking(server, "waits", "--all-namespaces")
    (found,) = json.loads(asking(server, "waits", "--json"))
    assert (found["operation"], found["keys"], found["rank"]) == ("wait", ["absent"], 5)


HOSTILE = "k\x1b]0;title\x07\n     99.9 s  wait forged\udcff"
SHOWN = r"k\x1b]0;title\x07\x0a     99.9 s  wait forged\xff"


def test_no_key_writes_to_the_terminal_more_than_its_name(server: ThreadedServer) -> None:
    """Torch's clients need no token to set one."""

    async def main() -> None:
        async with TCPStore("127.0.0.1", server.port, namespace="job") as store:
            async with store.watch("k") as watch:
                since = watch.revision
                await store.set(HOSTILE, "v")
            waiting = asyncio.ensure_future(store.wait([HOSTILE, HOSTILE + "!"]))
            await store.num_keys()
            assert SHOWN in await asyncio.to_thread(invoke, server, "waits")
            assert json.loads(await asyncio.to_thread(invoke, server, "waits", "--json"))[0]["keys"] == [SHOWN + "!"]
            waiting.cancel()
            seen = await asyncio.to_thread(invoke, server, "watch", "k", "--count", "1", "--from-revision", str(since))
            assert SHOWN in seen
            again = ("watch", "k", "--count", "1", "--from-revision", str(since), "--json")
            assert json.loads(await asyncio.to_thread(invoke, server, *again))["key"] == SHOWN
            assert await asyncio.to_thread(invoke, server, "ls", "k") == SHOWN + "\n"
            assert await asyncio.to_thread(on_a_terminal, server, "ls", "k") == SHOWN + "\r\n"
            await store.delete_key(HOSTILE)

    asyncio.run(main())


def on_a_terminal(server: ThreadedServer, *arguments: str) -> str:
    """Run a command that writes to a terminal."""
    ours, theirs = pty.openpty()
    try:
        where = ("--store", f"127.0.0.1:{server.port}", "--namespace", "job")
        subprocess.run([sys.executable, "-m", "asyncdist", "store", *where, *arguments], stdout=theirs, check=True)
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_waits_says_where_to_ask_when_no_key_is_waited_for(server: ThreadedServer) -> None:
    where = ["--store", f"127.0.0.1:{server.port}", "--namespace", "job", "waits"]
    assert "asyncdist why" in CliRunner().invoke(store_group, where).stderr

    async def main() -> None:
        async with TCPStore("127.0.0.1", server.port, namespace="job") as store, store.watch("k"):
            assert "asyncdist why" in (await asyncio.to_thread(CliRunner().invoke, store_group, where)).stderr
            waiting = asyncio.ensure_future(store.get("absent"))
            await store.num_keys()
            assert not (await asyncio.to_thread(CliRunner().invoke, store_group, where)).stderr
            waiting.cancel()

    asyncio.run(main())


def test_clients_are_those_of_the_namespace_or_of_all(server: ThreadedServer) -> None:
    assert "rank 5" not in invoke(server, "clients")
    (line,) = asking(server, "clients").splitlines()
    assert line.startswith("rank 5 ")
    assert "pid" in line
    assert line.endswith(" 1 waiting")
    (found,) = json.loads(asking(server, "clients", "--json"))
    assert (found["namespace"], found["rank"], found["waits"], found["away"]) == ("job", 5, 1, False)

    async def main() -> None:
        async with TCPStore("127.0.0.1", server.port, namespace="an\x1bother") as store:
            await store.set("k", "v")
            assert await asyncio.to_thread(invoke, server, "clients") == ""
            assert "of an\\x1bother\n" in await asyncio.to_thread(invoke, server, "clients", "--all-namespaces")
            assert "an\\x1bother\tk\n" in await asyncio.to_thread(invoke, server, "ls", "--all-namespaces")
            await store.delete_key("k")

    asyncio.run(main())


def test_status_counts(server: ThreadedServer) -> None:
    invoke(server, "set", "key", "value")
    status = json.loads(asking(server, "status", "--json"))
    assert (status["keys"], status["waiters"], status["connections"]) == (1, 1, 2)
    assert len(status["incarnation"]) == 32
    lines = invoke(server, "status")
    for name in ("uptime", "connections", "keys", "leases", "memory", "incarnation"):
        assert name in lines


def test_watch_prints_what_happens(server: ThreadedServer) -> None:
    done = threading.Event()

    def write() -> None:
        async def main() -> None:
            async with TCPStore("127.0.0.1", server.port, namespace="job") as store:
                while not done.is_set():  # until the watch has begun and seen enough
                    await store.set("w/a", "1")
                    await store.set("v", "1")
                    await store.delete_key("w/a")

        asyncio.run(main())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        lines = invoke(server, "watch", "w/", "--count", "4").splitlines()
        found = [json.loads(line) for line in invoke(server, "watch", "w/", "--count", "2", "--json").splitlines()]
    finally:
        done.set()
        writer.join()
    assert {line.split(" ", 1)[1] for line in lines} == {"set w/a '1'", "delete w/a"}
    assert {(event["kind"], event["key"]) for event in found} == {("set", "w/a"), ("delete", "w/a")}
