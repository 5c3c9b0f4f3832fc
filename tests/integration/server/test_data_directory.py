"""What operators do with a data directory, also on a disk without room."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from journal_kit import daemon
from server_kit import SocketClient

from asyncdist_server.journal.data_directory import DataDirectory
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.wire import messages as m

DEADLINE_S = 60.0


def command(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "asyncdist_server", *arguments]
    if not prelude:
        return forked.run(program, DEADLINE_S)
    line = f'{prelude} exec "$@"'
    return subprocess.run(["sh", "-c", line, "sh", *program], capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o770, True), (0o702, True)])
def test_a_directory_to_which_others_can_write_is_refused(tmp_path: Path, mode: int, refused: bool) -> None:
    """They could put a link in the place of a file that the daemon writes."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    if refused:
        with pytest.raises(JournalError, match=rf"can write to .* \(mode {mode:04o}\): `chmod go-w {data}`, or"):
            DataDirectory(data)
        assert not list(data.iterdir())
        data /= "inside"
    DataDirectory(data).close()
    assert data.stat().st_mode & 0o777 == (0o700 if refused else mode)


def test_looking_at_a_damaged_journal_leaves_it_as_it_is(tmp_path: Path) -> None:
    """What is to be mended by hand, or kept as it was found, is there still."""
    data = tmp_path / "data"
    with daemon(data) as running:
        running.start()
        with SocketClient(running.port) as client:
            for number in range(20):
                client.ask(m.SET, b"k%d" % number, b"v" * 4000)
        running.kill()
    log = data / "journal.sqlite-wal"
    contents = bytearray(log.read_bytes())
    contents[len(contents) // 2] ^= 0x40
    log.write_bytes(contents)
    for name in ("verify", "backup", "verify"):
        refused = command(name, "--data-dir", str(data))
        assert refused.returncode == 1
        assert f"{log} is damaged behind byte" in refused.stderr
    assert log.read_bytes() == contents


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_log_that_was_cut_short_after_a_kill_is_refused_by_daemon_and_verify(tmp_path: Path, part: float) -> None:
    """What was acknowledged is served, or it is told that it is gone."""
    data = tmp_path / "data"
    with daemon(data) as running:
        running.start()
        with SocketClient(running.port) as client:
            for number in range(300):
                client.ask(m.SET, b"k%d" % number, b"v")
        running.kill()
        log = data / "journal.sqlite-wal"
        whole = log.read_bytes()
        log.write_bytes(whole[: int(len(whole) * part)])
        verified, started = command("verify", "--data-dir", str(data)), command(*running.command()[3:])
        for refused in (verified, started):
            assert refused.returncode == 1
            assert f"{log} is cut short behind byte" in refused.stderr
            assert "put the file back as it was, or restore a backup" in refused.stderr
        assert verified.stderr.splitlines()[-1] == started.stderr.splitlines()[-1]
        log.write_bytes(whole)
        assert "300 keys" in command("verify", "--data-dir", str(data)).stdout
        running.start()
        running.stop()


def test_a_backup_takes_the_place_of_a_journal_that_was_cut_short(tmp_path: Path) -> None:
    """And of what was noted of it, which is kept beside it."""
    data = tmp_path / "data"
    with daemon(data) as running:
        running.start()
        with SocketClient(running.port) as client:
            client.ask(m.SET, b"k", b"v")
            made = command("backup", "--data-dir", str(data))
            for number in range(20):
                client.ask(m.SET, b"k%d" % number, b"v")
        running.kill()
        os.truncate(data / "journal.sqlite-wal", 0)
        assert command("verify", "--data-dir", str(data)).returncode == 1
        restored = command("restore", made.stdout.strip(), "--data-dir", str(data))
        assert restored.returncode == 0, restored.stderr
        (replaced,) = data.glob("replaced-*")
        names = {path.name for path in replaced.iterdir()}
        assert names == {"journal.sqlite", "journal.sqlite-wal", "journal.sqlite-acknowledged"}
        assert "1 keys" in command("verify", "--data-dir", str(data)).stdout
        running.start()
        running.stop()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are set on Linux only")
def test_a_daemon_that_cannot_write_an_answer_lets_nobody_wait_for_it(tmp_path: Path) -> None:
    with daemon(tmp_path / "data") as running:
        running.start()
        assert running.process is not None
        soft, hard = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        refused = command("backup", "--data-dir", str(tmp_path / "data"), "--timeout", str(DEADLINE_S))
        assert refused.returncode == 1
        assert "could not answer: its log says why" in refused.stderr
        assert not list((tmp_path / "data" / "backups").iterdir())
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
        assert command("backup", "--data-dir", str(tmp_path / "data")).returncode == 0
        running.process.terminate()
        said = running.communicate()
        assert running.process.returncode == 0
        assert "cannot answer" in said
        assert "Traceback" not in said


def asker(data: Path) -> subprocess.Popen[bytes]:
    """One who asks for a backup of a daemon that is stopped just now, and waits."""
    process = subprocess.Popen([sys.executable, "-m", "asyncdist_server", "backup", "--data-dir", str(data)])
    deadline = time.monotonic() + DEADLINE_S
    while not list((data / "backups").glob("request-*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return process


def end(process: subprocess.Popen[bytes], signal_number: signal.Signals) -> None:
    process.send_signal(signal_number)
    process.wait(DEADLINE_S)


def test_who_is_killed_while_it_waits_for_a_backup_leaves_nothing_for_ever(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with daemon(data) as running:
        running.start()
        assert running.process is not None
        for number, ending in enumerate((signal.SIGINT, signal.SIGKILL)):
            running.process.send_signal(signal.SIGSTOP)
            end(asker(data), ending)
            running.process.send_signal(signal.SIGCONT)
            assert command("backup", "--data-dir", str(data)).returncode == 0
            # Who was interrupted has withdrawn its request, who was killed could not: it has an answer nobody reads.
            assert len(list((data / "backups").glob("answer-*"))) == number
        (answer,) = (data / "backups").glob("answer-*")
        os.utime(answer, (0, 0))
        assert command("backup", "--data-dir", str(data)).returncode == 0
        assert not list((data / "backups").glob("answer-*"))
        running.process.send_signal(signal.SIGSTOP)
        end(asker(data), signal.SIGKILL)
        running.kill()
        for name in ("backups/answer-1", "backups/.answer-1-x", ".identity-x", ".unfinished-x", ".journal.sqlite-x"):
            (data / name).touch()
        running.start()
        running.stop()
    assert {path.suffix for path in (data / "backups").iterdir()} == {".sqlite"}
    names = {"lock", "identity", "journal.sqlite", "journal.sqlite-acknowledged", "backups"}
    assert {path.name for path in data.iterdir()} == names


def test_a_disk_that_is_full_at_the_first_start_is_told(tmp_path: Path) -> None:
    options = ("--port", "0", "--durability", "durable", "--data-dir", str(tmp_path / "data"))
    refused = command(*options, prelude="ulimit -f 0;")
    assert refused.returncode == 1
    assert f"cannot write to the data directory {tmp_path}/data: File too large" in refused.stderr
