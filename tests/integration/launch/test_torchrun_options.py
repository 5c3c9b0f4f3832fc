"""Less common options of torchrun's, taken with their meaning."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import free_port
from launching import DEADLINE_S, clean_environment, pids_in, run, running, write_script

HANDLE = """
    import os, pathlib, signal, sys, time
    def handler(signum, frame):
        print("got", signal.Signals(signum).name, flush=True)
        sys.exit(3)
    for name in ("SIGQUIT", "SIGUSR1"):
        signal.signal(getattr(signal, name), handler)
    pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    while True:  # one that comes just before signal.pause() is seen after it only
        time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("options", "signum"), [([], signal.SIGQUIT), (["--signals-to-handle=SIGTERM,SIGUSR1"], signal.SIGUSR1)]
)
def test_signals_that_end_the_job(tmp_path: Path, options: list[str], signum: signal.Signals) -> None:
    with running(*options, write_script(tmp_path, HANDLE), str(tmp_path)) as process:
        pids_in(tmp_path, 1)
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signum
    assert stdout == f"[rank 0] got {signum.name}\n".encode()
    assert f"{signum.name}: passed on" in stderr.decode()


def test_what_workers_find_and_what_stands_before_their_lines(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ASYNCDIST_SOCKET_IFNAME")))
        """,
    )
    done = run(
        *(
            "--nproc-per-node=2",
            "--virtual-local-rank",
            "--local_addr=127.0.0.1",
            "--run-path",
            "--role=trainer",
            script,
        ),
        CUDA_VISIBLE_DEVICES="3,5",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${role_name}${local_rank}]:",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(" ") for line in sorted(done.stdout.splitlines())]
    assert [line[0] for line in lines] == ["[trainer0]:0 0 3", "[trainer1]:1 0 5"]
    assert all(line[2].startswith("lo") for line in lines)


def test_workers_without_a_gpu_of_their_own_are_refused_before_any_starts(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('ran')")
    done = run("--nproc-per-node=2", "--virtual-local-rank", script, CUDA_VISIBLE_DEVICES="3")
    assert (done.returncode, done.stdout) == (1, "")
    assert "local rank 1 has no GPU of its own: CUDA_VISIBLE_DEVICES is '3'" in done.stderr


def test_port_0_of_one_node_is_a_free_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, 'import os; print(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) > 0)')
    done = run("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script)
    assert done.stdout == "[rank 0] 127.0.0.1 True\n", done.stderr


PARSE = """
    import argparse, os
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")), given.local_rank, given.rest)
"""


@pytest.mark.slow("two interpreters that nothing is imported into before")
@pytest.mark.parametrize(("use_env", "told"), [((), (0, 1)), (("--use_env",), (-1, -1))])
def test_the_launch_utility_tells_scripts_their_local_rank(
    tmp_path: Path, use_env: tuple[str, ...], told: tuple[int, int]
) -> None:
    write_script(tmp_path, PARSE, "parses.py")
    nodes = (
        "--nproc_per_node=2",
        "--nnodes",
        "1",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    )
    launch = [sys.executable, "-m", "asyncdist.launch", *nodes, *use_env, "-m", "parses", "epochs", "--use_env"]
    done = subprocess.run(
        launch, env=clean_environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} {rank} 2 {told[rank]} ['epochs', '--use_env']" for rank in (0, 1)
    ]
