"""Ordinary scripts as real processes: every way to leave, to die and to be interrupted."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from jobs import finish, run_ranks, start_ranks
from punctual import Late, assert_within, punctual

BLOCKING = """
import threading
import asyncdist.blocking as dist

def say(*words):
    print(*words, flush=True)
"""


def wait_for_line(process: subprocess.Popen[str], word: str) -> None:
    """Wait until the process says `word` on a line of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the rank ended without saying {word!r}:\n{process.communicate()[1]}")


def test_a_script_as_for_torch() -> None:
    code = """
import uvloop
loop = uvloop.new_event_loop()  # the first one of a process opens a pipe that stays
loop.run_until_complete(asyncio.sleep(0))
loop.close()
before = set(os.listdir("/proc/self/fd")), threading.active_count(), sys.getswitchinterval()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for elements in (1, 1000, 1_000_000):
    x = np.full(elements, rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    np.sin(np.ones(1000))
    work.wait()
    assert (x == size * (size + 1) / 2).all()
if rank == 0:
    dist.send(x, dst=1)
elif rank == 1:
    assert dist.recv(x) == 0
got = sum(chunk.data.size for chunk in dist.broadcast_stream(x, 0, chunk_bytes=100_000))
assert got == x.size, got
dist.barrier()
dist.destroy_process_group()
assert before == (set(os.listdir("/proc/self/fd")), threading.active_count(), sys.getswitchinterval())
say("done")
"""
    for rank in run_ranks(BLOCKING + code, 3):
        assert (rank.stdout, rank.stderr) == ("done\n", "")


@punctual
@pytest.mark.parametrize("quiet_rank", [0, 1])
def test_leaving_without_destroying_is_orderly(quiet_rank: int) -> None:
    """Also for the rank that hosts the store, and with a message that the other has not asked for yet."""
    code = f"""
dist.init_process_group()
x = np.full(500_000, 7)
dist.all_reduce(np.ones(3))
if dist.get_rank() == {quiet_rank}:
    work = dist.isend(x, 1 - {quiet_rank})
else:
    y = np.zeros(500_000, int)
    time.sleep(0.2)
    dist.recv(y, {quiet_rank})
    assert (y == 7).all()
    dist.destroy_process_group()
"""
    started_s = time.monotonic()
    for rank in run_ranks(BLOCKING + code, 2):
        assert rank.stderr == ""
    assert_within(9, time.monotonic() - started_s)


