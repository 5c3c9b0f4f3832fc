"""FileStore keeps the store's contract, looks after its file, and never holds the event loop for a lock."""

# ruff: noqa: ASYNC222, ASYNC240 -- the small files and processes of a test may block it

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import stat
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from asyncdist.errors import ClosedError, DistStoreError, StoreTimeoutError
from asyncdist.store import FileStore, PrefixStore, Store
from asyncdist.store.file_log import HEADER, RECORD_HEAD, decode_records, encode_record
from asyncdist.testing.store_conformance import STORE_CHECKS, StoreCheck


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_file_store_conforms(check: StoreCheck, path: Path) -> None:
    async def open_store() -> Store:
        return FileStore(path)

    await check(open_store)
    assert not path.exists()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_prefix_store_over_file_conforms(check: StoreCheck, path: Path) -> None:
    opened: list[FileStore] = []

    async def open_store() -> Store:
        opened.append(FileStore(path))
        return PrefixStore("job", opened[-1])

    await check(open_store)
    for store in opened:
        await store.close()
    assert not path.exists()


async def test_file_is_private_and_removed_by_the_last(path: Path) -> None:
    first, second = FileStore(path), FileStore(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await first.set("k", "v")
    await first.close()
    assert await second.get("k") == b"v"
    await second.close()
    assert not path.exists()


async def test_world_size_keeps_the_file_for_late_members(path: Path) -> None:
    async with FileStore(path, 2) as early:
        await early.set("k", "v")
    assert path.exists()
    async with FileStore(path, world_size=2) as late:
        assert await late.get("k") == b"v"
        with pytest.raises(DistStoreError, match="already joined by all 2"):
            FileStore(path, 2)
        with pytest.raises(DistStoreError, match="world size of 2, not 3"):
            FileStore(path, 3)
    assert not path.exists()


JOIN_AND_WAIT = (
    "import sys; from asyncdist.store import FileStore; s = FileStore(sys.argv[1]); print(1, flush=True); input()"
)


async def test_file_of_a_killed_process_is_stale(path: Path) -> None:
    with forked.Popen(
        [sys.executable, "-c", JOIN_AND_WAIT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        async with FileStore(path):
            pass  # it lives, so its file is no stale one
        other.kill()
        other.wait()
        with pytest.raises(DistStoreError, match=rf"did not end cleanly \(process {other.pid} is gone"):
            FileStore(path)
    assert path.exists()


def test_program_that_ends_without_close_leaves(path: Path) -> None:
    program = "import sys; from asyncdist.store import FileStore; s = FileStore(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert not path.exists()


async def test_dropped_store_leaves(path: Path) -> None:
    store = FileStore(path)
    await store.set("k", "v")
    del store
    await asyncio.sleep(0)  # until then the loop's current callback is this task's wake-up by the store's reply
    gc.collect()
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"precious notes of somebody", "not a file store's file"),
        (b"x", "not a file store's file"),
        (b"asyncdist file store v9\n", "another version"),
        (HEADER + RECORD_HEAD.pack(3, 0) + b"abc", "damaged"),
        (HEADER + encode_record((99, b"k")), "does not understand"),
    ],
)
async def test_foreign_file_is_refused_and_left_alone(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(DistStoreError, match=message):
        FileStore(path)
    assert path.read_bytes().startswith(content)


async def test_empty_file_is_a_new_store(path: Path) -> None:
    path.touch()
    async with FileStore(path) as store:
        assert await store.num_keys() == 0


async def test_header_torn_by_a_killed_creator_is_repaired(path: Path) -> None:
    path.write_bytes(HEADER[:7])
    async with FileStore(path) as store:
        await store.set("k", "v")
        assert path.read_bytes().startswith(HEADER)


@pytest.mark.parametrize("where", ["no/such/directory/file", "file/below-a-file", ".", "link", "pipe"])
async def test_unusable_path_is_refused_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DistStoreError, match=r"cannot be opened|symbolic link|not a regular file"):
        FileStore(tmp_path / where)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_unwritable_directory_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DistStoreError, match="Permission denied"):
        FileStore(tmp_path / "store")


