"""The launcher inside a program that has its own event loop: both loops, cancellation, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import free_port
from launching import is_alive, pids_in, write_script

from asyncdist.errors import LaunchError
from asyncdist.launch import worker as worker_module
from asyncdist.launch.agent import run
from asyncdist.launch.config import Endpoint, LaunchConfig
from asyncdist.launch.rendezvous import job_store
from asyncdist_server import serve_in_thread


@pytest.fixture(autouse=True)
def nothing_of_the_process_left_behind() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    children = _children()
    yield
    assert not _children() - children
    assert signal.getsignal(signal.SIGTERM) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncdist")]


def _children() -> set[str]:
    """This process's, but those that multiprocessing and other tests keep for later."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {child for child in children if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()}


class Captured:
    """Two temporary files for the launcher's output."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = folder / "out.txt", folder / "err.txt"

    async def run(self, *command: str, **options: object) -> int:
        config = LaunchConfig(command=command, **options)  # type: ignore[arg-type]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            return await run(config, stdout_fd=out.fileno(), stderr_fd=err.fileno())


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    return Captured(tmp_path)


async def test_success(captured: Captured) -> None:
    assert await captured.run("sh", "-c", "echo $RANK; echo no >&2", nproc_per_node=2) == 0
    assert sorted(captured.out.read_text().splitlines()) == ["[rank 0] 0", "[rank 1] 1"]
    assert captured.err.read_text().count("[rank 0] no") == 1


async def test_no_descriptor_is_left(captured: Captured) -> None:
    counts = []
    for _ in range(3):  # the first run makes what the loop and multiprocessing keep
        await captured.run("sh", "-c", "exit $RANK", nproc_per_node=2, grace_s=0.1)
        await asyncio.sleep(0)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[1] == counts[2]


async def test_failure(captured: Captured) -> None:
    assert await captured.run("sh", "-c", "exit $((RANK * 4))", nproc_per_node=2, grace_s=0.1) == 4
    assert "rank 1 failed first: exit code 4" in captured.err.read_text()


async def test_without_pidfd_exits_are_still_seen(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(worker_module.os, "pidfd_open")
    assert await captured.run("sh", "-c", "kill -11 $$") == 128 + signal.SIGSEGV


async def test_without_waitid_exits_are_still_seen(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(worker_module.os, "pidfd_open")
    monkeypatch.delattr(worker_module.os, "waitid")
    assert await captured.run("sh", "-c", "exit 3") == 3


async def test_cancellation_kills_the_workers(captured: Captured, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
        time.sleep(600)
        """,
    )
    task = asyncio.create_task(captured.run(sys.executable, script, str(tmp_path), nproc_per_node=2))
    pids = await asyncio.to_thread(pids_in, tmp_path, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await task
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30])
async def test_cancellation_at_any_moment_of_the_start(captured: Captured, turns: int) -> None:
    task = asyncio.create_task(captured.run("sleep", "600"))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await task


async def test_a_signal_before_the_workers_exist_ends_the_wait_for_the_store(captured: Captured) -> None:
    task = asyncio.create_task(
        captured.run("true", nnodes=2, node_rank=1, endpoint=Endpoint("127.0.0.1", free_port()), job_id="x")
    )
    for _ in range(10):
        await asyncio.sleep(0)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await task == 128 + signal.SIGTERM


async def test_one_node_needs_no_daemon_once_it_runs(captured: Captured, tmp_path: Path) -> None:
    """There are no other nodes to hear from: the job ends when its workers do, with what they say."""
    waits = 'touch "$1/$$.pid"; while [ ! -e "$1/end" ]; do sleep 0.02; done'
    server = await asyncio.to_thread(serve_in_thread, "127.0.0.1", 0)
    place = Endpoint("127.0.0.1", server.port)
    task = asyncio.create_task(captured.run("sh", "-c", waits, "sh", str(tmp_path), store=place, job_id="job"))
    try:
        await asyncio.to_thread(pids_in, tmp_path, 1)
    finally:
        await asyncio.to_thread(server.close)
    await asyncio.wait((task,), timeout=0.1)
    assert not task.done()
    (tmp_path / "end").touch()
    async with asyncio.timeout(60):
        assert await task == 0
    assert "lost" not in captured.err.read_text()


async def test_a_launcher_that_cannot_start_says_why(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "_SILENT_S", 0.05)
    why = r"no store answers at 127\.0\.0\.1:1 after 0\.3 s \(nothing listens there\)"
    with pytest.raises(LaunchError, match=why):
        await captured.run("true", store=Endpoint("127.0.0.1", 1), join_timeout_s=0.3)
    waiting = "no store answers at 127.0.0.1:1 yet (nothing listens there); trying for up to 0.3 s"
    (line,) = captured.err.read_text().splitlines()
    assert re.fullmatch(rf"\d\d:\d\d:\d\d\.\d\d\d asyncdist run: {re.escape(waiting)}", line)
