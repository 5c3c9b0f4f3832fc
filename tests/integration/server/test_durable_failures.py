"""A durable daemon whose disk or directory fails: it acknowledges nothing more, ends with an error, and says why."""

from __future__ import annotations

import asyncio
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from journal_kit import Daemon, daemon

from asyncdist.errors import DistError
from asyncdist.store import TCPStore

FILE_BYTES = 200_000


async def ended(running: Daemon) -> str:
    """What a daemon said that ends by itself. A slow disk delays that and every answer before it: no time-out tells."""
    return await asyncio.get_running_loop().run_in_executor(None, running.communicate)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are set on Linux only")
async def test_a_full_disk_ends_the_daemon_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """The file size limit of the process stands in for the disk: SQLite gets the same error from the same call."""
    acknowledged = []
    with daemon(tmp_path / "data") as running:
        running.start()
        assert running.process is not None
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        store = TCPStore("127.0.0.1", running.port, namespace="job")

        async def fill() -> None:
            for number in range(1000):
                await store.set(f"key/{number}", b"x" * 2000)
                acknowledged.append(number)

        filling = asyncio.create_task(fill())
        said = await ended(running)
        await store.close()
        with pytest.raises(DistError):
            await filling
        assert running.process.returncode == 1
        assert f"cannot write to {tmp_path}/data/journal.sqlite" in said
        assert "then start the daemon again" in said
        assert len(acknowledged) > 10
        running.start()
        async with TCPStore("127.0.0.1", running.port, namespace="job") as again:
            assert await again.check([f"key/{number}" for number in acknowledged])
        running.stop()


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path / "data") as running:
        running.start()
        assert running.process is not None
        second = subprocess.run(running.command(), capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert f"is in use by process {running.process.pid}" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path / "data") as running:
        running.start()
        running.stop()
        path = tmp_path / "data" / "journal.sqlite"
        path.write_bytes(b"\0" * path.stat().st_size)
        found = forked.run(running.command(), 60)
        assert found.returncode == 1
        assert f"{path}" in found.stderr
        assert "restore a backup" in found.stderr
        assert "Traceback" not in found.stderr


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with daemon(tmp_path / "file" / "data") as running:
        found = forked.run(running.command(), 60)
        assert found.returncode == 1
        assert "cannot use the data directory" in found.stderr


def test_looking_at_a_directory_without_a_journal_makes_none(tmp_path: Path) -> None:
    for command in ("verify", "backup"):
        found = forked.run([sys.executable, "-m", "asyncdist_server", command, "--data-dir", str(tmp_path)], 60)
        assert found.returncode == 1
        assert f"there is no journal in {tmp_path}" in found.stderr
        assert not list(tmp_path.iterdir())


async def test_a_data_directory_that_is_removed_ends_the_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path / "data") as running:
        running.start()
        assert running.process is not None
        store = TCPStore("127.0.0.1", running.port, namespace="job")
        await store.set("key", "value")
        shutil.rmtree(tmp_path / "data")
        losing = asyncio.ensure_future(store.set("key", "lost"))
        said = await ended(running)
        await store.close()
        with pytest.raises(DistError):
            await losing
        assert running.process.returncode == 1
        assert "was removed or replaced while the daemon used it" in said
