"""What root does in a data directory of another user, who can put a link in the place of anything there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from journal_kit import Daemon, daemon
from server_kit import SocketClient

from asyncdist_server.wire import messages as m

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root works for others")

SOMEBODY = 65_534
DEADLINE_S = 60.0
ROOTS = "root's own\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory to which every user finds the way; those of pytest are closed to others."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def data(place: Path) -> Path:
    """The data of a daemon that was killed, all of it somebody else's, and a backup."""
    path = place / "data"
    with daemon(path) as running:
        running.start()
        with SocketClient(running.port) as client:
            client.ask(m.SET, b"k", b"v")
        assert command("backup", "--data-dir", str(path)).returncode == 0
        running.kill()
    give_away(path)
    return path


def give_away(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, SOMEBODY, SOMEBODY, follow_symlinks=False)


def backup_in(data: Path) -> Path:
    (path,) = (data / "backups").glob("*.sqlite")
    return path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "asyncdist_server", *arguments], DEADLINE_S)


WATCHED = """
import os, sys
from asyncdist_server.cli import main

seen = 0

def look(event, arguments):
    global seen
    if event == "os.kill" or any(f"{data}/" in str(each) for each in arguments):
        seen += 1
        if os.geteuid() == 0:
            print("ROOT", event, arguments, file=sys.stderr, flush=True)
            os._exit(99)

data = sys.argv[1]
sys.addaudithook(look)
main(sys.argv[2:], standalone_mode=False)
assert seen
"""


@pytest.mark.parametrize("what", ["backup", "verify", "restore", "verify-file"])
def test_root_looks_at_no_name_in_the_directory_of_another_user(data: Path, what: str) -> None:
    file, place = str(backup_in(data)), ["--data-dir", str(data)]
    arguments = {
        "backup": ["backup", *place],
        "verify": ["verify", *place],
        "restore": ["restore", file, *place],
        "verify-file": ["verify", file],
    }[what]
    done = forked.run([sys.executable, "-c", WATCHED, str(data), *arguments], DEADLINE_S)
    assert done.returncode == 0, done.stderr


SWAPPED = """
import os, sys
from asyncdist_server.cli import main

data, roots = sys.argv[1:3]
name = data + "/.restored.sqlite"

swapping = False

def swap(event, arguments):
    global swapping
    used = any(".restored.sqlite" in str(each) for each in arguments)
    if used and not swapping and os.path.exists(name):
        swapping = True
        os.rename(name, data + "/was")
        os.symlink(roots, name)
        swapping = False

sys.addaudithook(swap)
main(sys.argv[3:])
"""


def test_a_restore_writes_to_no_file_of_root(data: Path, place: Path) -> None:
    """A link is put in the place of the new journal, at every moment at which its name is used."""
    roots = place / "roots"
    roots.write_text(ROOTS)
    arguments = ["restore", str(backup_in(data)), "--data-dir", str(data)]
    forked.run([sys.executable, "-c", SWAPPED, str(data), str(roots), *arguments], DEADLINE_S)
    assert (data / "was").exists()
    assert roots.read_text() == ROOTS


def test_a_backup_of_root_alone_is_restored_and_what_its_owner_may_not_read_is_not(data: Path, place: Path) -> None:
    """Root names a file; the owner of the directory can put a link in its place there, and nowhere else."""
    private = place / "private"
    private.mkdir(mode=0o700)
    kept = private / "kept.sqlite"
    shutil.copy(backup_in(data), kept)
    kept.chmod(0o600)
    assert command("restore", str(kept), "--data-dir", str(data)).returncode == 0
    link = backup_in(data)
    link.unlink()
    link.symlink_to(kept)
    refused = command("restore", str(link), "--data-dir", str(data))
    assert refused.returncode == 1
    assert f"cannot read {link}: Permission denied" in refused.stderr
    assert command("verify", "--data-dir", str(data)).returncode == 0


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_a_link_of_root_into_that_directory_is_followed_by_its_owner(data: Path, place: Path, linked: str) -> None:
    """Root's own link leads where the owner can put a link to what root alone may read."""
    private = place / "private"
    private.mkdir(mode=0o700)
    kept = private / "kept.sqlite"
    shutil.copy(backup_in(data), kept)
    kept.chmod(0o600)
    inside = backup_in(data)
    inside.unlink()
    inside.symlink_to(kept)
    way = place / "latest"
    way.symlink_to(inside if linked == "file" else inside.parent)
    named = way if linked == "file" else way / inside.name
    refused = command("restore", str(named), "--data-dir", str(data))
    assert refused.returncode == 1
    assert "Permission denied" in refused.stderr


