"""`asyncdist run` on one node: environment, output, exit codes, options."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import forked
import pytest
from click.testing import CliRunner
from launching import DEADLINE_S, clean_environment, run, running, write_script

from asyncdist.cli import main

SHOW = """
    import json, os, sys
    names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT "
             "ASYNCDIST_STORE ASYNCDIST_JOB_ID ASYNCDIST_TOKEN OMP_NUM_THREADS TORCHELASTIC_RESTART_COUNT "
             "TORCHELASTIC_MAX_RESTARTS ROLE_NAME ROLE_RANK").split()
    print(json.dumps({name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:]}))
"""


def shown(stdout: str) -> list[dict[str, object]]:
    """What the workers of SHOW printed, by rank."""
    found = [json.loads(line.partition("] ")[2]) for line in stdout.splitlines()]
    return sorted(found, key=lambda entry: int(entry["RANK"]))


def test_environment_of_every_worker(tmp_path: Path) -> None:
    done = run("--nproc-per-node", "3", write_script(tmp_path, SHOW))
    assert done.returncode == 0, done.stderr
    workers = shown(done.stdout)
    assert [worker["RANK"] for worker in workers] == ["0", "1", "2"]
    for rank, worker in enumerate(workers):
        assert worker["LOCAL_RANK"] == str(rank)
        assert (worker["WORLD_SIZE"], worker["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (worker["GROUP_RANK"], worker["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert worker["MASTER_ADDR"] == "127.0.0.1"
        assert worker["ASYNCDIST_STORE"] == f"127.0.0.1:{worker['MASTER_PORT']}"
        assert str(worker["ASYNCDIST_JOB_ID"]).endswith(".0")
        assert worker["OMP_NUM_THREADS"] == "1"
        assert worker["TORCHELASTIC_RESTART_COUNT"] == "0"
    for name in ("ASYNCDIST_JOB_ID", "ASYNCDIST_TOKEN", "ASYNCDIST_STORE"):
        assert len({worker[name] for worker in workers}) == 1
    assert len(str(workers[0]["ASYNCDIST_TOKEN"])) >= 22
    assert f"store hosted at {workers[0]['ASYNCDIST_STORE']}" in done.stderr
    assert done.stderr.count("OMP_NUM_THREADS=1") == 1
    assert len(done.stderr.splitlines()) == 2


def test_torchruns_other_options_and_its_variables(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW)
    unused = ("--rdzv_backend=c10d", "--rdzv-conf", "timeout=5", "--monitor-interval=5", "--start-method=fork")
    done = run(*unused, "--use_env", "--role", "trainer", script, PET_NPROC_PER_NODE="3", PET_MAX_RESTARTS="2")
    workers = shown(done.stdout)
    assert [(worker["ROLE_NAME"], worker["ROLE_RANK"]) for worker in workers] == [("trainer", str(r)) for r in range(3)]
    assert {worker["TORCHELASTIC_MAX_RESTARTS"] for worker in workers} == {"2"}
    assert (
        len(shown(run("--nproc-per-node", "1", script, PET_NPROC_PER_NODE="3").stdout)) == 1
    )  # said here, so it counts


def test_every_run_has_a_token_of_its_own_and_never_the_users(tmp_path: Path) -> None:
    script, token = write_script(tmp_path, SHOW), "the-token-of-these-tests-and-43-characters-"
    fresh = {shown(run(script).stdout)[0]["ASYNCDIST_TOKEN"] for _ in range(2)}
    derived = {shown(run("--rdzv-id", job, script, ASYNCDIST_TOKEN=token).stdout)[0]["ASYNCDIST_TOKEN"] for job in "ab"}
    assert len(fresh | derived | {token, None}) == 6


def test_arguments_behind_the_script_are_the_scripts(tmp_path: Path) -> None:
    done = run("--nproc_per_node=1", write_script(tmp_path, SHOW), "--nproc-per-node", "7", "-m", "--", "--x_y=1", "-h")
    assert shown(done.stdout)[0]["argv"] == ["--nproc-per-node", "7", "-m", "--", "--x_y=1", "-h"]
    done = run("--nproc-per-node", "1", "--", write_script(tmp_path, SHOW), "--", "a")
    assert shown(done.stdout)[0]["argv"] == ["--", "a"]


def test_module_program_and_local_rank(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW, "shower.py")
    done = run("-m", "shower", "a", PYTHONPATH=str(tmp_path))
    assert shown(done.stdout)[0]["argv"] == ["a"]
    done = run("--nproc-per-node", "2", "--pass-local-rank", script, "a")
    assert [worker["argv"] for worker in shown(done.stdout)] == [[f"--local_rank={rank}", "a"] for rank in (0, 1)]
    done = run("--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.stdout == "[rank 0] 0 of 1\n"
    done = run("--no-python", "no-such-program")
    assert done.returncode == 127
    assert "cannot start 'no-such-program': No such file" in done.stderr


def test_stdout_and_stderr_stay_apart_and_keep_their_bytes(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        r"""
        import os
        os.write(1, b"out \xff\x00\nunfinished")
        os.write(2, b"err\r\n")
        """,
    )
    with running("--nproc-per-node", "2", script, OMP_NUM_THREADS="2") as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert sorted(stdout.splitlines(keepends=True)) == sorted(
        line
        for rank in (b"0", b"1")
        for line in (b"[rank " + rank + b"] out \xff\x00\n", b"[rank " + rank + b"] unfinished\n")
    )
    assert sorted(stderr.split(b"\n")[1:]) == [b"", b"[rank 0] err\r", b"[rank 1] err\r"]


def test_a_flood_from_one_worker_does_not_block_the_others(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        flooding, done = (pathlib.Path(argument) for argument in sys.argv[1:])
        if os.environ["RANK"] == "0":
            while not done.exists():  # floods until the quiet one got through
                sys.stdout.write(("x" * 99 + "\\n") * 1000)
                flooding.touch()
        else:
            while not flooding.exists():
                time.sleep(0.001)
            for number in range(300):
                print(number, "y" * 1000)
            done.touch()
        """,
    )
    with running("--nproc-per-node", "2", script, str(tmp_path / "flooding"), str(tmp_path / "done")) as process:
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    lines = stdout.splitlines()
    assert [int(line.split()[2]) for line in lines if line.startswith(b"[rank 1] ")] == list(range(300))
    assert {line for line in lines if not line.startswith(b"[rank 1] ")} == {b"[rank 0] " + b"x" * 99}


