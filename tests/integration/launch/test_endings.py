"""How a job ends: failures, grace, signals, and a launcher that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DEADLINE_S, clean_environment, is_alive, pids_in, run, running, until, write_script

GRACE_S = 0.3

# argv[1] is a folder: each process leaves a file <pid>.pid there once it is ready. A signal that comes just before
# signal.pause() or one long sleep sets a flag that Python looks at afterwards: hence the short naps.
READY = """
    import os, pathlib, signal, subprocess, sys, time
    folder = pathlib.Path(sys.argv[1])
    def ready(pid=None):
        (folder / f"{pid or os.getpid()}.pid").touch()
    def wait_for_signals(seen=()):
        while not seen:
            time.sleep(0.02)
"""

STUBBORN = (
    READY
    + """
    def log(text):
        print(text, time.monotonic(), flush=True)
    if os.environ["RANK"] == "1":
        while len(list(folder.glob("*.pid"))) < 1:
            time.sleep(0.01)
        log("failing")
        sys.exit(9)
    signal.signal(signal.SIGTERM, lambda *_: log("SIGTERM"))
    ready()
    wait_for_signals()
"""
)

FAMILY = (
    READY
    + """
    child = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\\n"
        "print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
    child.stdout.readline()
    ready(child.pid)
    if len(sys.argv) > 2:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready()
    wait_for_signals()
"""
)


def all_gone(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def test_grace_then_sigterm_then_sigkill(tmp_path: Path) -> None:
    done = run("--nproc-per-node", "2", "--grace", str(GRACE_S), write_script(tmp_path, STUBBORN), str(tmp_path))
    assert done.returncode == 9
    events = {line.split()[2]: float(line.split()[3]) for line in done.stdout.splitlines()}
    assert list(events) == ["failing", "SIGTERM"]
    assert events["SIGTERM"] - events["failing"] >= GRACE_S
    assert all_gone(pids_in(tmp_path, 1))
    assert "rank 1 failed first: exit code 9" in done.stderr


def test_the_others_may_end_by_themselves_within_the_grace(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        READY
        + """
    if os.environ["RANK"] == "1":
        os._exit(9)
    signal.signal(signal.SIGTERM, lambda *_: print("must not come", flush=True))
    time.sleep(0.3)
    sys.exit(4)
    """,
    )
    done = run("--nproc-per-node", "2", "--grace", "60", script, str(tmp_path))
    assert done.returncode == 9
    assert done.stdout == ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(tmp_path: Path, signum: signal.Signals) -> None:
    if signal.getsignal(signum) is signal.SIG_IGN:
        pytest.skip(f"{signum.name} is ignored here, as under nohup, and would be by the launcher too")
    script = write_script(
        tmp_path,
        READY
        + """
    def handler(signum, frame):
        print("got", signal.Signals(signum).name, flush=True)
        sys.exit(3)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), handler)
    ready()
    wait_for_signals()
    """,
    )
    with running("--nproc-per-node", "2", script, str(tmp_path)) as process:
        pids = pids_in(tmp_path, 2)
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signum
    assert sorted(stdout.decode().splitlines()) == [f"[rank {rank}] got {signum.name}" for rank in (0, 1)]
    assert f"{signum.name}: passed on" in stderr.decode()
    assert b"failed first" not in stderr
    assert all_gone(pids)


def test_workers_that_end_well_after_a_signal_make_a_clean_stop(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, READY + "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); wait_for_signals()"
    )
    with running("--nproc-per-node", "2", script, str(tmp_path)) as process:
        pids_in(tmp_path, 2)
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_other_signals_reach_the_workers_and_end_nothing(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        READY
        + """
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    ready()
    wait_for_signals(seen)
    print("checkpoint")
    """,
    )
    with running(script, str(tmp_path)) as process:
        pids_in(tmp_path, 1)
        process.send_signal(signal.SIGUSR1)
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert stdout == b"[rank 0] checkpoint\n"


def test_a_signal_that_workers_do_not_handle_ends_nothing(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
        if rank == "1":
            signal.signal(signal.SIGUSR1, lambda *_: (folder / "go").touch())
        (folder / f"{os.getpid()}.pid").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        """,
    )
    with running("--nproc-per-node=2", script, str(tmp_path)) as process:
        pids_in(tmp_path, 2)
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGUSR1)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr.decode()
    assert b"SIGUSR1: passed on to rank 1\n" in stderr
    assert b"SIGUSR2: no worker handles it, so none got it\n" in stderr


def test_grandchildren_end_with_their_worker(tmp_path: Path) -> None:
    with running("--nproc-per-node", "2", write_script(tmp_path, FAMILY), str(tmp_path)) as process:
        pids = pids_in(tmp_path, 4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert all_gone(pids)


def test_second_interrupt_kills_workers_that_ignore_the_first(tmp_path: Path) -> None:
    with running("--nproc-per-node", "2", write_script(tmp_path, FAMILY), str(tmp_path), "ignore") as process:
        pids = pids_in(tmp_path, 4)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if b"ranks 0, 1 are still running: waiting for up to 29 s; Ctrl-C (SIGINT) kills at once" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert all_gone(pids)


def test_shutdown_timeout_bounds_what_follows_a_signal(tmp_path: Path) -> None:
    script = write_script(tmp_path, FAMILY)
    with running(script, str(tmp_path), "ignore", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="0.2") as process:
        pids = pids_in(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert b"asyncdist run: rank 0 is still running: SIGKILL" in stderr
    assert all_gone(pids)


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    with running("--nproc-per-node", "2", write_script(tmp_path, FAMILY), str(tmp_path), "ignore") as process:
        pids = pids_in(tmp_path, 4)
        children = children_of(process.pid)
        assert len(children) == 3  # two workers and the killer of orphans
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        until(lambda: all_gone([*pids, *children]), "workers, what they started, and the killer of orphans to end")


def test_without_the_killer_of_orphans_the_kernel_still_ends_the_workers(tmp_path: Path) -> None:
    script = write_script(tmp_path, READY + "    ready(); wait_for_signals()")
    with running("--nproc-per-node", "2", script, str(tmp_path)) as process:
        pids = pids_in(tmp_path, 2)
        (killer,) = set(children_of(process.pid)) - set(pids)
        os.kill(killer, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        until(lambda: all_gone(pids), "the workers to end")


def test_a_descendant_left_behind_by_a_finished_worker_ends_with_the_job(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        READY + "    child = subprocess.Popen(['sleep', '600']); ready(child.pid); print('done')",
    )
    done = run(script, str(tmp_path))
    assert done.returncode == 0
    assert done.stdout == "[rank 0] done\n"
    assert all_gone(pids_in(tmp_path, 1))


def test_a_signal_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    script = write_script(tmp_path, READY + "    ready(); wait_for_signals()")
    command = ["sh", "-c", f"trap '' HUP; exec {sys.executable} -m asyncdist run {script} {tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()) as process:
        pids_in(tmp_path, 1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"SIGHUP" not in stderr


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