def test_root_signals_no_process_of_another_user(data: Path) -> None:
    """Whose directory it is writes the pid there."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(process.kill)
        lock = os.open(data / "lock", os.O_RDWR)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        for said in (b"%d listens\n" % process.pid, b"0 listens\n", b"-1 listens\n", b"all listens\n", b"\xff"):
            os.ftruncate(lock, 0)
            os.pwrite(lock, said, 0)
            refused = command("backup", "--data-dir", str(data), "--timeout", "0.2")
            assert refused.returncode == 1
            assert refused.stderr.startswith("Error: ")
            assert process.poll() is None
    assert not list((data / "backups").glob("request-*"))


AS_SOMEBODY = """
import encodings.idna, os, sys
from asyncdist_server.cli import main
from asyncdist_server.serving.daemon import version

version()
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
main(sys.argv[2:])
"""


def as_somebody(running: Daemon) -> Daemon:
    """Start it as the user to whom its data belongs, who may not be able to start an interpreter of root's."""
    arguments = [*running.command()[3:], "--insecure-no-auth"]
    program = [sys.executable, "-c", AS_SOMEBODY, str(SOMEBODY), *arguments]
    running.process = forked.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.process.stdout is not None
    assert running.process.stdout.readline().startswith("asyncdist-server ready on"), running.communicate()
    return running


@pytest.mark.parametrize("what", ["backup", "restore", "verify"])
def test_other_users_are_told_what_they_may_not_do(data: Path, place: Path, what: str) -> None:
    (place / "private").mkdir(mode=0o700)
    data.rename(place / "private" / "data")
    kept = place / "kept"
    kept.write_text("no backup")
    arguments = [what, *([str(kept)] if what == "restore" else []), "--data-dir", str(place / "private" / "data")]
    refused = forked.run([sys.executable, "-c", AS_SOMEBODY, str(SOMEBODY), *arguments], DEADLINE_S)
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr
    assert str(place / "private" / "data") in refused.stderr


def test_root_has_the_daemon_of_another_user_make_a_backup(data: Path) -> None:
    with daemon(data) as running:
        as_somebody(running)
        made = command("backup", "--data-dir", str(data))
        assert made.returncode == 0, made.stderr
        assert Path(made.stdout.strip()).stat().st_uid == SOMEBODY
        running.stop()


def test_what_root_makes_belongs_to_the_owner_also_where_only_root_finds_the_way(data: Path, place: Path) -> None:
    """As in /var/lib/private, where systemd keeps the data of users that exist only while a service runs."""
    (place / "private" / "more").mkdir(parents=True)
    (place / "private").chmod(0o700)
    data.rename(place / "private" / "more" / "data")
    data.symlink_to(place / "private" / "more" / "data")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = "import os, sys; from asyncdist_server.cli import main; os.umask(0o077); main(sys.argv[1:])"
        return forked.run([sys.executable, "-c", program, *arguments], DEADLINE_S)

    offline = command("backup", "--data-dir", str(data))
    if "unshare: Operation not permitted" in offline.stderr:
        pytest.skip("only root with CAP_SYS_ADMIN can open a way")
    verified = command("verify", offline.stdout.strip())
    restored = command("restore", offline.stdout.strip(), "--data-dir", str(data))
    assert [done.returncode for done in (offline, verified, restored)] == [0, 0, 0], (offline, verified, restored)
    names = {path.relative_to(data).parts[0].partition("-2")[0] for path in data.rglob("*")}
    assert {"journal.sqlite", "identity", "lock", "backups", "replaced"} <= names
    assert {path.lstat().st_uid for path in data.rglob("*")} == {SOMEBODY}
    assert [path.name for path in (place / "private").iterdir()] == ["more"]


def test_root_serves_no_directory_of_another_user(data: Path, place: Path) -> None:
    """The daemon goes on to write there for as long as it runs."""
    roots = place / "roots"
    roots.write_text(ROOTS)
    (data / "lock").unlink()
    os.link(roots, data / "lock")
    refused = command("--port", "0", "--durability", "durable", "--data-dir", str(data))
    assert refused.returncode == 1
    assert f"the data directory {data} belongs to user {SOMEBODY}, not to user 0" in refused.stderr
    for name in ("verify", "backup"):
        assert command(name, "--data-dir", str(data)).returncode == 1
    assert roots.read_text() == ROOTS
    assert roots.stat().st_uid == 0


def test_a_directory_that_cannot_be_reached_as_its_owner_is_told(data: Path) -> None:
    """Root without the rights of root, as in some containers."""
    program = (
        "import os, sys; from asyncdist_server.ops import privileges; from asyncdist_server.cli import main\n"
        "def refuse(uid): raise PermissionError(1, 'Operation not permitted')\n"
        "os.setuid = refuse\n"
        "main(sys.argv[1:])"
    )
    refused = forked.run([sys.executable, "-c", program, "verify", "--data-dir", str(data)], DEADLINE_S)
    assert refused.returncode == 1
    assert f"root cannot work in {data} as user {SOMEBODY}, to whom it belongs" in refused.stderr
    assert "run the command as that user" in refused.stderr