def test_exit_code_and_last_lines_of_the_first_failure(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK"] == "1":
            for number in range(30):
                print("line", number, file=sys.stderr)
            sys.exit(7)
        sys.stdin.read()
        """,
    )
    done = run("--nproc-per-node", "2", script)
    assert done.returncode == 7
    report = done.stderr[done.stderr.index("rank 1 failed first: exit code 7 (host ") :].splitlines()
    assert report[1:] == [f"[rank 1] line {number}" for number in range(10, 30)]
    assert "[rank 1] line 0\n" in done.stderr


def test_death_by_signal_is_named_and_becomes_the_shells_code(tmp_path: Path) -> None:
    done = run(write_script(tmp_path, "import os; print('last words', flush=True); os.kill(os.getpid(), 11)"))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 0 failed first: killed by SIGSEGV" in done.stderr
    assert done.stderr.endswith("[rank 0] last words\n")


@pytest.mark.parametrize(("works_at", "code", "restarts"), [("1", 0, "2"), ("3", 5, "2")])
def test_restarts_run_the_whole_group_again(tmp_path: Path, works_at: str, code: int, restarts: str) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(attempt, os.environ["ASYNCDIST_JOB_ID"].split(".")[1])
        sys.exit(0 if attempt == sys.argv[1] or os.environ["RANK"] == "0" else 5)
        """,
    )
    done = run("--nproc-per-node", "2", "--max-restarts", restarts, script, works_at)
    attempts = range(2 if code == 0 else 3)
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == sorted(f"[rank {r}] {a} {a}" for r in (0, 1) for a in attempts)
    assert done.stderr.count("restarting all workers") == len(attempts) - 1
    assert done.stderr.count("rank 1 failed first: exit code 5") == len(attempts) - (code == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        ([], "Missing argument 'SCRIPT'"),
        (["--nproc-per-node", "0", "-m", "x"], "between 1 and"),
        (["--nproc-per-node", "lots", "-m", "x"], "neither a number"),
        (["--max-restarts", "-1", "-m", "x"], "max-restarts"),
        (["--grace", "-1", "-m", "x"], "grace"),
        (["--nnodes", "2", "-m", "x"], "a place to meet"),
        (["--node-rank", "1", "-m", "x"], "node-rank must be between"),
        (["--nnodes=2", "--rdzv-endpoint", "host:0", "-m", "x"], "not a port"),
        (["--rdzv-endpoint", "host:65536", "-m", "x"], "not a port"),
        (["--rdzv-endpoint", "h:1", "--master-addr", "h", "-m", "x"], "give one"),
        (["--standalone", "--nnodes", "2", "-m", "x"], "--standalone"),
        (["--no-python", "-m", "x"], "exclude each other"),
        (["--what", "x"], "No such option"),
        (
            ["--logs_specs", "mine", "x"],
            "run has no --logs-specs, as torchrun has: it names a plugin",
        ),
        (["-t", "4", "x"], "'4' is neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
        (["-r", "0:1,0:2", "x"], "names local rank 0 twice"),
        (["--local_ranks_filter", "0;1", "x"], "is not a list of local ranks"),
        (["--local-addr=192.0.2.1", "x"], "no network interface here has '192.0.2.1'"),
        (["--signals-to-handle=SIGTERM,USR1", "x"], "'USR1' is not a signal"),
        (["--numa-binding=node", "x"], "no --numa-binding, as torchrun has: bind in the script"),
        (["--rdzv-backend", "etcd", "x"], "is not one of 'static', 'c10d'"),
        (["-n", "4", "x"], "mpiexec's -n is --nproc-per-node here"),
        (["-np", "4", "x"], "mpiexec's -n is --nproc-per-node here"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["run", *arguments], env={"ASYNCDIST_STORE": None, "ASYNCDIST_TOKEN": None})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Usage: " in result.output


def test_a_weak_token_is_refused() -> None:
    result = CliRunner().invoke(main, ["run", "-m", "x"], env={"ASYNCDIST_TOKEN": "hunter2"})
    assert result.exit_code == 2
    assert "22 are needed" in " ".join(result.output.split())
    assert "hunter2" not in result.output


def test_the_command_line_has_help_and_version() -> None:
    for arguments, expected in ((["--help"], "run"), (["run", "--help"], "--nproc-per-node"), (["--version"], "0.1.0")):
        done = forked.run([sys.executable, "-m", "asyncdist", *arguments], DEADLINE_S, clean_environment())
        assert done.returncode == 0
        assert expected in done.stdout
