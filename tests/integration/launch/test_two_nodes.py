"""Two launchers on one machine are two nodes; and what may hold the port they want."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import forked
import pytest
from jobs import free_port
from launching import DEADLINE_S, is_alive, pids_in, run, running, until, write_script

from asyncdist_server import serve_in_thread
from asyncdist_server.wire.auth import new_token

SILENCE_S = 30
"""A silence that no launcher reaches in a test of something faster."""

SHOW = """
    import json, os
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "ASYNCDIST_STORE", "ASYNCDIST_JOB_ID", "ASYNCDIST_TOKEN")
    print(json.dumps({name: os.environ.get(name) for name in names}))
"""

READY = """
    import os, pathlib, signal, sys, time
    folder = pathlib.Path(sys.argv[1])
    def ready():
        (folder / f"{os.getpid()}.pid").touch()
    def wait_for_signals():
        while True:  # one that comes just before signal.pause() or a long sleep is seen after it only
            time.sleep(0.02)
    rank = int(os.environ["RANK"])
"""


@pytest.fixture
def port() -> int:
    return free_port()


@contextlib.contextmanager
def nodes(*arguments: list[str], limits: str = "", **changes: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(*each, limits=limits, **changes)) for each in arguments]


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout.decode(), stderr.decode()


def shown(*outputs: str) -> list[dict[str, str]]:
    lines = "".join(outputs).splitlines()
    return sorted((json.loads(line.partition("] ")[2]) for line in lines), key=lambda entry: int(entry["RANK"]))


@pytest.mark.parametrize("ranks", [["--node-rank=1", "--node_rank=0"], [None, None]], ids=["given", "dealt"])
@pytest.mark.parametrize("token", [None, "the-token-of-these-tests-and-43-characters-"], ids=["open", "token"])
def test_two_nodes_form_one_job(tmp_path: Path, port: int, ranks: list[str | None], token: str | None) -> None:
    script = write_script(tmp_path, SHOW)
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    arguments = [
        [*common, *filter(None, [rank]), f"--nproc-per-node={nproc}", script]
        for rank, nproc in zip(ranks, (2, 1), strict=True)
    ]
    with nodes(*arguments, **({"ASYNCDIST_TOKEN": token} if token else {})) as launched:
        results = [outcome(process) for process in launched]
    assert [result[0] for result in results] == [0, 0], results
    workers = shown(*(result[1] for result in results))
    assert [worker["RANK"] for worker in workers] == ["0", "1", "2"]
    assert {worker["WORLD_SIZE"] for worker in workers} == {"3"}
    assert {worker["GROUP_WORLD_SIZE"] for worker in workers} == {"2"}
    assert sorted(worker["GROUP_RANK"] + worker["LOCAL_RANK"] for worker in workers) in (
        ["00", "01", "10"],
        ["00", "10", "11"],
    )
    assert {worker["ASYNCDIST_STORE"] for worker in workers} == {f"127.0.0.1:{port}"}
    assert {worker["ASYNCDIST_JOB_ID"] for worker in workers} == {"job.0"}
    assert len({worker["ASYNCDIST_TOKEN"] for worker in workers}) == 1
    assert workers[0]["ASYNCDIST_TOKEN"] not in (None, token)  # of its own, or else the user's
    assert sum("store hosted at" in result[2] for result in results) == 1


def test_the_key_of_a_run_opens_no_other_run_of_that_token_and_id(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, SHOW)
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", script]
    keys, token = [], new_token()
    for _ in range(2):
        with nodes(common, common, ASYNCDIST_TOKEN=token) as launched:
            results = [outcome(process) for process in launched]
        assert [result[0] for result in results] == [0, 0], results
        (key,) = {worker["ASYNCDIST_TOKEN"] for worker in shown(*(result[1] for result in results))}
        keys.append(key)
    assert keys[0] != keys[1]


def test_master_addr_and_port_do_as_well(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, SHOW)
    common = ["--nnodes=2", "--master-addr=localhost", f"--master-port={port}"]
    with nodes([*common, "--node-rank=0", script], [*common, "--node-rank=1", script]) as launched:
        results = [outcome(process) for process in launched]
    assert [result[0] for result in results] == [0, 0], results
    workers = shown(*(result[1] for result in results))
    assert {(worker["MASTER_ADDR"], worker["MASTER_PORT"]) for worker in workers} == {("localhost", str(port))}
    assert len({worker["ASYNCDIST_JOB_ID"] for worker in workers}) == 1


def test_a_failure_on_one_node_ends_the_other_with_the_same_code(tmp_path: Path, port: int) -> None:
    script = write_script(
        tmp_path,
        READY
        + """
    ready()
    if rank == 1:
        while len(list(folder.glob("*.pid"))) < 2:
            time.sleep(0.01)
        sys.exit(6)
    wait_for_signals()
    """,
    )
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--grace=0.1", script, str(tmp_path)]
    with nodes(["--node-rank=0", *common], ["--node-rank=1", *common]) as launched:
        results = [outcome(process) for process in launched]
    assert [result[0] for result in results] == [6, 6], results
    assert all("rank 1 failed first: exit code 6" in result[2] for result in results)


def test_all_nodes_restart_together(tmp_path: Path, port: int) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        attempt = os.environ["ASYNCDIST_JOB_ID"].rpartition(".")[2]
        print(attempt)
        sys.exit(attempt == "0" and os.environ["RANK"] == "1")
        """,
    )
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=3", script]
    with nodes(["--node-rank=0", *common], ["--node-rank=1", *common]) as launched:
        results = [outcome(process) for process in launched]
    assert [result[0] for result in results] == [0, 0], results
    assert [result[1] for result in results] == [f"[rank {rank}] 0\n[rank {rank}] 1\n" for rank in (0, 1)]


