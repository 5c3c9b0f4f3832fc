"""The recorder: what it keeps of operations, what it keeps alive, and what a dump says."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.inspect import dumps
from asyncdist.inspect.recorder import ENTRIES, RECORDER
from asyncdist.testing import SimulatedWorld, run_world


@pytest.fixture(autouse=True)
def _empty_ring() -> None:
    RECORDER.entries.clear()


def of_kind(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in document["entries"] if entry["kind"] == kind]


def test_a_dump_says_what_was_done_where_and_by_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(group: Group) -> None:
        x = np.ones(3, np.float32)
        for work in dist.all_reduce(x), group.broadcast(x, 1, tag=5):
            await work
            assert work.duration is not None
            assert work.duration >= 0
        if group.rank == 0:
            await dist.send(x, 1, tag=7)
        else:
            await group.recv(np.empty(3, np.float32), tag=7)
        dist.dump(tmp_path / f"{group.rank}.json", reason="asked")

    monkeypatch.setattr(RECORDER, "sites", True)
    run_world(2, main)
    document = json.loads((tmp_path / "1.json").read_text())
    assert (document["format"], document["version"], document["rank"]) == (dumps.FORMAT, dumps.VERSION, 1)
    assert document["reason"] == "asked"
    reduced, copied = of_kind(document, "collective")
    assert reduced.items() >= {"operation": "all_reduce", "sequence": 0, "bytes": 12, "dtype": "float32"}.items()
    assert reduced["op"] == "ReduceOp.SUM"
    assert reduced["function"].endswith("main")
    assert copied.items() >= {"operation": "broadcast", "tag": 5, "root": 1, "group": "default"}.items()
    (received,) = of_kind(document, "message")
    assert received.items() >= {"operation": "recv", "tag": 7, "peer": 0, "bytes": 12, "shape": [3]}.items()
    for entry in reduced, copied, received:
        assert Path(entry["site"].rpartition(":")[0]) == Path(__file__)
        assert entry["issued"] <= entry["ended"]
        assert entry["task"]
    lines = [int(entry["site"].rpartition(":")[2]) for entry in (reduced, copied)]
    assert lines[0] == lines[1] == main.__code__.co_firstlineno + 2
    assert of_kind(document, "event")[0]["operation"] == "group of 2 made"


def test_what_is_under_way_says_whom_it_waits_for() -> None:
    async def main(group: Group) -> dict[str, Any]:
        works = []
        if group.rank:
            works = [group.all_reduce(np.ones(3)), group.irecv(np.empty(2), 0)]
        await asyncio.sleep(1)
        found = dumps.document(group.rank, "asked")
        if not group.rank:
            works = [group.all_reduce(np.ones(3)), group.isend(np.empty(2), 1), group.isend(np.empty(2), 2)]
        for work in works:
            await work
        return found

    found = run_world(3, main)
    (entry,) = of_kind(found[1], "collective")
    assert "ended" not in entry
    assert 0 in entry["waiting_for"]
    (entry,) = of_kind(found[2], "message")
    assert (entry["peer"], entry.get("ended")) == (0, None)


def test_a_dump_says_where_threads_and_tasks_are() -> None:
    async def waits(group: Group) -> None:
        await group.recv(np.empty(1), 1)

    async def main(group: Group) -> dict[str, Any]:
        task = asyncio.create_task(waits(group), name=f"waits on rank {group.rank}")
        await asyncio.sleep(1)
        found = dumps.document(group.rank, "asked")
        task.cancel()
        return found

    found = run_world(2, main)[0]
    (innermost,) = [lines[0] for name, lines in found["tasks"].items() if name.startswith("waits on rank 0 ")]
    assert innermost == f"{__file__}:{waits.__code__.co_firstlineno + 1} {waits.__qualname__}"
    (here,) = [lines for name, lines in found["threads"].items() if name.startswith("MainThread")]
    assert any(line.endswith(main.__qualname__) for line in here)


def test_the_ring_is_bounded_and_keeps_neither_arrays_nor_errors_nor_groups() -> None:
    async def main(group: Group) -> tuple[weakref.ref[Any], ...]:
        x = np.ones(3)
        kept = weakref.ref(x), weakref.ref(group)
        await group.all_reduce(x)
        await group.send(x, 0)
        await group.recv(x, 0)
        try:
            await group.recv(x, 0, timeout=0.1)
        except dist.CollectiveTimeoutError as error:
            kept += (weakref.ref(error),)
        for _ in range(ENTRIES + 10):
            await group.barrier()
        RECORDER.entries.rotate(10)
        return kept

    kept = run_world(1, main)[0]
    gc.collect()
    assert [one() for one in kept] == [None, None, None]
    assert len(RECORDER.entries) == ENTRIES


def test_a_failed_operation_says_why() -> None:
    async def main(group: Group, world: SimulatedWorld) -> dict[str, Any] | None:
        await group.barrier()
        if group.rank == 1:
            world.kill(1)
            await asyncio.sleep(1)
            return None
        with pytest.raises(dist.PeerLostError):
            await group.all_reduce(np.zeros(1))
        return dumps.document(group.rank, "asked")

    document = run_world(2, main, pass_world=True)[0]
    assert document is not None
    failed = of_kind(document, "collective")[-1]
    assert failed["error"].startswith("PeerLostError: group default, rank 0, all_reduce #1")
    assert {event["operation"] for event in of_kind(document, "event")} == {
        *["group of 2 made", "rank lost", "group aborted"],
    }


def test_waits_for_the_store_are_recorded() -> None:
    async def main(group: Group) -> dict[str, Any]:
        store = dist.HashStore()
        await store.set("there", b"1")
        await store.get("there")
        with pytest.raises(dist.StoreTimeoutError):
            await store.wait(["absent"], timeout=0.5)
        waiting = asyncio.ensure_future(store.get("absent too"))
        await asyncio.sleep(1)
        found = dumps.document(group.rank, "asked")
        waiting.cancel()
        return found

    entries = of_kind(run_world(1, main)[0], "store")[-3:]
    assert [(entry["operation"], entry["keys"], "ended" in entry) for entry in entries] == [
        ("get", ["there"], True),
        ("wait", ["absent"], True),
        ("get", ["absent too"], False),
    ]
    assert "still missing: absent" in entries[1]["error"]


@pytest.mark.parametrize("failure", ["enough", "timed out", "differ"])
def test_a_failed_group_is_dumped_before_it_is_torn_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setenv(dumps.DIRECTORY, str(tmp_path))
    monkeypatch.setenv("ASYNCDIST_JOB_ID", "a/job.0")
    monkeypatch.setattr(dumps, "_written", {})

    async def main(group: Group) -> None:
        if group.rank == 0 and failure != "differ":
            await asyncio.sleep(3)
            return
        other = group.irecv(np.ones(3), 1)
        work = group.all_reduce(np.ones(3), timeout=1) if group.rank else group.barrier()
        if failure == "enough":
            group.abort(failure)
        with pytest.raises(dist.DistError):
            await work
        other.cancel()

    run_world(2, main)
    document = json.loads((tmp_path / "a_job.0" / "rank_1.json").read_text())
    assert failure in document["reason"]
    assert "ended" not in of_kind(document, "message")[0]
    entry = of_kind(document, "collective")[-1]
    assert entry["operation"] == "all_reduce"
    assert ("ended" in entry) == (failure == "differ")  # that one has failed already
    assert not list(tmp_path.rglob(".*"))


def test_a_folder_that_cannot_be_written_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(dumps.DIRECTORY, str(tmp_path / "file"))
    monkeypatch.setattr(dumps, "_written", {})

    async def main(group: Group) -> None:
        work = group.irecv(np.ones(1), 0)
        group.abort("enough")
        with pytest.raises(dist.GroupAbortedError, match="enough"):
            await work

    run_world(1, main)
    assert "cannot write what it did" in caplog.text
