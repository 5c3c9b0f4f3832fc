"""Unmodified torch jobs on the daemon, in several processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from daemon_kit import DEADLINE_S, Daemon
from server_kit import SocketClient
from torch_kit import Jobs, clean_environment, torch_daemon, until_nothing_is_left
from torch_wire_kit import SocketTorchClient

from asyncdist_server.wire import messages as m

pytestmark = pytest.mark.peers


@pytest.mark.slow("torch imports and forks")
@pytest.mark.parametrize(("program", "processes"), [("race", 4), ("hand_over", 4), ("wait_and_set", 3)])
def test_processes_share_a_store(daemon: Daemon, jobs: Jobs, program: str, processes: int) -> None:
    jobs.run(program, processes, daemon.port)
    until_nothing_is_left(daemon)


@pytest.mark.parametrize(("program", "processes"), [("gloo", 8), ("gloo", 2), ("env", 2), ("env", 3)])
def test_process_groups_one_after_the_other_on_one_daemon(
    daemon: Daemon, jobs: Jobs, program: str, processes: int
) -> None:
    """Each would read the addresses of the one before if they were still there."""
    jobs.run(program, processes, daemon.port)
    until_nothing_is_left(daemon)


def test_waiting_clients_hear_at_once_when_the_daemon_dies(jobs: Jobs) -> None:
    daemon = torch_daemon()
    jobs.begin("hang", 2, daemon.port, "nope")
    with SocketClient(daemon.port) as native:
        while native.ask(m.WAITS, True)[0] < 2:
            pass
    daemon.end(signal.SIGKILL)
    jobs.end()


WORKER = """
    import os, sys
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restarts == "0" and rank == "1":
        sys.exit(7)
    if restarts == "0":
                time.sleep(60)  # until the agent, which has seen the other fail, ends this one too
    import datetime
    import torch, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=20))
    store = dist.PrefixStore(f"asyncdist.job.{os.environ['TORCHELASTIC_RUN_ID']}/{restarts}", store)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(os.environ["WORLD_SIZE"]))
    x = torch.ones(1)
    dist.all_reduce(x)
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}, restart {restarts}: {x.item()}\\n".encode())
    dist.destroy_process_group()
"""


@pytest.mark.slow("torchrun starts interpreters that import torch")
def test_torchrun_restarts_its_workers(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-id=job", "--nnodes=1"]
    command += [f"--rdzv-endpoint=127.0.0.1:{daemon.port}", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", str(script), str(daemon.port)]
    result = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 2, restart 1: 2.0" for rank in (0, 1)]
    until_nothing_is_left(daemon)


@pytest.mark.slow("torchrun starts interpreters that import torch")
def test_two_agents_meet_and_their_job_can_be_run_again(daemon: Daemon, jobs: Jobs, tmp_path: Path) -> None:
    """A bystander keeps the port's namespace alive: the second run must not find the state of the first."""
    script = tmp_path / "worker.py"
    script.write_text("import os; os.write(1, f\"WORKER {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n\".encode())")
    with SocketTorchClient(daemon.port) as bystander:
        for _ in range(2):
            said = jobs.run(
                "agent",
                2,
                "--rdzv-backend=c10d",
                "--rdzv-id=two",
                f"--rdzv-endpoint=127.0.0.1:{daemon.port}",
                "--nnodes=2",
                "--nproc-per-node=1",
                "--monitor-interval=0.1",
                str(script),
            )
            assert sorted(line for line in said.splitlines() if line.startswith("WORKER")) == [
                "WORKER 0 2",
                "WORKER 1 2",
            ]
            until_nothing_is_left(daemon)
        assert bystander.get(b"/nope") == b""