def test_the_hosting_node_stays_until_the_others_are_done(tmp_path: Path, port: int) -> None:
    script = write_script(
        tmp_path,
        READY
        + """
    ready()
    if rank == 1:
        while not (folder / "go").exists():
            time.sleep(0.01)
    """,
    )
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", script, str(tmp_path)]
    with nodes(["--node-rank=0", *common], ["--node-rank=1", *common]) as launched:
        pids = pids_in(tmp_path, 2)
        until(lambda: sum(is_alive(pid) for pid in pids) == 1, "rank 0 to end")
        with socket.create_connection(("127.0.0.1", port)):  # the store still listens
            assert launched[0].poll() is None
        (tmp_path / "go").touch()
        assert [outcome(process)[0] for process in launched] == [0, 0]


def test_an_interrupt_of_one_node_ends_the_other(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, READY + "    ready(); wait_for_signals()")
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--grace=0.1", script, str(tmp_path)]
    with nodes(["--node-rank=0", *common], ["--node-rank=1", *common]) as launched:
        pids_in(tmp_path, 2)
        launched[0].send_signal(signal.SIGINT)
        results = [outcome(process) for process in launched]
    assert [result[0] for result in results] == [130, 130]
    assert "node 0 (host " in results[1][2]
    assert "ended by SIGINT" in results[1][2]


def test_a_launcher_that_is_killed_ends_the_job_long_before_its_silence_would(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, READY + "    ready()\n    wait_for_signals()\n")
    patient = f"--rdzv-conf=keep_alive_interval={SILENCE_S},keep_alive_max_attempt=1"
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--grace=0.2", patient]
    both = [[*common, f"--node-rank={node}", script, str(tmp_path)] for node in range(2)]
    with nodes(*both, limits="asyncdist.launch.rendezvous.nodes:PRESENCE_GRACE_S=1") as launched:
        pids = pids_in(tmp_path, 2)
        launched[1].kill()
        begun_s = time.monotonic()
        returncode, _, stderr = outcome(launched[0])
    assert time.monotonic() - begun_s < SILENCE_S
    assert returncode == 1
    assert f"node 1 (host {socket.gethostname()}): its launcher was killed" in stderr
    until(lambda: not any(is_alive(pid) for pid in pids), "all workers to end")


