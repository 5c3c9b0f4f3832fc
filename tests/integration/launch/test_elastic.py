"""Elastic jobs: launchers are started, killed, stopped and ended, and the others go on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jobs import free_port
from launching import DEADLINE_S, daemon, is_alive, run, running, until, write_script

from asyncdist import blocking
from asyncdist_server import serve_in_thread

LOST_AFTER_S = 3
"""Long enough for a launcher on a busy machine to be heard."""

TIMES = f"--rdzv-conf=last_call_timeout=0.5,keep_alive_interval=1,keep_alive_max_attempt={LOST_AFTER_S}"

PATIENT = "--rdzv-conf=last_call_timeout=0.5,keep_alive_interval=100"
"""Nobody is lost by silence: only broken connections tell."""

WORKER = """
    import json, os, pathlib, signal, sys, time
    folder = pathlib.Path(sys.argv[1])
    number, rank = int(os.environ["ASYNCDIST_ROUND"]), int(os.environ["RANK"])
    launcher = os.getppid()
    names = ("WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ASYNCDIST_JOB_ID", "TORCHELASTIC_RESTART_COUNT",
             "TORCHELASTIC_MAX_RESTARTS", "LOCAL_WORLD_SIZE")
    me = {name: os.environ[name] for name in names} | {"pid": os.getpid(), "launcher": launcher, "rank": rank}
    path = folder / f"{number}-{rank}.part"
    path.write_text(json.dumps(me))
    path.rename(path.with_suffix(".up"))
    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.02)
