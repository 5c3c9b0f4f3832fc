"""The end of connections: leaving, being lost, aborting, forking, and being cancelled anywhere on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import textwrap
import time
import traceback

import forked
import pytest
from mesh_world import Done, World, open_fds, received, world
from punctual import assert_within, punctual
from waiting import PATIENCE_S, eventually

from asyncdist.errors import ClosedError, PeerLostError
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.mesh import Mesh
from asyncdist.transport.protocol.frame import EAGER_BYTES, pack_key
from asyncdist.transport.protocol.operations import SendOp
from asyncdist.transport.protocol.peer import PeerCore

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])


async def connect(made: World) -> None:
    """Connect every rank with every other."""
    for rank in made.ranks:
        rank.mesh.connect(range(made.size))
    await eventually(lambda: all(r.mesh.statistics()["peers"] == {"open": made.size - 1} for r in made.ranks))


@TRANSPORTS
async def test_leaving_is_not_being_lost(transport: str) -> None:
    async with world(3, transport) as made:
        await connect(made)
        one, two, three = made.ranks
        pending = [one.receive(1), one.receive(None, tag=5, ranks=[1])]
        others = one.receive(None, tag=6, ranks=[1, 2])
        await two.mesh.close(PATIENCE_S)
        await eventually(lambda: one.left == [1] and three.left == [1])
        assert not one.lost
        assert not three.lost
        for future in pending:
            with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
                await future
            assert caught.value.rank == 1
        for call in (lambda: one.send(1, b"x"), lambda: one.receive(1), lambda: one.receive(None, ranks=[1])):
            with pytest.raises(PeerLostError, match="left"):
                call()
        three.send(0, b"still here", tag=6)
        assert await received(others) == b"still here"


@TRANSPORTS
async def test_everything_sent_before_leaving_arrives(transport: str) -> None:
    async with world(2, transport) as made:
        one, two = made.ranks
        big = os.urandom(8_000_000)
        incoming = [two.receive(0, tag) for tag in range(50)] + [two.receive(0, 99)]
        for tag in range(50):
            one.send(1, bytes([tag]), tag)
        one.send(1, big, 99)
        await one.mesh.close(PATIENCE_S)  # before the connection stands
        for tag, future in enumerate(incoming[:-1]):
            assert await received(future) == bytes([tag])
        assert await received(incoming[-1]) == big
        await eventually(lambda: two.left == [0])
        assert not two.lost


async def test_message_that_came_before_its_sender_left_can_still_be_received() -> None:
    async with world(2) as made:
        one, two = made.ranks
        one.send(1, b"last words")
        await one.mesh.close(PATIENCE_S)
        await eventually(lambda: two.left == [0])
        assert await received(two.receive(0)) == b"last words"
        with pytest.raises(PeerLostError, match="left"):
            two.receive(0)


@TRANSPORTS
async def test_both_leave_at_once(transport: str) -> None:
    for _ in range(10):
        async with world(2, transport) as made:
            await connect(made)
            await asyncio.gather(*(r.mesh.close(PATIENCE_S) for r in made.ranks))
            assert not made.ranks[0].lost
            assert not made.ranks[1].lost


async def test_all_of_eight_leave_at_once() -> None:
    async with world(8) as made:
        await connect(made)
        for r in made.ranks:
            for peer in range(8):
                if peer != r.rank:
                    r.send(peer, b"parting gift")
        await asyncio.gather(*(r.mesh.close(PATIENCE_S) for r in made.ranks))
        assert not any(r.lost for r in made.ranks)


@TRANSPORTS
async def test_a_goodbye_that_waited_for_what_is_then_dropped(transport: str) -> None:
    async with world(2, transport) as made:
        await connect(made)
        one, two = made.ranks
        one.send(1, bytes(EAGER_BYTES + 1))  # which nobody receives
        closing = asyncio.ensure_future(one.mesh.close(PATIENCE_S))
        await asyncio.sleep(0)
        one.mesh.drop_group(pack_key(1, 0, 0, 0, 0)[:8])
        await closing
        await eventually(lambda: two.left == [0])
        assert not one.lost


@punctual
async def test_dialing_a_rank_that_is_leaving() -> None:
    async with world(3) as made:
        one, two, three = made.ranks
        one.mesh.connect([1])
        await eventually(lambda: one.mesh.statistics()["peers"] == {"open": 1})
        two.send(0, bytes(EAGER_BYTES + 1))  # as long as nobody receives it, rank 1 stays in the flush
        closing = asyncio.ensure_future(two.mesh.close(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(PeerLostError, match="rank 1 has left"):
            await three.send(1, b"x")
        assert three.left == [1]
        assert not closing.done()
        started = time.monotonic()
        assert await received(one.receive(1)) == bytes(EAGER_BYTES + 1)
        await closing
        assert_within(PATIENCE_S / 2, time.monotonic() - started)  # else the refused rank held up the end
        await eventually(lambda: one.left == [1])
        assert not two.lost


async def test_closing_while_the_other_confirms_is_leaving() -> None:
    """Whoever may believe that the connection stands hears a goodbye on it."""
    for steps in range(12):
        async with world(2) as made:
            one, two = made.ranks
            pending = two.receive(0)
            for _ in range(steps):
                await asyncio.sleep(0)
            await one.mesh.close(PATIENCE_S)
            with pytest.raises(PeerLostError):
                await pending
            if one.mesh._links:  # else it never heard of rank 1, which found nobody there
                await eventually(lambda two=two: two.left or two.lost)
                assert two.left == [0], steps


@punctual
async def test_peer_that_never_hangs_up_is_cut_off() -> None:
    async with world(2) as made:
        await connect(made)
        one, two = made.ranks
        loop = asyncio.get_running_loop()
        connection = two.mesh._links[0]._connection
        assert connection is not None
        loop.remove_reader(connection._fd)  # as if its loop were blocked
        started = time.monotonic()
        await one.mesh.close(0.2)
        took_s = time.monotonic() - started
        assert took_s > 0.15
        assert_within(5, took_s)
        assert one.mesh.statistics()["sockets"] == 0
        loop.add_reader(connection._fd, connection._readable)
        await eventually(lambda: two.left == [0])


async def test_closing_without_waiting() -> None:
    async with world(3) as made:
        await connect(made)
        one, two, three = made.ranks
        pending = one.receive(1)
        await one.mesh.close(0)
        with pytest.raises((ClosedError, PeerLostError)):
            await pending
        await eventually(lambda: two.left + list(two.lost) == [0] and three.left + list(three.lost) == [0])


async def test_close_twice_and_together() -> None:
    async with world(2) as made:
        await connect(made)
        one = made.ranks[0]
        await asyncio.gather(one.mesh.close(PATIENCE_S), one.mesh.close(PATIENCE_S))
        await one.mesh.close(PATIENCE_S)
        one.mesh.abort()


async def test_close_of_an_idle_mesh_and_of_a_dialing_one() -> None:
    made = World(2, "unix")
    one, two = made.add(0), made.add(1)
    await two.mesh.close(1)
    made.addresses[1] = PeerAddress("elsewhere", (("192.0.2.1", 9),))
    pending = one.receive(1)
    await asyncio.sleep(0)
    await one.mesh.close(PATIENCE_S)
    with pytest.raises(ClosedError):
        await pending


@TRANSPORTS
async def test_abort_is_a_loss_to_the_others(transport: str) -> None:
    async with world(2, transport) as made:
        await connect(made)
        one, two = made.ranks
        mine, theirs, stream = one.receive(1), two.receive(0), two.send(0, bytes(10_000_000))
        one.mesh.abort()
        with pytest.raises(ClosedError, match="aborted"):
            await mine
        for future in (theirs, stream):
            with pytest.raises(PeerLostError, match="lost rank 0") as caught:
                await future
            assert caught.value.__cause__ is not None
        assert list(two.lost) == [0]
        assert one.mesh.statistics()["sockets"] == 0
        assert not one.lost


async def test_reset_connection() -> None:
    async with world(2, "tcp") as made:
        await connect(made)
        one, two = made.ranks
        connection = one.mesh._links[1]._connection
        assert connection is not None
        assert connection._sock is not None
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pending = two.receive(0)
        one.mesh.abort()
        with pytest.raises(PeerLostError) as caught:
            await pending
        assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_messages_before_a_reset_are_read_although_writing_fails() -> None:
    """A rank that writes into a broken connection still hears what the other said before."""
    async with world(2) as made:
        await connect(made)
        one, two = made.ranks
        loop = asyncio.get_running_loop()
        connection = two.mesh._links[0]._connection
        assert connection is not None
        loop.remove_reader(connection._fd)
        incoming = two.receive(0)
        one.send(1, b"before the end")
        closing = asyncio.ensure_future(one.mesh.close(0))
        await closing
        with contextlib.suppress(PeerLostError):
            for _ in range(3):
                two.send(0, b"into the void")
        assert await received(incoming) == b"before the end"
        with contextlib.suppress(ValueError):
            await eventually(lambda: two.lost or two.left)


PEER = textwrap.dedent(
    """
    import asyncio, sys
    sys.path.insert(0, {kits!r})
    from mesh_world import World
    from asyncdist.transport.addresses import PeerAddress

    async def main():
        made = World(2, {transport!r})
        peer = made.add(1)
        made.addresses[0] = PeerAddress.from_bytes(bytes.fromhex({address!r}))
        await peer.mesh.listen()
        peer.send(0, b"here")
        await asyncio.Event().wait()

    asyncio.run(main())
    """
)


@TRANSPORTS
@punctual
async def test_killed_peer_is_noticed_at_once(transport: str) -> None:
    made = World(2, transport)
    one = made.add(0)
    address = await one.mesh.listen()
    kits = os.path.join(os.path.dirname(__file__), "..", "..", "kits")
    script = PEER.format(kits=kits, transport=transport, address=address.to_bytes().hex())
    process = forked.Popen([sys.executable, "-c", script], text=True)
    try:
        assert await received(one.receive(None, ranks=[1])) == b"here"
        pending = [one.receive(1), one.send(1, bytes(10_000_000), tag=1), one.receive(None, ranks=[1])]
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        for future in pending:
            with pytest.raises(PeerLostError) as caught:
                await future
            assert caught.value.rank == 1
        assert_within(5, time.monotonic() - started)
        assert list(one.lost) == [1]
    finally:
        process.kill()
        process.wait()
        await one.mesh.close(5)


@TRANSPORTS
async def test_fork_leaves_the_parents_connections_alone(transport: str) -> None:
    async with world(2, transport) as made:
        await connect(made)
        one, two = made.ranks
        sockets = {fd for fd, what in open_fds().items() if what.startswith("socket:")}
        ours = {sock.fileno() for r in made.ranks for sock in r.mesh._context.sockets._sockets}
        assert ours <= sockets
        assert len(ours) == 4
        core = one.mesh.peer(1)
        pending = one.receive(1)
        op = SendOp(pack_key(1, 0, 0, 0, 0), memoryview(b"never"), b"", Done(), None)
        pid = os.fork()
        if pid == 0:
            os._exit(in_child(one.mesh, core, op, ours))
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        two.send(0, b"all is well")
        assert await received(pending) == b"all is well"
        assert not one.lost
        assert not two.lost


def in_child(mesh: Mesh, core: PeerCore, op: SendOp, inherited: set[int]) -> int:
    """What a forked child sees; the result is its exit code."""
    try:
        if inherited & open_fds().keys():
            return 2
        for call in (lambda: mesh.post_send(1, op), lambda: core.post_send(op), lambda: mesh.connect([1])):
            try:
                call()
            except ClosedError as error:
                if "forked" not in str(error):
                    return 3
            else:
                return 4
        mesh.abort()
        return 0 if mesh.broadcast_control([1], b"") == [] else 5
    except BaseException:
        traceback.print_exc()
        return 6


async def test_no_descriptor_is_left_after_many_worlds() -> None:
    before = len(open_fds())
    for number in range(10):
        async with world(3, "tcp" if number % 2 else "unix") as made:
            await connect(made)
            if number % 3 == 0:
                made.ranks[number % 3].mesh.abort()
    assert len(open_fds()) <= before + 1  # the loop may have opened its own meanwhile


# -- cancellation at every step


async def cancelled_after(steps: int, task: asyncio.Task[None]) -> bool:
    """Let `task` run for `steps` turns of the loop, then cancel it; False if it was done before."""
    for _ in range(steps):
        await asyncio.sleep(0)
        if task.done():
            await task
            return False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return True


@pytest.mark.parametrize("posted", ["nothing", "a message nobody receives", "a dial under way"])
async def test_close_cancelled_at_every_step(posted: str) -> None:
    steps = 1  # a task cancelled before its first step has not begun
    going = True
    while going and steps < 25:
        before = open_fds()
        made = World(2, "unix")
        one, two = made.add(0), made.add(1)
        await made.listen()
        if posted == "nothing":
            await connect(made)
        elif posted == "a message nobody receives":
            await connect(made)
            one.send(1, bytes(EAGER_BYTES + 1))
        else:
            one.send(1, b"x")
        going = await cancelled_after(steps, asyncio.ensure_future(one.mesh.close(PATIENCE_S)))
        assert one.mesh.statistics()["sockets"] == 0
        with pytest.raises(ClosedError):
            one.send(1, b"")
        await two.mesh.close(PATIENCE_S)
        left = {fd: what for fd, what in open_fds().items() if before.get(fd) != what and "eventpoll" not in what}
        assert not left
        steps += 1
    assert steps > 2


async def test_close_at_every_step_of_connecting() -> None:
    """Whatever state the dial is in when its rank closes or aborts, nothing stays and the other rank is unharmed."""
    for abort in (True, False):
        for steps in range(20):
            async with world(2) as made:
                one, two = made.ranks
                pending = one.receive(1)
                for _ in range(steps):
                    await asyncio.sleep(0)
                if abort:
                    one.mesh.abort()
                await one.mesh.close(PATIENCE_S)
                assert one.mesh.statistics()["sockets"] == 0
                with pytest.raises(ClosedError):
                    await pending
                await eventually(lambda two=two: two.mesh.statistics()["sockets"] == 1)
                await two.mesh.close(PATIENCE_S)
