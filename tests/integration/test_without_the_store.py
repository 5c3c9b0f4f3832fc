"""A world that has formed needs its store no more: ranks that never spoke meet, and no healthy rank is blamed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from jobs import Ended, finish, start_ranks
from punctual import punctual

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills what it has forked")

LEFT_S = 2.0
"""Within which a world is left whose store is gone: it took nine seconds."""

RANK = """
import json
import msgpack

def formed():
    "Say so, and wait until the store has been killed."
    print("formed", flush=True)
    with open(os.environ["GONE"] + os.environ["RANK"]) as gone:
        gone.read()

async def every_pair(group):
    peers = [peer for peer in range(group.size) if peer != group.rank]
    works = [group.isend(np.full(3, float(group.rank)), peer, tag=5) for peer in peers]
    for peer in peers:
        x = np.zeros(3)
        assert await group.recv(x, peer, tag=5) == peer
        assert (x == peer).all()
    for work in works:
        await work

async def all_collectives(group):
    size, rank, ranks = group.size, group.rank, np.arange(group.size)
    for count in (1, 50_000):
        x = np.full(count, rank + 1.0)
        await group.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()
        x = np.full(count, float(rank))
        await group.broadcast(x, size - 1)
        assert (x == size - 1).all()
        x = np.full(count, 1.0)
        await group.reduce(x, 0)
        assert rank or (x == size).all()
        x, parts = np.zeros(count), [np.zeros(count) for _ in range(size)]
        await group.all_gather(parts, np.full(count, float(rank)))
        assert [part[0] for part in parts] == list(ranks)
        await group.gather(np.full(count, float(rank)), parts if not rank else None, 0)
        await group.scatter(x, [np.full(count, float(to)) for to in ranks] if not rank else None, 0)
        assert (x == rank).all()
        await group.reduce_scatter(x, [np.full(count, float(to)) for to in ranks])
        assert (x == rank * size).all()
        await group.all_to_all(parts, [np.full(count, float(rank)) for _ in ranks])
        assert [part[0] for part in parts] == list(ranks)
    await group.barrier()
"""


@contextlib.contextmanager
def mortal_daemon() -> Iterator[tuple[str, forked.Popen[str]]]:
    """A store daemon to be killed; gives host:port and its process."""
    command = [sys.executable, "-m", "asyncdist_server", "--port", "0"]
    with forked.Popen(command, stdout=forked.subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            yield next(word for word in ready.split() if ":" in word and word[-1].isdigit()), process
        finally:
            process.kill()


def run_without_the_store(code: str, size: int, tmp_path: Path, **environ: str) -> list[Ended]:
    """Ranks whose daemon is killed, for good, once each of them has said that its world has formed."""
    gone = str(tmp_path / "gone.")
    for rank in range(size):
        os.mkfifo(gone + str(rank))
    with mortal_daemon() as (store, daemon):
        ranks = start_ranks(RANK + code, size, {"ASYNCDIST_STORE": store, "GONE": gone, **environ})
        said = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
        for number, line in enumerate(said):
            if line == "formed\n":
                Path(gone + str(number)).write_text("gone")
        return finish(ranks)


EVERYTHING = """
async def main():
    async with dist.init_process_group() as group:
        formed()
        await every_pair(group)
        halves = [dist.new_group(list(range(first, group.size, 2))) for first in range(2)]
        await all_collectives(halves[group.rank % 2])
        await all_collectives(dist.new_group())
        await all_collectives(group)
        assert not group.world.lost
        began_s = time.monotonic()
    print(time.monotonic() - began_s)

dist.run(main())
"""


@pytest.mark.parametrize(
    "transport", ["auto", "tcp", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("shm", "unix"))]
)
@punctual
def test_ranks_that_never_spoke_do_everything_when_the_daemon_is_gone(transport: str, tmp_path: Path) -> None:
    for rank in run_without_the_store(EVERYTHING, 6, tmp_path, ASYNCDIST_TRANSPORT=transport):
        assert rank.returncode == 0, rank.stderr
        assert rank.stderr == ""
        assert float(rank.stdout) < LEFT_S


LARGE = """
from asyncdist.world import address_book
address_book.TOLD_AT_ONCE_BYTES, address_book.PIECE_BYTES, address_book.FAN_OUT = 0, 300, 2

