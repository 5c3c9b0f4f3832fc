"""Hosts that answer no more are named by the launchers and by all ranks that wait for theirs.

On one machine a launcher and its rank that are stopped stand for a host that is silent: no connection is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import free_port
from launching import DEADLINE_S, pids_in, running, write_script

from asyncdist_server.wire.auth import new_token

SILENCE = "--rdzv-conf=last_call_timeout=0.3,keep_alive_interval=1,keep_alive_max_attempt=2"

WAIT = """
    import asyncio, os, pathlib, sys
    import numpy as np
    import asyncdist as dist

    async def main():
        async with dist.init_process_group() as group:
            await dist.barrier()
            pathlib.Path(sys.argv[1], f"rank{group.rank}").write_text(str(os.getpid()))
            pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
            if "ASYNCDIST_ROUND" in os.environ and group.size < 3:
                return
            try:
                while True:
                    await dist.all_reduce(np.ones(1000))
                    await asyncio.sleep(0.5 if group.rank == 1 else 0)
            except dist.PeerLostError as error:
                print("heard", error, flush=True)
                raise

    dist.run(main())
"""


@contextlib.contextmanager
def three_nodes(folder: Path, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three launchers with a rank each, whose ranks have met."""
    script = write_script(folder, WAIT)
    common = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", SILENCE, "--grace=2", *options, script, str(folder)]
    with ExitStack() as stack:
        token = new_token()
        launched = [
            stack.enter_context(running(f"--node-rank={node}", *common, ASYNCDIST_TOKEN=token)) for node in range(3)
        ]
        pids_in(folder, 3)
        yield launched


def signal_host(folder: Path, launcher: subprocess.Popen[bytes], rank: int, number: signal.Signals) -> None:
    launcher.send_signal(number)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((folder / f"rank{rank}").read_text()), number)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, (stdout + stderr).decode()


@pytest.mark.slow("a launcher must be silent for two seconds")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_the_ranks_and_launchers_name_a_host_that_is_silent(tmp_path: Path, victim: int) -> None:
    with three_nodes(tmp_path, "--nnodes=3") as launched:
        signal_host(tmp_path, launched[victim], victim, signal.SIGSTOP)
        others = [ended(process) for node, process in enumerate(launched) if node != victim]
        signal_host(tmp_path, launched[victim], victim, signal.SIGCONT)
        code, output = ended(launched[victim])
    assert [code for code, _ in others] == [1, 1]
    for _, text in others:
        assert f"lost rank {victim}: its host (" in text
        assert f", node {victim}) is gone: no sign of life for 2 s" in text
        assert f"node {victim} (host " in text
    assert code == 1
    assert f"node {victim} (host " in output


@pytest.mark.slow("a launcher must be silent for two seconds")
def test_an_elastic_job_goes_on_at_once_without_a_host_that_is_silent(tmp_path: Path) -> None:
    with three_nodes(tmp_path, "--nnodes=2:3") as launched:
        signal_host(tmp_path, launched[2], 2, signal.SIGSTOP)
        others = [ended(process) for process in launched[:2]]
    for code, text in others:
        assert code == 0, text
        assert "its host (" in text
        assert "is gone: no sign of life for 2 s" in text
