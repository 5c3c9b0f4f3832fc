"""A child that is forked while operations are in flight ends as it likes, and its parent's operations go on."""

from __future__ import annotations

import pytest
from jobs import run_ranks

LEAVES = """
async def main():
    async with dist.init_process_group(timeout=30) as group:
        await group.all_reduce(np.ones(10))
        other = 1 - group.rank
        large, got = np.full(8_000_000, 1.0 + group.rank), np.zeros(8_000_000)
        works = [group.isend(large, other), group.irecv(got, other), group.all_reduce(np.ones(3_000_000))]
        works += [group.all_reduce(np.ones(3), tag=4)]
        waiting = group.irecv(np.zeros(5), None, 99)
        for _ in range({turns}):
            await asyncio.sleep(0)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                group.abort("not mine")
                sub = dist.new_group()
            except dist.ClosedError:
                sys.exit(7)  # on its way out of `async with`
            sys.exit(8)
        await asyncio.gather(*works)
        assert (got == 1.0 + other).all()
        assert waiting.cancel()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        await group.barrier()
try:
    dist.run(main())
except SystemExit as end:
    os._exit(end.code or 0)
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("turns", [0, 3, 15])
def test_the_child_ends_with_its_own_status(transport: str, turns: int) -> None:
    run_ranks(LEAVES.format(turns=turns), 2, {"ASYNCDIST_TRANSPORT": transport})


WATCHED_NEXT = """
import socket
from asyncdist.transport.fork import SocketSet
async def main():
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    near.setblocking(False)
    sockets = SocketSet(lambda: None, loop)
    sockets.add(near)
    came = loop.create_future()
    loop.add_reader(near.fileno(), lambda: came.done() or came.set_result(near.recv(1)))
    await asyncio.sleep({pause_s})  # is it watched, or only from the next turn on?
    loop.add_writer(near.fileno(), loop.remove_writer, near.fileno())
    child = os.fork()
    if not child:
        sys.exit(7)  # the loop runs on, to its end
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    far.send(b"x")
    assert await came == b"x"
    loop.remove_reader(near.fileno())
    sockets.close(near)
    far.close()
try:
    {run}(main())
except SystemExit as end:
    os._exit(end.code or 0)
"""


@pytest.mark.parametrize("run", ["dist.run", "asyncio.run"])
@pytest.mark.parametrize("pause_s", [0, 0.01])
def test_what_is_to_be_watched_from_the_next_turn_on_is_forgotten(run: str, pause_s: float) -> None:
    """Or uvloop aborts the child, as there is no such descriptor any more."""
    run_ranks(WATCHED_NEXT.format(run=run, pause_s=pause_s), 1)


APART = """
import fcntl, socket, threading
from asyncdist.transport.fork import SocketSet
HIGH = 200
async def main():
    loop = asyncio.get_running_loop()
    sockets = SocketSet(lambda: None, loop)
    near, far = socket.socketpair()
    go, told = os.pipe()
    await asyncio.sleep(0.01)
    child = os.fork()
    if not child:
        os.read(go, 1)
        sys.exit(7)  # the loop runs on, to its end
    high = fcntl.fcntl(near.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    loop.add_reader(high, lambda: None)
    far.send(b"x")
    await asyncio.sleep(0.01)
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    loop.remove_reader(high)
    woken = asyncio.Event()
    began_s = loop.time()
    threading.Timer(0.05, loop.call_soon_threadsafe, [woken.set]).start()
    await asyncio.wait_for(woken.wait(), 10)
    assert loop.time() - began_s < 5, "the child's loop has ended what wakes this one"
try:
    {run}(main())
except SystemExit as end:
    os._exit(end.code or 0)
"""


@pytest.mark.parametrize("run", ["dist.run", "asyncio.run"])
def test_the_childs_loop_is_not_its_parents(run: str) -> None:
    """They shared what the kernel watches: uvloop aborted at a descriptor it did not know."""
    run_ranks(APART.format(run=run), 1)


BOTH_RUN_ON = """
import socket
from asyncdist.transport.fork import SocketSet
async def watches(loop, turns):
    for _ in range(turns):
        near, far = socket.socketpair()
        near.setblocking(False)
        came = loop.create_future()
        loop.add_reader(near.fileno(), lambda: came.done() or came.set_result(near.recv(1)))
        far.send(b"x")
        assert await came == b"x"
        loop.remove_reader(near.fileno())
        near.close()
        far.close()
async def main():
    loop = asyncio.get_running_loop()
    sockets = SocketSet(lambda: None, loop)
    await watches(loop, 10)
    child = os.fork()
    await watches(loop, 3000)
    if not child:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    {run}(main())
except SystemExit as end:
    os._exit(end.code or 0)
"""


@pytest.mark.parametrize("run", ["dist.run", "asyncio.run"])
def test_parent_and_child_may_both_run_on(run: str) -> None:
    """The memory by which libuv asks the kernel to watch was theirs together: it aborted either, as a rule both."""
    run_ranks(BOTH_RUN_ON.format(run=run), 1)


STORING = """
from asyncdist_server import serve_in_thread
async def main():
    with serve_in_thread() as server:
        async with dist.TCPStore("127.0.0.1", server.port) as store:
            for turns in range(6):
                work = asyncio.ensure_future(store.set("key", bytes(8 << 20)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                child = os.fork()
                if not child:
                    sys.exit(7)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, turns
                await work
try:
    dist.run(main())
except SystemExit as end:
    os._exit(end.code or 0)
"""


def test_a_child_forked_while_a_request_is_sent_ends_with_its_own_status() -> None:
    run_ranks(STORING, 1)