async def main():
    async with dist.init_process_group() as group:
        while not group.world._rendezvous.book.complete:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(formed)                     # it tells others meanwhile
        await every_pair(group)
        await group.barrier()
        assert not group.world.lost

dist.run(main())
"""


def test_ranks_of_a_large_world_tell_each_other_where_all_listen(tmp_path: Path) -> None:
    for rank in run_without_the_store(LARGE, 8, tmp_path):
        assert rank.returncode == 0, rank.stderr


UNTOLD = """
from asyncdist.world import address_book
from asyncdist.world.world import World
address_book.TOLD_AT_ONCE_BYTES = 0
World.pass_on_addresses = lambda self: None             # as if the rank that has the book were slow
from asyncdist.world import rendezvous
rendezvous.LOOK_UP_LIMIT_S = 0.2 + 0.1 * int(os.environ["RANK"])    # one knows first, and tells the other

async def main():
    async with dist.init_process_group() as group:
        decider = group.world._decider
        others = [rank for rank in range(3) if rank != decider]
        formed()
        if group.rank != decider:
            try:
                await group.send(np.ones(1), sum(others) - group.rank)
            except dist.DistStoreError as error:
                print(error)
        try:
            await group.all_reduce(np.ones(1_000))
        except (dist.DistStoreError, dist.CollectiveMismatchError) as error:
            print(error)
        if group.rank == decider:
            await asyncio.sleep(0.3)                    # the last look-up fails when the operation has ended
            for first, addresses in group.world._rendezvous.book.pieces():
                for other in others:
                    group.world._send(other, msgpack.packb(["addresses", first, addresses]))
        else:
            while not group.world._rendezvous.book.complete:
                await asyncio.sleep(0.001)
        x = np.ones(1_000)
        await group.all_reduce(x)
        assert (x == 3).all()
        assert not group.world.lost

dist.run(main())
"""


def test_who_was_not_told_an_address_says_so_and_loses_nobody(tmp_path: Path) -> None:
    said = ""
    environ = {"ASYNCDIST_TRANSPORT": "tcp", "ASYNCDIST_ALGO": "all_reduce:ring"}  # in which each needs all
    for rank in run_without_the_store(UNTOLD, 3, tmp_path, **environ):
        assert rank.returncode == 0, rank.stderr
        said += rank.stdout
    assert said.count("send (rank ") == 2
    assert said.count("all_reduce #0: rank ") == 3
    assert said.count("does not know where rank ") == 5
    assert said.count("the store does not say: ") == 5


KILLED = """
async def main():
    group = await dist.init_process_group()
    if os.environ.get("ELSEWHERE"):
        object.__setattr__(group.world.mesh._context, "host_id", f"host {group.rank}")
    formed()
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        await group.recv(np.zeros(1), 1)                # it has seen what we are to hear
    began_s = time.monotonic()
    try:
        await group.recv(np.zeros(1), 2)
    except dist.PeerLostError as error:
        print(json.dumps([time.monotonic() - began_s, error.rank, error.left, str(error)]))
    if group.rank == 1:
        await group.send(np.zeros(1), 0)
    await group.close()

dist.run(main())
"""


@punctual
def test_who_was_killed_unmet_is_named_though_the_store_is_gone(tmp_path: Path) -> None:
    for rank in run_without_the_store(KILLED, 3, tmp_path)[:2]:
        assert rank.returncode == 0, rank.stderr
        named_s, lost, left, text = json.loads(rank.stdout)
        assert (lost, left) == (2, False)
        assert "it takes no connections any more: it has ended" in text
        assert "the store cannot be asked whether it left in order" in text
        assert named_s < 1.0
