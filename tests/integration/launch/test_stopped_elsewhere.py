"""A rank that is stopped on another host is said to be so, as its launcher sees it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import free_port
from launching import DEADLINE_S, running, write_script

from asyncdist_server.wire.auth import new_token

STOPPED = """
    import contextlib, os, signal
    import numpy as np
    import asyncdist as dist

    async def main():
        async with dist.init_process_group() as group:
            pids = [np.empty(1, int), np.empty(1, int)]
            await group.all_gather(pids, np.array([os.getpid()]))
            if group.rank == 1:
                await group.barrier()
                os.kill(os.getpid(), signal.SIGSTOP)
            with contextlib.suppress(dist.DistError):
                try:
                    await group.barrier()
                    await group.all_reduce(np.ones(3), timeout=1)
                except dist.CollectiveTimeoutError as error:
                    print("told:", error, flush=True)
                finally:
                    os.kill(int(pids[1][0]), signal.SIGCONT)

    dist.run(main())
"""


@pytest.mark.slow("two launchers, and a time-out of a second")
@pytest.mark.parametrize(("nodes", "behind_shell"), [("2", True), ("1:2", False)])
def test_a_rank_that_is_stopped_on_another_host_is_told_from_a_silent_one(
    tmp_path: Path, nodes: str, behind_shell: bool
) -> None:
    command = [write_script(tmp_path, STOPPED)]
    if behind_shell:
        command = ["--no-python", "sh", "-c", f"{sys.executable} {command[0]}; exit $?"]
    options = [f"--nnodes={nodes}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=last_call_timeout=0.3"]
    more = {"ASYNCDIST_TRANSPORT": "tcp", "ASYNCDIST_TOKEN": new_token()}
    with ExitStack() as stack:
        launched = [
            stack.enter_context(
                running(*options, *command, limits="asyncdist.launch.rendezvous.links:_LOOK_S=0.05", **more)
            )
            for _ in range(2)
        ]
        texts = ["".join(map(bytes.decode, each.communicate(timeout=DEADLINE_S))) for each in launched]
    assert [each.returncode for each in launched] == [0, 0], texts
    assert "missing: rank 1 (no answer: its process is stopped, by SIGSTOP or a debugger)" in "".join(texts)
