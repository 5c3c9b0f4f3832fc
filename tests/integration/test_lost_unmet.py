"""Ranks killed before any survivor had met them: who waits for any source, or dials from another host, hears of it.

The store knows, as their connections to it end. That alone proves nothing: a rank that computes, or is stopped, is
waited for, also when the connection to the store broke.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import textwrap
from typing import Any

import pytest
from jobs import daemon, finish, start_ranks
from punctual import assert_within, punctual

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

NAMED_S = 1.0
"""Within which a rank that is gone is named."""
BUSY_S = 2.0
ATTEMPT_S = 1.0
SILENT_S = 15.0
"""A host that answers nothing was dialed for a minute; one try takes ATTEMPT_S here, and then it is asked whether it is
gone."""

RANK = """
import contextlib, json, pathlib, socket
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.mesh import Mesh

VICTIM, PATIENCE_S = 2, 60

def strike():
    pathlib.Path(os.environ["STRUCK"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

async def ready(group, store=None):
    store = store or group.world.store
    await store.set(f"ready {group.rank}", b"")
    await store.wait([f"ready {rank}" for rank in range(group.size)])

async def told(awaitable):
    try:
        return await asyncio.wait_for(awaitable, PATIENCE_S)
    except dist.DistError as error:
        print(json.dumps([time.time(), type(error).__name__, getattr(error, "rank", None), str(error)]))

def cut_off_the_store():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            port = os.environ["ASYNCDIST_STORE"].rpartition(":")[2]
            if sock.family == socket.AF_INET and sock.getpeername()[1] == int(port):
                sock.shutdown(socket.SHUT_RDWR)

def elsewhere(group):
    "As if each rank were on a host of its own."
    PeerAddress.loopback = property(lambda self: False)
    object.__setattr__(group.world.mesh._context, "host_id", f"host {group.rank}")
"""


def survivors(code: str, struck: Any, within_s: float = NAMED_S, **environ: str) -> list[list[Any]]:
    """What the survivors of rank 2 were told, and that within a second, or `within_s`."""
    with daemon() as store:
        where = {"ASYNCDIST_STORE": store, "STRUCK": str(struck), **environ}
        ended = finish(start_ranks(RANK + textwrap.dedent(code), 3, where))
    found = []
    for rank in ended:
        if rank.rank != 2:
            assert rank.returncode == 0, rank.stderr
            found += [json.loads(line) for line in rank.stdout.splitlines()]
    struck_s = float(struck.read_text())
    for at_s, *_ in found:
        assert_within(within_s, at_s - struck_s)
    return [line[1:] for line in found]


@pytest.mark.parametrize("progress", ["loop", "thread"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("elsewhere", [False, True])
@punctual
def test_receives_from_any_source_hear_who_was_killed(
    transport: str, progress: str, elsewhere: bool, tmp_path: Any
) -> None:
    if elsewhere and transport != "tcp":
        pytest.skip("other hosts are reached by TCP")
    code = """
    async def main():
        host, _, port = os.environ["ASYNCDIST_STORE"].partition(":")
        async with dist.TCPStore(host, int(port)) as store:
            await meet(store)

    async def meet(store):
        where = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        group = await dist.init_process_group(timeout=60, progress=os.environ["PROGRESS"], **where)
        if os.environ["ELSEWHERE"] == "True":
            elsewhere(group)
        waits = group.irecv(np.zeros(1), None)
        await ready(group, store)
        if group.rank == VICTIM:
            strike()
        await told(waits)
        await store.set(f"told {group.rank}", b"")
        await store.wait(["told 0", "told 1"])  # else what the other sends now may come in place of the news
        peer = 1 - group.rank
        sent = group.isend(np.ones(1), peer)
        assert await group.recv(np.zeros(1), None) == peer
        await sent
        await group.close()
    dist.run(main())
    """
    environ = {"ASYNCDIST_TRANSPORT": transport, "PROGRESS": progress, "ELSEWHERE": str(elsewhere)}
    found = survivors(code, tmp_path / "struck", **environ)
    assert [line[:2] for line in found] == [["PeerLostError", 2]] * 2, found


@punctual
def test_a_receive_that_begins_after_the_kill_hears_of_it_while_another_waits_for_others(tmp_path: Any) -> None:
    code = """
    async def main():
        group = await dist.init_process_group(timeout=60)
        without, pair = dist.new_group([0, 1]), dist.new_group([0, 2])
        mesh, noticed = group.world.mesh, asyncio.Event()
        absences = mesh.absences

        async def noticing():
            async for rank in absences():
                noticed.set()
                yield rank

        mesh.absences = noticing
        if group.rank == 0:
            waits = without.irecv(np.zeros(1), None)
        await ready(group)
        if group.rank == VICTIM:
            strike()
        if group.rank == 0:
            await noticed.wait()

            async def receive():
                await pair.recv(np.zeros(1), None)

            await told(receive())
            await group.world.store.set("told", b"")
            await waits
        else:
            await group.world.store.wait(["told"])
            await without.isend(np.ones(1), 0)
        await group.close()
    dist.run(main())
    """
    found = survivors(code, tmp_path / "struck")
    assert [line[:2] for line in found] == [["PeerLostError", 2]], found


@punctual
def test_who_dials_another_host_hears_who_was_killed_there(tmp_path: Any) -> None:
    code = """
    async def main():
        group = await dist.init_process_group(timeout=60)
        elsewhere(group)
        await ready(group)
        if group.rank == VICTIM:
            strike()
        while await group.world.store.check([f"world/default/1/here/{VICTIM}"]):
            await asyncio.sleep(0.001)  # else it may be met before it is killed
        await told(group.isend(np.ones(1_000_000), VICTIM) if group.rank else group.recv(np.zeros(1), VICTIM))
        await group.close()
    dist.run(main())
    """
    found = survivors(code, tmp_path / "struck", ASYNCDIST_TRANSPORT="tcp")
    assert [line[:2] for line in found] == [["PeerLostError", 2]] * 2
    assert all("its own to the store has ended" in text for *_, text in found), found


@pytest.mark.slow("waits until a host does not answer")
def test_whose_host_answers_no_more_is_dialed_no_longer_than_the_store_knows_it(tmp_path: Any) -> None:
    """A listener whose queue is full answers nobody, as a host that is down."""
    code = f"""
    from asyncdist.transport.connections import dialer

    dialer.ATTEMPT_TIMEOUT_S = {ATTEMPT_S}

    async def main():
        group = await dist.init_process_group(timeout=60)
        elsewhere(group)
        full = PeerAddress("host 2", (("127.0.0.1", int(os.environ["FULL"])),))
        group.world._rendezvous.book.learn(VICTIM, [full.to_bytes()])
        await ready(group)
        if group.rank == VICTIM:
            strike()
        await told(group.recv(np.zeros(1), VICTIM if group.rank else None))
        await group.close()
    dist.run(main())
    """
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as clients:
        for client in [clients.enter_context(socket.socket()) for _ in range(4)]:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        where = {"ASYNCDIST_TRANSPORT": "tcp", "FULL": str(full.getsockname()[1])}
        found = survivors(code, tmp_path / "struck", within_s=SILENT_S, **where)
    assert [line[:2] for line in found] == [["PeerLostError", 2]] * 2, found
    assert any("(the connection is not answered), and its own to the store has ended" in text for *_, text in found)


@punctual
def test_who_was_killed_before_it_took_connections(tmp_path: Any) -> None:
    code = """
    async def main():
        if int(os.environ["RANK"]) == VICTIM:
            Mesh.accept = lambda self: strike()
        group = await dist.init_process_group(timeout=60)
        await told(group.barrier())
        await told(group.recv(np.zeros(1), VICTIM))
        await group.close()
    dist.run(main())
    """
    found = survivors(code, tmp_path / "struck")
    assert [line[:2] for line in found] == [["PeerLostError", 2]] * 4, found


@pytest.mark.slow("a rank is away for two seconds")
@pytest.mark.parametrize(
    ("how", "elsewhere"),
    [
        ("computes", True),
        ("is stopped", False),
        pytest.param("computes", False, marks=pytest.mark.thorough),
        pytest.param("is stopped", True, marks=pytest.mark.thorough),
    ],
)
def test_who_computes_or_is_stopped_is_waited_for(how: str, elsewhere: bool) -> None:
    """Also if its connection to the store broke, and it makes no new one meanwhile."""
    code = f"""
    async def main():
        group = await dist.init_process_group(timeout=60)
        if {elsewhere}:
            elsewhere(group)
        waits = group.irecv(np.zeros(1), None) if group.rank != VICTIM else None
        await ready(group)
        if group.rank != VICTIM:
            assert await waits == VICTIM
            await group.send(np.ones(1), VICTIM)
        elif {how == "computes"}:
            cut_off_the_store()
            time.sleep({BUSY_S})
        else:
            if os.fork() == 0:
                time.sleep({BUSY_S})
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            cut_off_the_store()
            os.kill(os.getpid(), signal.SIGSTOP)
        if group.rank == VICTIM:
            works = [group.isend(np.ones(1), rank) for rank in range(2)]
            for _ in works:
                await group.recv(np.zeros(1), None)
        await group.close()
    dist.run(main())
    """
    with daemon() as store:
        transport = "tcp" if elsewhere else "auto"
        where = {"ASYNCDIST_STORE": store, "ASYNCDIST_TRANSPORT": transport}
        for rank in finish(start_ranks(RANK + textwrap.dedent(code), 3, where)):
            assert rank.returncode == 0, rank.stderr
