"""`asyncdist.spawn`: functions in processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from launching import clean_environment, is_alive, pids_in, until, write_script

import asyncdist as dist
from asyncdist.errors import LaunchError, PeerLostError
from asyncdist.launch.spawn import MAX_TRACEBACK_BYTES, spawn

FORKED = "forkserver"
"""How children start where their start is not the subject: an interpreter takes longer to start than they run."""

pytestmark = pytest.mark.usefixtures("no_job_in_the_environment")


@pytest.fixture
def no_job_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASYNCDIST_STORE", "ASYNCDIST_TOKEN", "ASYNCDIST_TOKEN_FILE", "OMP_NUM_THREADS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    multiprocessing.set_forkserver_preload(["asyncdist.launch.spawn", "numpy"])


def show(local_rank: int, folder: str) -> None:
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "ASYNCDIST_STORE",
        "ASYNCDIST_TOKEN",
        "ASYNCDIST_JOB_ID",
    ]
    assert os.environ["LOCAL_RANK"] == str(local_rank)
    Path(folder, str(local_rank)).write_text("\n".join(os.environ[name] for name in names))


def fail(local_rank: int, who: int) -> None:
    if local_rank == who:
        raise ZeroDivisionError("x" * 2 * MAX_TRACEBACK_BYTES + " at the end")
    time.sleep(600)


def blame(local_rank: int, folder: str) -> None:
    if local_rank == 0:
        Path(folder, "0").touch()
        raise PeerLostError("rank 0 lost rank 1", 1)
    until(Path(folder, "0").exists, "rank 0 to fail")
    raise ZeroDivisionError("the cause")


def blame_who_exits(local_rank: int, folder: str) -> None:
    if local_rank == 0:
        Path(folder, str(os.getpid())).touch()
        raise PeerLostError("rank 0 lost rank 1", 1)
    until(lambda: bool(os.listdir(folder)), "rank 0 to fail")
    victim = int(os.listdir(folder)[0])
    until(lambda: not is_alive(victim), "rank 0 to end")
    sys.exit(5)


def leave(local_rank: int, code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def stay(local_rank: int, folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, f"{os.getpid()}.pid").touch()
    time.sleep(600)


def nothing(local_rank: int) -> None:
    pass


async def exchange(local_rank: int, folder: str) -> None:
    async with dist.init_process_group() as group:
        ranks = np.zeros(group.size)
        await group.all_gather_into_tensor(ranks, np.array([float(local_rank)]))
        await asyncio.to_thread(Path(folder, str(local_rank)).write_text, str(ranks.tolist()))


async def fail_in_a_coroutine(local_rank: int) -> None:
    raise ZeroDivisionError("in a coroutine")


@pytest.mark.slow("spawns interpreters")
def test_coroutine_functions_are_run(tmp_path: Path) -> None:
    spawn(exchange, (str(tmp_path),), nprocs=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[0.0, 1.0]"] * 2
    with pytest.raises(LaunchError, match="in a coroutine"):
        spawn(fail_in_a_coroutine)


def test_environment_of_the_children(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert spawn(show, (str(tmp_path),), nprocs=2) == [None, None]
    first, second = ((tmp_path / rank).read_text().splitlines() for rank in "01")
    assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert first[3:] == second[3:]
    assert first[4] == f"127.0.0.1:{first[3]}"
    assert len(first[5]) >= 22
    assert dict(os.environ) == before


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_other_start_methods(tmp_path: Path, start_method: str) -> None:
    spawn(show, (str(tmp_path),), nprocs=1, start_method=start_method)
    assert (tmp_path / "0").exists()


def test_the_first_failure_is_raised_with_the_childs_traceback() -> None:
    context = spawn(fail, (1,), nprocs=2, join=False, start_method=FORKED)
    with pytest.raises(LaunchError, match="at the end") as caught:
        context.join(grace_period=0)
    assert caught.value.rank == 1
    assert caught.value.exitcode == 1
    assert str(caught.value).rstrip().endswith("x at the end")
    assert [process.exitcode for process in context.processes] == [-signal.SIGTERM, 1]


def test_the_cause_is_raised_and_not_what_it_brought_down(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="the cause") as caught:
        spawn(blame, (str(tmp_path),), nprocs=2, start_method=FORKED)
    assert caught.value.rank == 1


@pytest.mark.parametrize(("code", "exitcode", "message"), [(5, 5, "exit code 5"), (-9, 137, "killed by SIGKILL")])
def test_children_that_leave_without_a_word(code: int, exitcode: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        spawn(leave, (code,), start_method=FORKED)
    assert (caught.value.rank, caught.value.exitcode) == (0, exitcode)


def test_join_in_pieces_and_terminate(tmp_path: Path) -> None:
    context = spawn(stay, (str(tmp_path),), nprocs=2, join=False, daemon=True, start_method=FORKED)
    assert sorted(pids_in(tmp_path, 2)) == sorted(context.pids())
    assert context.join(timeout=0) is False
    context.terminate()
    context.terminate()
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL] * 2
    with pytest.raises(LaunchError, match=r"rank 0 .* was killed by SIGKILL"):
        context.join()


def test_a_failure_is_raised_whenever_it_is_asked_for() -> None:
    context = spawn(fail_in_a_coroutine, join=False, start_method=FORKED)
    for _ in range(2):
        with pytest.raises(LaunchError, match="in a coroutine") as caught:
            context.join()
        assert caught.value.exitcode == 1


def test_join_returns_true_when_all_ended_well() -> None:
    with spawn(nothing, nprocs=1, join=False, start_method=FORKED) as context:
        assert context.join() is True
        assert context.join() is True


def test_spawn_from_another_thread_than_the_main_one(tmp_path: Path) -> None:
    # The kernel's parent-death signal would come when this thread ends.
    contexts = []
    thread = threading.Thread(target=lambda: contexts.append(spawn(stay, (str(tmp_path),), join=False)))
    thread.start()
    thread.join()
    (pid,) = pids_in(tmp_path, 1)
    assert is_alive(pid)
    contexts[0].terminate()


@pytest.mark.parametrize("thread", ["main", "other"])
def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path, thread: str) -> None:
    script = write_script(
        tmp_path,
        """
        import pathlib, os, sys, threading, time
        from asyncdist.launch.spawn import spawn
        def stay(rank, folder):
            pathlib.Path(folder, f"{os.getpid()}.pid").touch()
            time.sleep(600)
        if __name__ == "__main__":
            if sys.argv[2] == "main":
                spawn(stay, (sys.argv[1],), nprocs=2)
            else:
                thread = threading.Thread(target=spawn, args=(stay, (sys.argv[1],), 2))
                thread.start()
                thread.join()
        """,
    )
    with subprocess.Popen([sys.executable, script, str(tmp_path), thread], env=clean_environment()) as parent:
        try:
            pids = pids_in(tmp_path, 2)
        finally:
            parent.kill()
    until(lambda: not any(is_alive(pid) for pid in pids), "the children to end")


@pytest.mark.parametrize(("arguments", "error"), [({"nprocs": 0}, ValueError), ({"nprocs": 4097}, ValueError)])
def test_wrong_numbers(arguments: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error, match="nprocs"):
        spawn(nothing, **arguments)  # type: ignore[call-overload]


def test_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="fn must be callable"):
        spawn("nothing")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="args must be a tuple of what fn gets after its rank, not int"):
        spawn(nothing, 1)  # type: ignore[call-overload]


def test_a_rank_that_exits_is_blamed_and_none_that_it_brings_down(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 .* ended with exit code 5") as caught:
        spawn(blame_who_exits, (str(tmp_path),), nprocs=2, start_method="fork")
    assert (caught.value.rank, caught.value.exitcode) == (1, 5)


async def array_of(local_rank: int, count: int) -> object:
    async with dist.init_process_group() as group:
        return {"rank": group.rank, "values": np.full(count, group.rank)}


def something_else(local_rank: int) -> object:
    return threading.Lock() if local_rank else None


def test_results_come_back_in_rank_order() -> None:
    """Also such as fit into no pipe."""
    results = spawn(array_of, (300_000,), nprocs=2, start_method=FORKED)
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["values"].sum() for result in results] == [0, 300_000]
    context = spawn(nothing, nprocs=2, join=False, start_method=FORKED)
    assert context.join()
    assert context.results == [None, None]


def test_a_result_that_cannot_be_sent_fails_its_rank() -> None:
    with pytest.raises(LaunchError, match=r"(?s)rank 1 .*TypeError.*lock") as failed:
        spawn(something_else, nprocs=2, start_method=FORKED)
    assert failed.value.rank == 1
