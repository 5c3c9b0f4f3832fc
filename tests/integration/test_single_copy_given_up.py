"""Long payloads read where they lie in another process that dies, is stopped, or gives up meanwhile."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from jobs import finish, run_ranks, start_ranks
from punctual import assert_within, punctual
from single_copy_kit import PRELUDE

NAMED_S = 1.0
"""How soon a failure is to name the rank."""

DYING = """
import threading

async def main():
    group = await dist.init_process_group(timeout=60)
    rank, victim, count = group.rank, 1, 3_000_000
    x = np.empty(count, np.int64)
    whole = np.empty(count * group.size, np.int64)
    number = 0
    try:
        while True:
            if number == 3 and rank == victim:
                after_s = random.random() * 0.04
                print(time.time() + after_s, flush=True)
                threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            x[:] = rank + number
            if KIND == "all_reduce":
                await group.all_reduce(x)
                assert (x == group.size * number + 3).all(), "altered"
            elif KIND == "broadcast":
                await group.broadcast(x, victim)
                assert (x == victim + number).all(), "altered"
            elif KIND in ("all_to_all", "pieces"):
                splits = [count] * group.size if KIND == "pieces" else None
                await group.all_to_all_single(whole, np.repeat(x, group.size), splits, splits)
                assert (whole.reshape(group.size, -1) == np.arange(group.size)[:, None] + number).all(), "altered"
            else:
                got = np.empty_like(x)
                await asyncio.gather(group.isend(x, (rank + 1) % 3, number), group.irecv(got, (rank - 1) % 3, number))
                assert (got == (rank - 1) % 3 + number).all(), "altered"
            number += 1
    except dist.DistError as error:
        told_s = time.time()
        x[:] = -1
        assert reads and number >= 3
        print(json.dumps([type(error).__name__, getattr(error, "rank", None), told_s]))
    if KIND == "ring":
        await asyncio.sleep(0.5)  # a lost message ends no group: the other rank must learn of the death by itself
    group.abort("enough")

try:
    dist.run(main())
except dist.DistError:
    pass