@pytest.mark.parametrize("cut", [1, 5, 9, 12])
async def test_torn_last_record_is_ignored_and_overwritten(path: Path, cut: int) -> None:
    async with FileStore(path) as a, FileStore(path) as b:
        await a.set("k", "v")
        record = encode_record((1, b"torn", b"value"))
        with path.open("ab") as file:
            file.write(record[:cut])
        assert await b.get("k") == b"v"
        assert await b.check(["torn"]) is False
        await b.set("after", "w")
        assert await a.get("after") == b"w"
        _, used, intact = decode_records(path.read_bytes()[len(HEADER) :])
        assert intact
        assert len(HEADER) + used == path.stat().st_size


async def test_lock_held_elsewhere_never_holds_the_loop(path: Path) -> None:
    async with FileStore(path) as store:
        await store.set("k", "v")
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            writing = store.set("k", "w")
            store.set_timeout(0.05)
            with pytest.raises(StoreTimeoutError, match="locked by another process"):
                await store.set("never", "x")
            assert not writing.done()
            fcntl.flock(other, fcntl.LOCK_UN)
            await writing
        assert await store.get("k") == b"w"
        assert await store.check(["never"]) is False


async def test_opening_waits_for_the_lock_without_holding_the_loop(path: Path) -> None:
    async with FileStore(path) as first:
        await first.set("k", "v")
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            second = FileStore(path)
            waiting = asyncio.ensure_future(second.get("k"))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting == b"v"
        await second.close()


async def test_file_deleted_in_use_is_said(path: Path) -> None:
    store = FileStore(path)
    await store.set("k", "v")
    path.unlink()
    with pytest.raises(DistStoreError, match="deleted while it was in use"):
        await store.set("k", "w")
    with pytest.raises(ClosedError):
        store.get("k")
    await store.close()


async def test_file_of_a_later_run_is_not_removed(path: Path) -> None:
    store = FileStore(path)
    path.unlink()
    path.write_bytes(b"another's")
    await store.close()
    assert path.read_bytes() == b"another's"


ADD_AND_PUSH = """
import asyncio, sys
from asyncdist.store import FileStore

async def main():
    async with FileStore(sys.argv[1]) as store:
        for index in range(50):
            await store.add("n", 1)
            await store.queue_push("q", f"{sys.argv[2]}-{index}")
        await store.add("done", 1)
        await store.get("leave")

asyncio.run(main())
"""


async def test_processes_share_counters_and_queues(path: Path) -> None:
    async with FileStore(path) as store:
        others = [
            forked.Popen([sys.executable, "-c", ADD_AND_PUSH, str(path), str(index)], text=True) for index in range(3)
        ]
        items = [await store.queue_pop("q", timeout=60) for _ in range(150)]
        assert len(set(items)) == 150
        assert await store.add("n", 0) == 150
        assert path.exists()
        await store.set("leave", "")
        assert [await asyncio.to_thread(other.wait, 60) for other in others] == [0, 0, 0]
    assert not path.exists()


async def test_who_waits_for_an_item_costs_others_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of thousands did nothing but look at each other."""
    asked: list[bytes] = []
    has_items = FileStore._has_items

    def counted(store: FileStore, key: bytes) -> bool:
        asked.append(key)
        return has_items(store, key)

    monkeypatch.setattr(FileStore, "_has_items", counted)
    async with FileStore(path) as store:
        pops = [asyncio.ensure_future(store.queue_pop("q")) for _ in range(100)]
        await store.set("k", "")  # behind them
        asked.clear()
        assert await store.get("k") == b""
        assert 1 <= len(asked) < 20, "a few looks at the file, each with one question for the queue"
        for pop in reversed(pops[1:99]):
            pop.cancel()
        await asyncio.gather(*pops[1:99], return_exceptions=True)
        for item in ("first", "last", "left"):
            await store.queue_push("q", item)
        assert await pops[0] == b"first"
        assert await pops[99] == b"last"
        assert await store.queue_len("q") == 1


async def test_forked_child_cannot_use_or_leave_it(path: Path) -> None:
    async with FileStore(path) as store:
        await store.set("k", "v")
        child = os.fork()
        if child == 0:
            try:
                store.get("k")
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert await store.get("k") == b"v"
        async with FileStore(path) as other:
            assert await other.get("k") == b"v"
    assert not path.exists()