"""

WAIT = WORKER + "    wait_for('done')\n"

Launcher = subprocess.Popen[bytes]


def worlds(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The rounds whose workers have all been up, each with what they found, by rank."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("*.up"):
        rounds.setdefault(int(path.stem.partition("-")[0]), []).append(json.loads(path.read_text()))
    return {
        number: sorted(workers, key=lambda worker: int(worker["rank"]))
        for number, workers in rounds.items()
        if len(workers) == int(workers[0]["WORLD_SIZE"])
    }


def world_of(folder: Path, *launchers: Launcher, after: int = -1) -> tuple[int, list[dict[str, Any]]]:
    """Wait for a round beyond `after` of these launchers, and no others; return its number and its workers."""
    pids = {launcher.pid for launcher in launchers}
    found: list[tuple[int, list[dict[str, Any]]]] = []

    def there() -> bool:
        for number, workers in sorted(worlds(folder).items()):
            if number > after and {worker["launcher"] for worker in workers} == pids:
                found.append((number, workers))
                return True
        ended = [launcher.returncode for launcher in launchers if launcher.poll() is not None]
        assert not ended, f"launchers ended with {ended}"
        return False

    until(there, f"a round of {len(pids)} nodes")
    return found[0]


def outcome(process: Launcher) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stderr.decode()


def outcomes(*processes: Launcher) -> list[int]:
    results = [outcome(process) for process in processes]
    for _, stderr in results:
        assert "Traceback" not in stderr, stderr
    return [returncode for returncode, _ in results]


def launchers_by_rank(workers: list[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(worker["launcher"] for worker in workers))


class Nodes:
    """Starts launchers of one job; all that are left at the end are killed."""

    def __init__(self, stack: ExitStack, script: str, folder: Path, **changes: str) -> None:
        self._stack = stack
        self._command = [script, str(folder)]
        self._changes = changes
        self.times = TIMES

    def start(self, *options: str, nnodes: str = "1:3", limits: str = "") -> Launcher:
        arguments = [f"--nnodes={nnodes}", "--rdzv-id=job", "--grace=0.2", self.times, *options, *self._command]
        return self._stack.enter_context(running(*arguments, limits=limits, **self._changes))


@contextlib.contextmanager
def cluster(folder: Path, source: str, **changes: str) -> Iterator[Nodes]:
    """A standing daemon, and launchers that use it."""
    with ExitStack() as stack:
        server = stack.enter_context(serve_in_thread())
        yield Nodes(stack, write_script(folder, source), folder, ASYNCDIST_STORE=server.address, **changes)


@pytest.mark.slow("six rounds of a job")
def test_nodes_come_are_killed_are_replaced_and_leave(tmp_path: Path) -> None:
    with cluster(tmp_path, WAIT) as nodes:
        nodes.times = PATIENT
        first = nodes.start("--nproc-per-node=2")
        number, workers = world_of(tmp_path, first)
        assert [worker["WORLD_SIZE"] for worker in workers] == ["2", "2"]
        second, third = nodes.start(), nodes.start()  # at once
        number, workers = world_of(tmp_path, first, second, third, after=number)
        order = launchers_by_rank(workers)
        assert order[0] == first.pid  # who knows the job stays first
        assert {(worker["WORLD_SIZE"], worker["GROUP_WORLD_SIZE"]) for worker in workers} == {("4", "3")}

        second.kill()
        until(lambda: not any(is_alive(w["pid"]) for w in workers if w["launcher"] == second.pid), "its workers to end")
        number, workers = world_of(tmp_path, first, third, after=number)
        assert launchers_by_rank(workers) == [pid for pid in order if pid != second.pid]

        second = nodes.start()
        number, workers = world_of(tmp_path, first, second, third, after=number)
        assert launchers_by_rank(workers) == [first.pid, third.pid, second.pid]

        first.send_signal(signal.SIGTERM)
        number, workers = world_of(tmp_path, second, third, after=number)
        assert launchers_by_rank(workers) == [third.pid, second.pid]
        assert outcomes(first) == [128 + signal.SIGTERM]

        rounds = worlds(tmp_path)
        assert {w["TORCHELASTIC_RESTART_COUNT"] for workers in rounds.values() for w in workers} == {"0"}
        for number, workers in rounds.items():
            assert {worker["ASYNCDIST_JOB_ID"] for worker in workers} == {f"job.{number}"}
        (tmp_path / "done").touch()
        assert outcomes(second, third) == [0, 0]


def test_failures_are_restarts_of_all_nodes_and_end_the_job_when_there_are_none_left(tmp_path: Path) -> None:
    source = WORKER + "    wait_for('two')\n    sys.exit(7 if os.environ['GROUP_RANK'] == '1' else wait_for('never'))\n"
    with cluster(tmp_path, source) as nodes:
        pair = [nodes.start("--max-restarts=1", nnodes="2:3") for _ in range(2)]
        _number, _workers = world_of(tmp_path, *pair)
        (tmp_path / "two").touch()
        results = [outcome(process) for process in pair]
    assert [result[0] for result in results] == [7, 7], results
    for _, stderr in results:
        assert stderr.count("rank 1 failed first: exit code 7") == 2
        assert stderr.count("restarting all workers (restart 1 of 1)") == 1
    rounds = worlds(tmp_path)
    assert [{w["TORCHELASTIC_RESTART_COUNT"] for w in rounds[n]} for n in sorted(rounds)] == [{"0"}, {"1"}]
    assert {w["TORCHELASTIC_MAX_RESTARTS"] for workers in rounds.values() for w in workers} == {"1"}
    assert run("--nproc-per-node=1", "--standalone", "--no-python", "true").returncode == 0


def test_who_finds_no_place_waits_for_one(tmp_path: Path) -> None:
    with cluster(tmp_path, WAIT) as nodes:
        nodes.times = PATIENT
        first, second = nodes.start(nnodes="1:2"), nodes.start(nnodes="1:2")
        number, _ = world_of(tmp_path, first, second)
        spare = nodes.start(nnodes="1:2")
        impatient = nodes.start("--join-timeout=1.5", nnodes="1:2")
        returncode, stderr = outcome(impatient)
        assert returncode == 1
        assert "no place in the job became free within 1.5 s: 2 nodes, the most that it may have" in stderr
        assert number == max(worlds(tmp_path))  # nobody was disturbed
        second.kill()
        number, _workers = world_of(tmp_path, first, spare, after=number)
        waiting = nodes.start(nnodes="1:2")
        until(lambda: b"waiting for" in (waiting.stderr.readline() if waiting.stderr else b""), "it to say so")
        (tmp_path / "done").touch()
        assert outcomes(first, spare) == [0, 0]
        returncode, stderr = outcome(waiting)
        assert returncode == 0, stderr


@pytest.mark.slow("waits for nodes that do not come")
def test_too_few_nodes_are_an_error_that_says_who_was_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, WAIT) as nodes:
        alone = nodes.start("--join-timeout=0.5", nnodes="2:3")
        returncode, stderr = outcome(alone)
        assert returncode == 1
        assert "fewer than 2 nodes met within 0.5 s, missing: 1 more members" in stderr
        first, second = (nodes.start("--join-timeout=5", nnodes="2:3") for _ in range(2))
        _, workers = world_of(tmp_path, first, second)
        second.kill()
        returncode, stderr = outcome(first)
        assert returncode == 1
        assert "fewer than 2 nodes met within 5 s" in stderr
        assert f":{second.pid}), lost" in stderr
        assert not any(is_alive(worker["pid"]) for worker in workers)


def test_a_worker_that_takes_its_launcher_along_is_a_loss_and_no_failure(tmp_path: Path) -> None:
    source = (
        WORKER
        + """
    if os.environ["GROUP_WORLD_SIZE"] == "2":
        wait_for("two")
        if os.environ["GROUP_RANK"] == "1":
            os.kill(launcher, signal.SIGKILL)
        sys.exit(5)
    wait_for("done")
    """
    )
    with cluster(tmp_path, source) as nodes:
        nodes.times = PATIENT
        pair = [nodes.start(nnodes="1:2") for _ in range(2)]
        number, workers = world_of(tmp_path, *pair)
        order = launchers_by_rank(workers)
        (tmp_path / "two").touch()
        survivor = next(process for process in pair if process.pid == order[0])
        _, workers = world_of(tmp_path, survivor, after=number)
        assert workers[0]["TORCHELASTIC_RESTART_COUNT"] == "0"
        (tmp_path / "done").touch()
        assert outcomes(survivor) == [0]


@pytest.mark.slow("waits until a launcher is taken for lost")
def test_a_launcher_that_was_stopped_for_long_joins_anew(tmp_path: Path) -> None:
    with cluster(tmp_path, WAIT) as nodes:
        first = nodes.start(nnodes="1:2")
        number, _ = world_of(tmp_path, first)
        second = nodes.start(nnodes="1:2")
        number, _ = world_of(tmp_path, first, second, after=number)
        first.send_signal(signal.SIGSTOP)
        number, _ = world_of(tmp_path, second, after=number)
        first.send_signal(signal.SIGCONT)
        number, workers = world_of(tmp_path, first, second, after=number)
        assert launchers_by_rank(workers) == [second.pid, first.pid]
        (tmp_path / "done").touch()
        results = [outcome(process) for process in (first, second)]
        assert [result[0] for result in results] == [0, 0], results
        assert "this node was taken for lost" in results[0][1]


@pytest.mark.slow("waits until a store is given up")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_that_hosts_the_store_ends_the_job_and_it_says_why(tmp_path: Path, signum: signal.Signals) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, write_script(tmp_path, WAIT), tmp_path)
        place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        host = nodes.start(place)
        number, _ = world_of(tmp_path, host)
        limits = (
            "asyncdist.launch.rendezvous.rounds:_REACH_TIMEOUT_S=1 asyncdist.launch.rendezvous.job_store:LOOK_S=0.5"
        )
        guest = nodes.start(place, limits=limits)
        _, workers = world_of(tmp_path, host, guest, after=number)
        host.send_signal(signum)
        returncode, stderr = outcome(guest)
        assert returncode == 1
        assert "Traceback" not in stderr
        assert "a standing daemon (asyncdist-server, ASYNCDIST_STORE)" in stderr
        assert outcome(host)[0] == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
        until(lambda: not any(is_alive(worker["pid"]) for worker in workers), "all workers to end")


def test_a_hosted_store_outlives_the_last_round(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, write_script(tmp_path, WAIT), tmp_path)
        place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        trio = [nodes.start(place, nnodes="2:3") for _ in range(3)]
        world_of(tmp_path, *trio)
        (tmp_path / "done").touch()
        assert outcomes(*trio) == [0, 0, 0]


@pytest.mark.parametrize("durable", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_daemon_that_is_killed_and_started_again_ends_no_job(tmp_path: Path, durable: bool) -> None:
    """With its data, or without, no worker is started anew; and nodes can come again."""
    port = free_port()
    options = ["--durability=durable", f"--data-dir={tmp_path / 'data'}"] if durable else []
    with ExitStack() as stack:
        nodes = Nodes(stack, write_script(tmp_path, WAIT), tmp_path, ASYNCDIST_STORE=f"127.0.0.1:{port}")
        nodes.times = PATIENT
        with daemon(port, *options) as process:
            first = nodes.start(nnodes="2:3")
            with blocking.TCPStore("127.0.0.1", port, namespace="asyncdist-launch") as store:
                assert store.get("launch/job/elastic") == b"job"  # of two at once one calls it so, or both job-1
            pair = [first, nodes.start(nnodes="2:3")]
            number, _ = world_of(tmp_path, *pair)
            process.kill()
        with daemon(port, *options):
            third = nodes.start(nnodes="2:3")
            number, workers = world_of(tmp_path, *pair, third, after=number)
            assert launchers_by_rank(workers)[-1] == third.pid
            assert {worker["ASYNCDIST_JOB_ID"] for worker in workers} == {f"job.{number}"}
            (tmp_path / "done").touch()
            assert outcomes(*pair, third) == [0, 0, 0]


def test_a_job_id_can_be_used_again(tmp_path: Path) -> None:
    (tmp_path / "done").touch()
    with cluster(tmp_path, WORKER + "    print(os.environ['ASYNCDIST_JOB_ID'])\n") as nodes:
        printed = []
        for _ in range(2):
            process = nodes.start(nnodes="1:2")
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, stderr
            printed.append(stdout.decode())
    assert printed == ["[rank 0] job.0\n", "[rank 0] job-1.0\n"]


def test_other_numbers_of_nodes_are_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, WAIT) as nodes:
        first = nodes.start(nnodes="1:3")
        world_of(tmp_path, first)
        returncode, stderr = outcome(nodes.start(nnodes="1:4"))
        assert returncode == 1
        assert "the job has 1 to 3 members" in stderr
        (tmp_path / "done").touch()
        assert outcomes(first) == [0]


def test_a_signal_while_waiting(tmp_path: Path) -> None:
    with cluster(tmp_path, WAIT) as nodes:
        waiting = nodes.start(nnodes="2:3")
        assert waiting.stderr is not None
        until(lambda: b"waiting for 2 to 3 nodes" in waiting.stderr.readline(), "it to say so")
        waiting.send_signal(signal.SIGINT)
        assert outcome(waiting)[0] == 128 + signal.SIGINT


def test_what_the_options_say(tmp_path: Path) -> None:
    script = write_script(tmp_path, "pass")
    done = run("--nnodes=1:2", "--rdzv-id=x", "--rdzv-conf=join_timeout", script)
    assert done.returncode == 2
    assert "KEY=VALUE" in done.stderr
    done = run("--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:1", "--node-rank=1", "--join-timeout=0.1", script)
    assert "no store answers at 127.0.0.1:1" in done.stderr
