"""`asyncdist run` with log files: which bytes land where, also when the disk, a worker or the launcher gives up."""

from __future__ import annotations

import re
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

from jobs import free_port
from launching import DEADLINE_S, clean_environment, is_alive, pids_in, run, running, until, write_script

SPEAK = """
    import os, sys
    print("out", os.environ["RANK"])
    print("err", os.environ["RANK"], file=sys.stderr)
"""

READY = """
    import os, pathlib, signal, sys, time
    folder = pathlib.Path(sys.argv[1])
    def ready():
        (folder / f"{os.getpid()}.pid").touch()
"""


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def workers_lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("[rank "))


def test_redirects_and_tee_by_rank(tmp_path: Path) -> None:
    script, logs = write_script(tmp_path, SPEAK), tmp_path / "logs"
    options = ["--rdzv-id=job", f"--log_dir={logs}", "-r", "0:3,1:1", "--tee=1:2,2:1"]
    done = run("--nproc-per-node", "4", *options, script)
    assert done.returncode == 0, done.stderr
    assert contents(logs) == {
        "job/attempt_0/0/stdout.log": "out 0\n",
        "job/attempt_0/0/stderr.log": "err 0\n",
        "job/attempt_0/1/stdout.log": "out 1\n",
        "job/attempt_0/1/stderr.log": "err 1\n",
        "job/attempt_0/2/stdout.log": "out 2\n",
    }
    assert workers_lines(done.stdout) == ["[rank 2] out 2", "[rank 3] out 3"]
    assert workers_lines(done.stderr) == ["[rank 1] err 1", "[rank 2] err 2", "[rank 3] err 3"]
    assert f"asyncdist run: logs in {logs / 'job'}\n" in done.stderr


def test_a_filter_of_ranks_concerns_the_terminal_alone(tmp_path: Path) -> None:
    script, logs = write_script(tmp_path, SPEAK), tmp_path / "logs"
    options = ["--nproc-per-node=3", "--local-ranks-filter", "0,2"]
    done = run(*options, script)
    shown = [f"[rank {rank}] {name} {rank}" for rank in (0, 2) for name in ("err", "out")]
    assert workers_lines(done.stdout + done.stderr) == shown
    done = run(*options, script, PET_TEE="3", PET_LOG_DIR=str(logs))
    assert workers_lines(done.stdout) == ["[rank 0] out 0", "[rank 2] out 2"]
    assert sorted(contents(logs).values()) == [f"{name} {rank}\n" for name in ("err", "out") for rank in range(3)]