def test_a_node_that_never_comes_is_named(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, SHOW)
    done = run("--nnodes=3", "--node-rank=1", f"--rdzv-endpoint=127.0.0.1:{port}", "--join-timeout=0.3", script)
    assert done.returncode == 1
    assert f"no store answers at 127.0.0.1:{port} after 0.3 s" in done.stderr
    done = run("--nnodes=3", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{port}", "--join-timeout=0.3", script)
    assert done.returncode == 1
    assert "waiting for 3 nodes, store at" in done.stderr
    assert "nodes [1, 2] of 3 did not join within 0.3 s" in done.stderr
    assert done.stdout == ""


def test_two_launchers_with_one_node_rank(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, SHOW)
    for timeout_s in (0.7, 5, 30):  # one of them may come when the other has given up already
        common = ["--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{port}", f"--join-timeout={timeout_s}"]
        with nodes([*common, script], [*common, script]) as launched:
            results = [outcome(process) for process in launched]
        assert [result[0] for result in results] == [1, 1]
        if any("claim node rank 0" in result[2] for result in results):
            break
    assert sum("launchers of this job claim node rank 0: give each" in result[2] for result in results) == 1


def test_a_port_held_by_a_stranger_is_an_error_that_says_so(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(DEADLINE_S)
        port = stranger.getsockname()[1]
        with running(f"--master-port={port}", script) as process:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                returncode, stdout, stderr = outcome(process)
    assert returncode == 1
    assert f"127.0.0.1:{port}: the port is in use by something that is not an asyncdist store" in stderr
    assert stdout == ""


@pytest.mark.parametrize("variable", [True, False], ids=["ASYNCDIST_STORE", "rdzv-endpoint"])
def test_a_daemon_that_is_there_is_used(tmp_path: Path, variable: bool) -> None:
    script, token = write_script(tmp_path, SHOW), new_token()
    with serve_in_thread(token=token) as server:
        place = [] if variable else [f"--rdzv-endpoint={server.address}"]
        changes = {"ASYNCDIST_STORE": server.address} if variable else {}
        runs = [run(*place, "--rdzv-id=job", script, ASYNCDIST_TOKEN=token, **changes) for _ in range(2)]
        refused = run(*place, script, ASYNCDIST_TOKEN=new_token(), **changes)
    assert [done.returncode for done in runs] == [0, 0], runs
    workers = [shown(done.stdout)[0] for done in runs]
    assert [worker["ASYNCDIST_JOB_ID"] for worker in workers] == ["job.0", "job-1.0"]
    assert {worker["ASYNCDIST_STORE"] for worker in workers} == {server.address}
    assert {worker["ASYNCDIST_TOKEN"] for worker in workers} == {token}
    assert "store found at" in runs[0].stderr
    assert refused.returncode == 1
    assert "the tokens of client and server differ" in refused.stderr


def test_a_job_id_can_be_used_again_whatever_became_of_the_last_run(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW)
    with serve_in_thread() as server:
        store = {"ASYNCDIST_STORE": server.address}
        two = ["--nnodes=2", "--rdzv-id=job", script]
        with nodes(two, **store) as (waiting,):
            seen = ["store", f"--store={server.address}", "--namespace=asyncdist-launch", "wait", "launch/job/0/node/0"]
            forked.run([sys.executable, "-m", "asyncdist", *seen], DEADLINE_S).check_returncode()
            waiting.send_signal(signal.SIGINT)
            returncode, _, stderr = outcome(waiting)
            said = [f"waiting for 2 nodes, store at {server.address}", "SIGINT: no worker is running"]
            lines = [line.partition(" asyncdist run: ")[2] for line in stderr.splitlines()]
            assert (returncode, lines) == (130, said)
        assert run("--nproc-per-node=2", "--rdzv-id=job", script, **store).returncode == 0
        with nodes(two, two, **store) as launched:
            assert [outcome(process)[0] for process in launched] == [0, 0]


def test_standalone_looks_at_no_daemon(tmp_path: Path) -> None:
    done = run("--standalone", write_script(tmp_path, SHOW), ASYNCDIST_STORE="127.0.0.1:1")
    assert done.returncode == 0
    assert "store hosted at 127.0.0.1:" in done.stderr


def test_an_address_others_can_reach_needs_a_token(tmp_path: Path, port: int) -> None:
    script = write_script(tmp_path, SHOW)
    done = run("--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=0.0.0.0:{port}", script)
    assert done.returncode == 1
    assert "a token is needed" in done.stderr


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    done = run("--nnodes=2", "--node-rank=0", "--rdzv-endpoint=no-such-host.invalid:1", write_script(tmp_path, SHOW))
    assert done.returncode == 1
    assert "cannot resolve 'no-such-host.invalid'" in done.stderr