@punctual
def test_an_exception_in_main_is_news_to_the_others() -> None:
    code = """
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    raise KeyError("mine")
started_s = time.monotonic()
try:
    dist.all_reduce(np.ones(3))
except dist.GroupAbortedError as error:
    assert "rank 1 left with KeyError: 'mine'" in str(error), error
    say("heard", time.monotonic() - started_s)
"""
    first, second = finish(start_ranks(BLOCKING + code, 2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("heard ")
    assert second.returncode == 1
    assert second.stderr.rstrip().endswith("KeyError: 'mine'")
    assert_within(2, float(first.stdout.split()[1]))


def test_who_ends_because_a_peer_was_lost_ends_no_messages_of_the_survivors() -> None:
    """As where it leaves a `with` block with that."""
    code = """
dist.init_process_group()
dist.barrier()
rank = dist.get_rank()
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 2:
    dist.all_reduce(np.ones(3))
try:
    dist.recv(np.zeros(1), 2)
except dist.PeerLostError as error:
    assert error.left, error
x = np.full(3, rank)
sent = dist.isend(x, 1 - rank)
got = np.zeros(3, int)
dist.recv(got, 1 - rank)
sent.wait()
assert (got == 1 - rank).all()
say("done")
"""
    ranks = finish(start_ranks(BLOCKING + code, 4))
    for survivor in ranks[:2]:
        assert (survivor.stdout, survivor.stderr) == ("done\n", "")
    assert ranks[2].returncode == 1
    assert "rank 3" in ranks[2].stderr.splitlines()[-1]


@punctual
def test_a_dead_peer_is_named_within_a_second() -> None:
    code = """
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
started_s = time.monotonic()
try:
    dist.all_reduce(np.ones(3))
except (dist.PeerLostError, dist.GroupAbortedError) as error:  # the latter where it was noticed before the call
    assert error.rank == 1
    say("named", time.monotonic() - started_s)
dist.destroy_process_group()
"""
    first, second = finish(start_ranks(BLOCKING + code, 2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("named ")
    assert second.returncode == -signal.SIGKILL
    assert_within(1, float(first.stdout.split()[1]))


@punctual
@pytest.mark.parametrize("handled", ["", "destroy"])
def test_ctrl_c_ends_a_wait_at_once(handled: str) -> None:
    code = f"""
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 0:
    timer = threading.Timer(0.1, lambda: say("waiting"))
    timer.start()
    try:
        dist.all_reduce(np.ones(3))
    finally:
        if {handled!r}:
            dist.destroy_process_group()
try:
    dist.recv(np.ones(3), 0)
except (dist.GroupAbortedError, dist.PeerLostError) as error:
    say("heard", type(error).__name__)
"""
    ranks = start_ranks(BLOCKING + code, 2)
    wait_for_line(ranks[0], "waiting")
    started_s = time.monotonic()
    ranks[0].send_signal(signal.SIGINT)
    first, second = finish(ranks)
    took_s = time.monotonic() - started_s
    assert first.returncode in (1, -signal.SIGINT)
    assert first.stderr.rstrip().endswith("KeyboardInterrupt")
    assert second.stdout == "heard GroupAbortedError\n", second.stderr
    assert_within(5, took_s)


def test_a_forked_child_may_not_use_it_and_the_parent_goes_on() -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
group = dist.init_process_group()
work = dist.irecv(np.zeros(1), 1 - dist.get_rank())
dist.barrier()
for destroys in (True, False):
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        continue
    for use in (dist.barrier, work.wait, lambda: dist.isend(np.zeros(1), 0), group.barrier):
        try:
            use()
        except dist.ClosedError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    if destroys:
        dist.destroy_process_group()
        assert not dist.is_initialized()
    with dist.HashStore() as store, dist.init_process_group(store=store, rank=0, world_size=1):
        assert dist.get_world_size() == 1
        dist.barrier()
    os._exit(7)
sent = dist.isend(np.ones(1), 1 - dist.get_rank())
assert work.wait()
sent.wait()
dist.destroy_process_group()
"""
    for rank in run_ranks(BLOCKING + code, 2):
        assert rank.stderr == ""


@punctual
def test_a_coroutine_that_computes_does_not_stop_its_peers() -> None:
    """Rank 1's loop stands still while messages of a broadcast and a ring pass through it."""
    code = """
async def main():
    async with dist.init_process_group(progress=os.environ["PROGRESS"]) as group:
        x, y = np.full(200_000, group.rank), np.ones(600_000)
        await group.barrier()
        works = [group.broadcast(x, 0, tag=1), group.all_reduce(y, tag=2)]
        if group.rank == 1:
            await asyncio.sleep(0)
            time.sleep(1.5)
        started_s = time.monotonic()
        for work in works:
            await work
        took_s = time.monotonic() - started_s
        assert (x == 0).all() and (y == 3).all()
        print(took_s, flush=True)
        await group.barrier(tag=3)

dist.run(main())
"""
    environ = {"ASYNCDIST_ALGO": "broadcast:chain,all_reduce:ring", "PROGRESS": "thread"}
    took_s = [float(rank.stdout) for rank in run_ranks(code, 3, environ)]
    on_the_loop_s = [float(rank.stdout) for rank in run_ranks(code, 3, {**environ, "PROGRESS": "loop"})]
    assert_within(1, max(took_s))
    if not on_the_loop_s[2] > 1:
        raise Late("rank 2 began so late that it did not see how long rank 1 stood still")


def test_ctrl_c_at_any_moment_leaves_a_world_that_works() -> None:
    """A hundred times a second, in whatever step of the transport: results stay right, and nobody hangs."""
    code = """
import random

rounds = interrupts = 0

def handler(_number, frame):
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("blocking/work.py"):
            raise KeyboardInterrupt
        frame = frame.f_back

def storm():
    main, random_ = threading.main_thread().ident, random.Random(dist.get_rank())
    while True:
        time.sleep(random_.random() * 0.004)
        signal.pthread_kill(main, signal.SIGINT)

def wait(work):
    global interrupts
    while True:
        try:
            return work.wait()
        except KeyboardInterrupt:
            interrupts += 1

dist.init_process_group()
signal.signal(signal.SIGINT, handler)
threading.Thread(target=storm, daemon=True).start()
for number in range(300):
    x, y = np.ones(1), np.full(50_000, number)
    for work in [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True, tag=1)]:
        wait(work)
    assert x[0] == 2 and (y == 2 * number).all()
assert interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
dist.barrier()
dist.destroy_process_group()
"""
    for rank in run_ranks(BLOCKING + code, 2):
        assert (rank.returncode, rank.stderr) == (0, "")