"""


@pytest.mark.slow("moves long vectors until a rank is killed")
@pytest.mark.parametrize(
    "kind",
    [
        "all_reduce",
        "pieces",
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("broadcast", "all_to_all", "ring")),
    ],
)
@punctual
def test_a_rank_killed_while_others_read_from_it(kind: str) -> None:
    ended = finish(start_ranks(PRELUDE + f"KIND = {kind!r}" + DYING, 3))
    assert ended[1].returncode == -signal.SIGKILL
    killed_s = float(ended[1].stdout)
    for rank in (ended[0], ended[2]):
        assert rank.returncode == 0, rank.stderr
        name, lost, told_s = json.loads(rank.stdout)
        assert lost == 1
        if name == "GroupAbortedError":  # it was between two calls when the other one told it
            continue
        assert name == "PeerLostError"
        assert_within(NAMED_S, told_s - killed_s)


TAKEN_BACK = """
async def main():
    dice = random.Random(int(os.environ["SEED"]))  # the same on all ranks
    options = {"progress": "thread"} if THREAD else {}
    async with dist.init_process_group(**options) as world:
        rank, count = world.rank, 1_500_000
        data, got = np.empty(count, np.int64), np.empty(count * world.size, np.int64)
        ends = {"well": 0, "badly": 0}
        for number in range(12):
            group = dist.new_group()
            await works_with_all(group, 50_000)
            who, after_s = dice.randrange(world.size), dice.choice((0, dice.random() * 0.006, dice.random() * 0.02))
            kind = dice.choice(("all_reduce", "broadcast", "all_gather", "all_to_all"))
            late_s = [dice.choice((0, 0, dice.random() * 0.01)) for _ in range(world.size)]
            await world.barrier()
            await asyncio.sleep(late_s[rank])
            data[:] = number + rank
            call = {
                "all_reduce": lambda: group.all_reduce(data),
                "broadcast": lambda: group.broadcast(data, who),
                "all_gather": lambda: group.all_gather_into_tensor(got, data),
                "all_to_all": lambda: group.all_to_all_single(got[:count], data),
            }[kind]
            try:
                work = call()
                if rank == who:
                    await asyncio.sleep(after_s)
                    if not work.done():
                        group.abort("changed my mind")
                        data[:], got[:] = -666, -666
                        raise dist.GroupAbortedError("mine; with a thread the operation may have ended well meanwhile")
                await work
            except dist.DistError:
                data[:], got[:] = -666, -666
                ends["badly"] += 1
            else:
                ends["well"] += 1
                block = count // world.size
                if kind == "all_reduce":
                    assert (data == world.size * number + world.size * (world.size - 1) // 2).all()
                elif kind == "broadcast":
                    assert (data == number + who).all()
                elif kind == "all_gather":
                    assert (got.reshape(world.size, -1) == number + np.arange(world.size)[:, None]).all()
                else:
                    assert (got[:count].reshape(world.size, -1) == number + np.arange(world.size)[:, None]).all()
            await world.barrier()
            try:
                await group.close()
            except dist.DistError:
                pass
        print(json.dumps([ends, reads]))
dist.run(main())
"""


@pytest.mark.parametrize("thread", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_what_was_lent_and_taken_back_is_nobodys_result(thread: bool) -> None:
    """Who gives up alters the arrays at once: others have ended well before, or do not."""
    ended = run_ranks(PRELUDE + f"THREAD = {thread}" + TAKEN_BACK, 3, {"SEED": "5"})
    assert all(json.loads(rank.stdout)[1] > 0 for rank in ended)
    assert any(json.loads(rank.stdout)[0]["badly"] > 1 for rank in ended)


ALTERED = """
import mmap

STEPS = mmap.mmap(os.open(os.environ["STEPS"], os.O_RDWR), 4096)
left = 0

def held_up(self, address, target, nbytes):
    global left
    left -= nbytes
    if left == 0:
        STEPS[0] = 1
        while STEPS[0] == 1:
            time.sleep(0.0001)
    counted(self, address, target, nbytes)

ProcessMemory.read = held_up

async def main():
    global left
    async with dist.init_process_group() as world:
        await works_with_all(world)
        group = dist.new_group()
        await works_with_all(group)
        before, rank = reads, world.rank
        x = np.full(COUNT, rank + 1, np.int64)
        got = np.zeros(COUNT * 2, np.int64)
        await world.barrier()
        left = COUNT * 8 * rank
        if KIND == "send":
            work = group.isend(x, 1) if rank == 0 else group.irecv(got[:COUNT], 0)
        elif KIND == "broadcast":
            work = group.broadcast(x, 0)
        elif KIND == "all_gather":
            work = group.all_gather_into_tensor(got, x)
        else:
            work = group.all_reduce(x)
        try:
            if rank == 0:
                while not STEPS[0] and not work.done():
                    await asyncio.sleep(0)
                assert not work.done()
                group.abort("changed my mind")
                x[:] = -666
                STEPS[0] = 2
            await work
            print("done")
        except dist.GroupAbortedError as error:
            print(error.rank)
        assert rank == 0 or reads > before
        await world.barrier()
        try:
            await group.close()
        except dist.DistError:
            pass
dist.run(main())
"""


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather", "send"])
def test_what_was_altered_while_it_was_read_is_no_result(kind: str, tmp_path: Path) -> None:
    """One item, or the last piece of a message: that it was read is all that is missing."""
    steps = tmp_path / "steps"
    steps.write_bytes(bytes(4096))
    count = 600_000 if kind == "send" else 200_000
    ended = run_ranks(PRELUDE + f"KIND, COUNT = {kind!r}, {count}" + ALTERED, 2, {"STEPS": str(steps)}, 20.0)
    assert [rank.stdout for rank in ended] == ["0\n", "0\n"]


USED_AGAIN = """
def limit_s():
    return random.choice((0.2, random.random() * 0.004))

async def main():
    async with dist.init_process_group() as group:
        await works_with_all(group)
        rank, size, arrays, ends = group.rank, group.size, [], {"well": 0, "late": 0}

        async def end(work, array, expected):
            try:
                await work
                assert (array == expected).all()
                ends["well"] += 1
            except dist.CollectiveTimeoutError:
                ends["late"] += 1
            array[:] = -1
            arrays.append(array)

        for number in range(1, 21):  # tags whose messages nobody else meets
            await group.barrier()
            x, got = np.full(1_000_000, rank + number), np.zeros(1_000_000, np.int64)
            sent = group.isend(x, (rank + 1) % size, number, timeout=limit_s())
            received = group.irecv(got, (rank - 1) % size, number, timeout=limit_s())
            await asyncio.gather(end(sent, x, rank + number), end(received, got, (rank - 1) % size + number))
        await works_with_all(group)
        assert all((array == -1).all() for array in arrays), "written late"
        print(json.dumps([ends, reads]))
dist.run(main())
"""


@pytest.mark.slow("moves many long messages")
def test_arrays_are_used_again_as_soon_as_their_messages_are_over() -> None:
    """Nothing is read or written late, whichever end has given up, or both."""
    for rank in run_ranks(PRELUDE + USED_AGAIN, 3):
        ends, reads = json.loads(rank.stdout)
        assert ends["late"] >= 5
        assert reads > 10


LOOP_ENDED = """
import mmap, uvloop

STEPS = mmap.mmap(os.open(os.environ["STEPS"], os.O_RDWR), 4096)

async def main():
    group = await dist.init_process_group()
    await works_with_all(group)
    x = np.empty(200_000, np.int64) if SINGLE_COPY else group.empty(200_000, np.int64)
    x[:] = group.rank + 1
    await group.broadcast(x, 0)  # all have mapped it then
    await group.barrier()
    if group.rank == 0:
        work = group.broadcast(x, 0)
        assert not work.done()
        return work, x
    while not STEPS[0]:
        await asyncio.sleep(0)
    work = group.broadcast(x, 0)
    for _ in range(100):
        await asyncio.sleep(0)
    STEPS[0] = 2
    try:
        await work
        print(x[0])
    except dist.PeerLostError as error:
        print("lost", error.rank)

loop = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[LOOP]()
kept = loop.run_until_complete(main())
loop.close()
if kept is not None:
    kept[1][:] = -666
    STEPS[0] = 1
    while STEPS[0] == 1:
        time.sleep(0.001)
os._exit(0)
"""


@pytest.mark.parametrize(("loop", "single_copy"), [("asyncio", True), ("uvloop", False)])
def test_what_a_loop_that_ended_had_lent_is_nobodys_result(loop: str, single_copy: bool, tmp_path: Path) -> None:
    """Nobody closed its group, and what was lent is kept by a work that will never be done."""
    steps = tmp_path / "steps"
    steps.write_bytes(bytes(4096))
    code = PRELUDE + f"LOOP, SINGLE_COPY = {loop!r}, {single_copy}" + LOOP_ENDED
    ended = run_ranks(code, 2, {"STEPS": str(steps)})
    assert ended[1].stdout == "lost 0\n"