def test_lines_with_a_text_are_collected_from_all_workers(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    script = write_script(tmp_path, SPEAK + "    print('rank', 'apple')\n    print('a, b')\n    sys.exit(3)")
    options = ["--nproc-per-node=2", "--tee=3", f"--log-dir={logs}", "--rdzv-id=job"]
    run(*options, "--duplicate-stdout-filters", "apple,a,,", "--duplicate_stderr_filters=err 1", script)
    found = contents(logs / "job" / "attempt_0")
    expected = [f"[rank {rank}] {text}" for rank in (0, 1) for text in ("a, b", "rank apple")]
    assert sorted(found["filtered_stdout.log"].splitlines()) == expected
    assert found["filtered_stderr.log"] == "[rank 1] err 1\n"


def test_without_a_directory_a_temporary_one_is_made_and_named(tmp_path: Path) -> None:
    done = run("--redirects", "3", write_script(tmp_path, SPEAK), TMPDIR=str(tmp_path))
    assert done.stdout == ""
    found = re.search(r"logs in (\S+)", done.stderr)
    assert found is not None
    folder = Path(found[1])
    assert folder.parent.parent == tmp_path
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)] == [0o700, 0o700]
    assert contents(folder) == {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/0/stderr.log": "err 0\n"}


def test_each_attempt_and_each_run_has_a_folder_and_the_failure_names_its_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("{}")
        print("last words", file=sys.stderr)
        sys.exit(int(os.environ["RANK"]) * 5)
        """,
    )
    for folder in ("job", "job_2"):
        done = run("--nproc-per-node=2", "--max-restarts=1", "-r3", "--rdzv-id=job", "--log-dir", str(logs), script)
        assert done.returncode == 5
        report = done.stderr[done.stderr.rindex("rank 1 failed first") :].splitlines()
        assert report[0].endswith("its last lines were:")
        assert report[1] == "[rank 1] last words"
        its = logs / folder / "attempt_1" / "1"
        assert report[2].endswith(f": {its / 'stderr.log'}, {its / 'stdout.log'}, {its / 'error.json'}")
    assert {name: text for name, text in contents(logs).items() if "stdout" in name} == {
        f"{folder}/attempt_{attempt}/{rank}/stdout.log": f"attempt {attempt}\n"
        for folder in ("job", "job_2")
        for attempt in (0, 1)
        for rank in (0, 1)
    }


def test_a_tee_keeps_every_byte_while_the_terminal_gets_lines(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        r"""
        import os, signal
        pieces = [b"\xff\x00\xfe\n", b"10%\r20%\r\n", b"x" * 3_000_000 + b"\n", b"killed in mid-l"]
        for piece in pieces:
            while piece:
                piece = piece[os.write(1, piece):]
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    options = ["--nproc-per-node=2", "--tee=1", f"--log-dir={tmp_path / 'logs'}", "--rdzv-id=job", "--grace=60"]
    with running(*options, script) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGKILL
    expected = b"\xff\x00\xfe\n10%\r20%\r\n" + b"x" * 3_000_000 + b"\nkilled in mid-l"
    for rank in (0, 1):
        assert (tmp_path / f"logs/job/attempt_0/{rank}/stdout.log").read_bytes() == expected
        prefix = b"[rank %d] " % rank
        lines = [line for line in stdout.splitlines(keepends=True) if line.startswith(prefix)]
        assert lines[0] == prefix + b"\xff\x00\xfe\n"
        assert lines[-1] == prefix + b"killed in mid-l\n"
        assert sum(line.count(b"x") for line in lines) == 3_000_000
    assert b"killed in mid-l\n" in stderr  # the report's last line


def test_a_flood_into_a_file_does_not_block_the_others(tmp_path: Path) -> None:
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
    options = ["--nproc-per-node=2", "--tee=3", f"--log-dir={tmp_path / 'logs'}", "--rdzv-id=job"]
    arguments = [script, str(tmp_path / "flooding"), str(tmp_path / "done")]
    with running(*options, *arguments) as process:
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    lines = stdout.splitlines()
    assert [int(line.split()[2]) for line in lines if line.startswith(b"[rank 1] ")] == list(range(300))
    for rank in (0, 1):
        log = (tmp_path / f"logs/job/attempt_0/{rank}/stdout.log").read_bytes().splitlines()
        assert log == [line[9:] for line in lines if line.startswith(b"[rank %d] " % rank)]


def test_a_disk_without_room_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import sys
        for number in range(2000):
            print(number, "x" * 100)
            print(number, "x" * 100, file=sys.stderr)
        """,
    )
    size_bytes = 50_000

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    options = ["--nproc-per-node=2", "--tee=3", f"--log-dir={tmp_path / 'logs'}", "--rdzv-id=job"]
    command = [sys.executable, "-m", "asyncdist", "run", *options, script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment(), preexec_fn=small_files
    ) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr[-2000:]
    assert len(stdout.splitlines()) == 4000
    assert len(workers_lines(stderr.decode())) == 4000
    assert stderr.count(b"cannot write ") == 1
    assert b"File too large; what does not fit is missing there, the job goes on" in stderr
    sizes = {path.stat().st_size for path in (tmp_path / "logs").rglob("*.log")}
    assert sizes == {size_bytes}


def test_a_log_directory_that_cannot_be_made_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = write_script(tmp_path, "import pathlib, sys; pathlib.Path(sys.argv[1], 'ran').touch()")
    for path, message in (("file", "is not a directory"), ("file/below", "Not a directory")):
        done = run("--tee=3", "--log-dir", str(tmp_path / path), script, str(tmp_path))
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_what_was_redirected_survives_kill_9_of_the_launcher(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        READY + "    os.write(1, b'x' * 1_000_000 + b'\\nlast'); ready(); signal.pause()",
    )
    with running("-r3", "--rdzv-id=job", f"--log-dir={tmp_path / 'logs'}", script, str(tmp_path)) as process:
        pids = pids_in(tmp_path, 1)
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        until(lambda: not any(is_alive(pid) for pid in pids), "the worker to end")
    assert (tmp_path / "logs/job/attempt_0/0/stdout.log").read_bytes() == b"x" * 1_000_000 + b"\nlast"


def test_a_terminal_that_nobody_reads_does_not_stop_workers_that_are_redirected(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        READY
        + """
    while os.environ["RANK"] == "0":
        os.write(1, b"x" * 99 + b"\\n")  # shown, and nobody reads: this one has to wait
    for _ in range(20):
        os.write(1, b"y" * 1_000_000)
    ready()
    """,
    )
    options = ["--nproc-per-node=2", "-r", "1:1", "--rdzv-id=job", f"--log-dir={tmp_path / 'logs'}"]
    with running(*options, script, str(tmp_path)) as process:
        pids_in(tmp_path, 1)
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    assert (tmp_path / "logs/job/attempt_0/1/stdout.log").stat().st_size == 20_000_000


def test_an_unfinished_line_is_in_the_file_at_once_and_a_second_interrupt_does_not_lose_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        READY
        + """
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"hold on"))
    ready()
    while True:  # one that comes just before signal.pause() is seen after it only
        time.sleep(0.02)
    """,
    )
    options = ["--tee=1", "--rdzv-id=job", f"--log-dir={tmp_path / 'logs'}"]
    log = tmp_path / "logs/job/attempt_0/0/stdout.log"
    with running(*options, script, str(tmp_path)) as process:
        pids_in(tmp_path, 1)
        process.send_signal(signal.SIGINT)
        until(lambda: log.read_bytes() == b"hold on", "the worker's words")
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT
    assert stdout == b"[rank 0] hold on\n"


def test_nodes_that_share_a_log_directory_have_a_folder_each(tmp_path: Path) -> None:
    script, logs = write_script(tmp_path, SPEAK + "    sys.exit(int(os.environ['RANK']))"), tmp_path / "logs"
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "-t1", f"--log-dir={logs}"]
    with running("--node-rank=0", *common, script) as first, running("--node-rank=1", *common, script) as second:
        said = [process.communicate(timeout=DEADLINE_S)[1].decode() for process in (first, second)]
    assert {name: text for name, text in contents(logs).items() if text} == {
        "job_node0/attempt_0/0/stdout.log": "out 0\n",
        "job_node1/attempt_0/0/stdout.log": "out 1\n",
    }
    for node, text in enumerate(said):  # both name the files of the one that failed
        assert f"logs in {logs / f'job_node{node}'}\n" in text
        assert f"{logs / 'job_node1/attempt_0/0/stdout.log'}\n" in text


def test_no_output_is_lost_or_doubled_between_a_worker_and_what_it_starts(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import subprocess, sys
        for _ in range(20):
            print("parent")
            subprocess.run([sys.executable, "-I", "-S", "-c", "print('child')"])
        """,
    )
    run("-r1", "--rdzv-id=job", f"--log-dir={tmp_path / 'logs'}", script)
    assert (tmp_path / "logs/job/attempt_0/0/stdout.log").read_text() == "parent\nchild\n" * 20
