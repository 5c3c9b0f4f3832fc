"""The timeline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from group_kit import Group
from timeline_kit import Timeline

import asyncdist as dist
from asyncdist.cli import main as cli
from asyncdist.inspect import dumps
from asyncdist.inspect.perfetto import trace
from asyncdist.inspect.recorder import RECORDER
from asyncdist.inspect.timeline import clocks, messages
from asyncdist.testing import run_world


def test_every_operation_is_there_and_each_send_comes_before_its_receive() -> None:
    RECORDER.entries.clear()

    async def main(group: Group) -> dict[str, Any]:
        x, rank, store = np.ones(100), group.rank, dist.HashStore()
        await asyncio.gather(group.all_reduce(x), group.barrier(tag=4))
        works = [group.isend(x, (rank + 1) % 3, tag=7) for _ in range(3)]
        works += [group.irecv(np.empty(100), tag=7) for _ in range(3)]
        for work in works:
            await work
        await asyncio.sleep(1)
        waits = asyncio.ensure_future(store.get("absent"))
        await group.broadcast(x, 1)
        stuck = group.irecv(x, 0, tag=9)
        await asyncio.sleep(1)
        found = dumps.document(rank, "asked")
        stuck.cancel()
        waits.cancel()
        await asyncio.sleep(0)
        return found

    documents = run_world(3, main)
    shown = Timeline(b"".join(trace(documents)))
    for document in documents:
        own = [one for one in shown.slices if one["rank"] == document["rank"]]
        entries = [entry for entry in document["entries"] if entry["kind"] != "event"]
        assert len(own) == len(entries)
        for entry in entries:
            (one,) = [
                one
                for one in own
                if one["at"] == round(entry["issued"] * 1e9)
                and one["name"] == entry["operation"]
                and one.get("tag", 0) == entry.get("tag", 0)
            ][:1]
            assert one.get("end") == (round(entry["ended"] * 1e9) if "ended" in entry else None)
            assert one.get("bytes") == entry.get("bytes")
            assert one.get("task", "") == entry.get("task", "")
    assert {one["track"] for one in shown.slices} == {
        *["default", "default tag 4", "default messages tag 7", "default messages tag 9", "store"]
    }
    assert shown.counters[0][-1] == 800  # the receive that got nothing
    arrows = [sorted(ends) for ends in shown.flows.values() if len(ends) == 2]
    assert len(arrows) == 9
    assert all(got == (sent + 1) % 3 for (_, sent), (_, got) in arrows)  # the sender comes first
    assert len([ends for ends in shown.flows.values() if len(ends) == 3]) == 3  # all_reduce, barrier, broadcast
    assert {one["name"] for one in shown.instants} == {"group of 3 made", *(f"from rank {rank}" for rank in range(3))}


def message(operation: str, peer: int, issued: float, ended: float | None, nbytes: int = 8) -> dict[str, Any]:
    entry = {"kind": "message", "group": "default", "group_id": "aa", "tag": 0, "bytes": nbytes}
    entry |= {"operation": operation, "peer": peer, "issued": issued}
    return entry if ended is None else entry | {"ended": ended}


def document(rank: int, entries: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    groups = [{"id": "aa", "name": "default", "ranks": [0, 1]}]
    return {"rank": rank, "host": f"host {rank}", "groups": groups, "entries": entries, **more}


def compared(rank: int, ahead_s: float) -> dict[str, Any]:
    return {"host": "", "compared": [{"rank": rank, "ahead_s": ahead_s, "bound_s": 0.001}]}


def test_times_of_another_host_are_corrected() -> None:
    made = {"kind": "event", "group": "default", "group_id": "aa", "operation": "group of 2 made", "issued": 0.5}
    documents = [
        document(0, [made, message("send", 1, 1.0, 1.1)], clock=compared(1, 100.0)),
        document(1, [made, message("recv", 0, 100.5, 101.3)]),
    ]
    shown = Timeline(b"".join(trace(documents)))
    ((sent, got),) = map(sorted, shown.flows.values())
    assert sent == (1_000_000_000, 0)
    assert got == (1_300_000_000, 1)
    names = sorted(told.name for told in shown.tracks.values() if not told.parent_uuid)
    assert names == ["rank 0 (host 0)", "rank 1 (host 1, clock within 1000 us)"]


@pytest.mark.parametrize(
    ("first_send", "first_recv", "known", "pairs"),
    [
        (0, 0, True, range(10)),
        (3, 0, True, range(3, 10)),
        (0, 4, True, range(4, 10)),
        (2, 5, False, ()),  # no receive has ever waited: the sender may be any number ahead
    ],
)
def test_messages_are_paired_though_the_rings_reach_back_differently(
    first_send: int, first_recv: int, known: bool, pairs: range
) -> None:
    """Each message is sent at its number, and received half a second later; two more are still to be received."""
    posted = -0.2 if known else 0.3
    sends = [message("isend", 1, float(number), number + 0.1) for number in range(first_send, 12)]
    receives = [message("irecv", 0, number + posted, number + 0.5) for number in range(first_recv, 10)]
    documents = [document(0, sends, host="one"), document(1, receives, host="one")]
    found = [(sent["issued"], got["ended"]) for sent, got in messages(documents, clocks(documents))]
    assert found == [(float(number), number + 0.5) for number in pairs]


def test_sizes_tell_messages_apart_and_clocks_that_nobody_compared_tell_nothing() -> None:
    sends = [message("send", 1, float(number), number + 0.1, number) for number in range(3)]
    receives = [message("recv", 0, number - 0.2, number + 0.5, number) for number in range(1, 3)]
    receives[0]["ended"] = 2.2
    documents = [document(0, sends, host="one"), document(1, receives, host="one")]
    found = [(sent["bytes"], got["bytes"]) for sent, got in messages(documents, clocks(documents))]
    assert found == [(1, 1), (2, 2)]
    documents[1]["host"] = "two"
    assert not list(messages(documents, clocks(documents)))


def test_the_command_reads_a_folder_of_dumps(tmp_path: Path) -> None:
    for rank in range(2):
        found = dumps.document(rank, "asked") | document(rank, [message("send", 1 - rank, 1.0, 2.0)])
        dumps.write(tmp_path / f"rank_{rank}.json", found)
    (tmp_path / "rank_2.json").write_text("{}")
    out = tmp_path / "out.pftrace"
    result = CliRunner().invoke(cli, ["trace", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 ranks" in result.stdout
    assert "left out rank_2.json" in result.stderr
    assert [one["name"] for one in Timeline(out.read_bytes()).slices] == ["send", "send"]
    result = CliRunner().invoke(cli, ["trace", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(cli, ["trace", str(tmp_path / "empty")])
    assert result.exit_code == 1
    assert "no dump" in result.output


@pytest.mark.parametrize(("issued", "ended"), [(float("nan"), 1.0), (float("inf"), None), (1e300, 1e300), (-1.0, 1.0)])
def test_what_is_no_time_is_left_out(issued: float, ended: float | None) -> None:
    documents = [document(0, [message("send", 1, issued, ended), message("send", 1, 1.0, 2.0)])]
    (one,) = Timeline(b"".join(trace(documents))).slices
    assert one["end"] == 2_000_000_000
