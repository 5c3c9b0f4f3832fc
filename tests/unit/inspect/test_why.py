"""Verdicts on documents made by hand: what each sentence says, and what it does not dare to say."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.cli import main as command
from asyncdist.inspect.dumps import FORMAT, VERSION
from asyncdist.inspect.job import AFTERMATH_S, MAX_DUMP_BYTES, Job, checked
from asyncdist.inspect.network import Network
from asyncdist.inspect.perfetto import trace
from asyncdist.inspect.why import AFTER_S, ROUNDS, Verdict, Why
from asyncdist.page.look import look_back, look_now

NOW_S = 1_000.0
GROUPS = {"default": "0" * 16, "a": "a" * 16, "b": "b" * 16}


def why(job: Job, after_s: float = AFTER_S) -> Verdict:
    return Why(job, after_s).verdict()


def collective(sequence: int = 0, group: str = "default", **more: Any) -> dict[str, Any]:
    found = {"kind": "collective", "operation": "all_reduce", "collective": "all_reduce", "group": group}
    found |= {"group_id": GROUPS[group], "tag": 0, "sequence": sequence, "issued": NOW_S - 10}
    return found | {"site": f"/home/train.py:{sequence + 1}", "waiters": ["main"]} | more


def message(operation: str, peer: int, tag: int = 0, **more: Any) -> dict[str, Any]:
    found = {"kind": "message", "operation": operation, "group": "default", "group_id": GROUPS["default"], "tag": tag}
    return found | {"peer": peer, "bytes": 8, "issued": NOW_S - 10, "site": "/home/m.py:7", "waiters": ["main"]} | more


def store(key: str, **more: Any) -> dict[str, Any]:
    found = {"kind": "store", "operation": "get", "keys": [key], "issued": NOW_S - 10, "site": "/home/s.py:3"}
    return found | {"waiters": ["main"]} | more


def rank(number: int, *entries: dict[str, Any], size: int = 2, **more: Any) -> dict[str, Any]:
    """A rank whose one task waits for all that has not ended; if nothing does, it sleeps. Of three, two are in `b`."""
    waits = "operation" if any("ended" not in entry for entry in entries) else "timer"
    place = {"site": f"/home/train.py:{100 + number}", "function": "main", "call": "asyncio.sleep", "waits": waits}
    groups = [
        {"id": group_id, "name": name, "ranks": list(range(int(name == "b" and size == 3), size))}
        for name, group_id in GROUPS.items()
    ]
    found = {"format": FORMAT, "version": VERSION, "rank": number, "world_size": size, "time": NOW_S, "host": "h"}
    found |= {"groups": groups, "entries": list(entries), "places": {"MainThread": {**place, "idle": True}}}
    return dict(checked({**found, "awaits": {"main": place}, **more}))


def tasks(**waits: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {"site": f"/home/t.py:{number}", **each} for number, (name, each) in enumerate(waits.items())}


def told(*documents: dict[str, Any]) -> str:
    return why(Job(documents)).sentence


def test_ranks_that_need_each_other_are_a_deadlock_and_one_task_that_may_go_on_makes_it_unproven() -> None:
    first = rank(0, collective(group="a"))
    for more, proven in ({}, True), ({"awaits": tasks(main={"waits": "operation"}, beats={"waits": "timer"})}, False):
        verdict = why(Job([first, rank(1, collective(group="b"), **more)]))  # type: ignore[arg-type]
        assert (verdict.kind, verdict.ranks, verdict.proven) == ("deadlock", (0, 1), proven)
        assert "rank 0 waits in all_reduce #0 of group a at train.py:1 for rank 1" in verdict.sentence
        assert (
            "unless a task of rank 1 ends that, which sleeps in asyncio.sleep at t.py:1" in verdict.sentence
        ) != proven


def test_a_task_that_waits_for_another_is_stuck_with_it_and_free_with_any_of_several() -> None:
    stuck = tasks(main={"waits": "tasks", "tasks": ["part"]}, part={"waits": "operation"})
    entry = collective(group="b", waiters=["part"])
    assert why(Job([rank(0, collective(group="a")), rank(1, entry, awaits=stuck)])).proven
    free = stuck | tasks(timer={"waits": "timer"})
    free["main"] = {"waits": "tasks", "tasks": ["part", "timer"], "any": True}
    assert not why(Job([rank(0, collective(group="a")), rank(1, entry, awaits=free)])).proven


def test_tasks_that_wait_for_a_lock_of_asyncio_go_on_only_if_another_task_can() -> None:
    entry = collective(group="b", waiters=["part"])
    parts = tasks(part={"waits": "operation"}, holds={"waits": "local"})
    assert why(Job([rank(0, collective(group="a")), rank(1, entry, awaits=parts)])).proven
    parts |= tasks(timer={"waits": "timer"})
    assert not why(Job([rank(0, collective(group="a")), rank(1, entry, awaits=parts)])).proven


def test_the_last_of_a_chain_is_named() -> None:
    chain = [rank(0, collective(group="a", issued=NOW_S - 30), size=3), rank(1, collective(group="b"), size=3)]
    sentence = told(*chain, rank(2, collective(group="a", ended=NOW_S - 20), size=3))
    assert sentence == (
        "Rank 2 has not called all_reduce #0 of group b, in which rank 1 waits at train.py:1: "
        "it sleeps in asyncio.sleep at train.py:102 (main)."
    )


@pytest.mark.parametrize("state", ["stopped", "gone", "silent", "left", "undumped"])
def test_ranks_that_say_nothing_are_named_with_their_state(state: str) -> None:
    documents = [rank(0, collective(waiting_for=[1]))]
    sentence = told(*documents) if state == "undumped" else told(*documents, {"rank": 1, "state": state})
    what = {
        "stopped": "is stopped, by",
        "gone": "has ended",
        "silent": "does not answer",
        "left": "has closed its group",
    }
    verb = "may not have" if state in ("silent", "undumped") else "has not"
    assert sentence.startswith(f"Rank 1 {verb} called all_reduce #0 of group default, in which rank 0 waits")
    assert what.get(state, "it has left no dump") in sentence


def test_a_rank_that_has_called_but_does_not_turn_its_loop_is_named() -> None:
    place = {"site": "/home/load.py:9", "function": "load", "call": "time.sleep"}
    asleep = rank(1, collective(waiters=[]), places={"MainThread": place}, awaits=tasks(main={}))
    sentence = told(rank(0, collective(waiting_for=[1])), asleep)
    assert sentence.startswith(
        "Rank 1 has called, but cannot end, all_reduce #0 of group default, in which ranks 0 and 1"
    )
    assert sentence.endswith("it sleeps in time.sleep at load.py:9 (load).")


def test_what_all_have_called_and_does_not_end_points_to_the_network() -> None:
    verdict = why(Job([rank(0, collective(waiting_for=[1])), rank(1, collective(waiting_for=[0]))]))
    assert verdict.kind == "unheard"
    assert verdict.sentence.startswith(
        "Ranks 0 and 1 wait in all_reduce #0 of group default at train.py:1, and rank 0 has "
    )


def test_messages() -> None:
    receives = rank(0, message("recv", 1))
    assert told(receives, rank(1)).startswith(
        "Rank 1 has not sent what rank 0 waits for, in recv from rank 1 at m.py:7"
    )
    assert why(Job([receives, rank(1, message("send", 0))])).kind == "unheard"
    wrong = why(Job([receives, rank(1, message("isend", 0, tag=3, ended=NOW_S - 9), message("recv", 0, tag=8))]))
    assert (wrong.kind, wrong.ranks) == ("tag", (0, 1))
    assert "with tag 0 at m.py:7, but rank 1 has sent with tag 3" in wrong.sentence
    matched = rank(0, message("recv", 1, tag=3, ended=NOW_S - 9), message("recv", 1))
    assert why(Job([matched, rank(1, message("isend", 0, tag=3, ended=NOW_S - 9))])).kind == "late"
    anybody = [rank(0, message("recv", -1)), rank(1, collective())]
    assert why(Job(anybody)).proven  # the only other rank waits for this one
    assert "rank 0 waits in recv from any rank at m.py:7, which rank 1 has not sent" in told(*anybody)


def test_keys_of_the_store(tmp_path: Path) -> None:
    sentence = told(rank(0, store("k")), rank(1))
    assert sentence == "Rank 0 waits for the key 'k' of the store (get at s.py:3), which nobody has set."
    source = tmp_path / "sets.py"
    source.write_text("async def main(store):\n    await work()\n    await store.set('k', b'')\n")
    place = {"site": f"{source}:2", "function": "main", "call": "work", "waits": "timer"}
    sentence = told(rank(0, store("k")), rank(1, awaits={"main": place}))
    assert sentence.startswith(
        "Rank 0 waits in get of 'k' of the store at s.py:3, which rank 1 would set at sets.py:3: "
    )


def test_ranks_that_differ_are_told_even_where_one_has_ended() -> None:
    entry = collective(error="CollectiveMismatchError: ranks differ", ended=NOW_S - 9, dtype="float32")
    other = collective(ended=NOW_S - 9, dtype="float64", site="/home/train.py:9")
    verdict = why(Job([rank(0, entry), rank(1, other)]))
    assert verdict.kind == "mismatch"
    assert "called all_reduce (float64) at train.py:9" in verdict.sentence


def test_losses_that_nobody_waits_for_are_none() -> None:
    lost = {"kind": "event", "operation": "rank lost", "group": "default", "group_id": GROUPS["default"], "peer": 1}
    lost |= {"issued": NOW_S - 50, "error": "rank 0 lost rank 1: it was killed"}
    later = rank(0, lost, collective(0, "a"), size=3)
    assert why(Job([later, rank(2, size=3)], 3)).kind == "late"
    verdict = why(Job([rank(0, lost, collective(), size=3), rank(2, size=3)], 3))
    assert verdict.sentence.startswith("Rank 1 is lost: it was killed. It had not called all_reduce #0")
    first_ended = rank(1, size=3, reason="SIGTERM")  # with the job, and rank 0 saw that before its own end
    assert why(Job([rank(0, lost, collective(), size=3), first_ended, rank(2, size=3)])).kind == "late"


def test_what_is_young_is_no_hang_and_missing_ranks_make_a_verdict_uncertain() -> None:
    young = rank(0, collective(issued=NOW_S - 0.1))
    assert why(Job([young, rank(1)])).kind == "healthy"
    assert why(Job([young])).kind == "unknown"
    assert why(Job([young, rank(1)]), after_s=0.05).kind == "late"


def test_a_rank_that_comes_last_is_found() -> None:
    def rounds(late_s: float) -> list[dict[str, Any]]:
        return [collective(n, issued=NOW_S + n + late_s, ended=NOW_S + n + 0.6) for n in range(ROUNDS)]

    verdict = why(Job([rank(0, *rounds(0.1)), rank(1, *rounds(0.5))]))
    assert verdict.kind == "slow"
    assert verdict.sentence.startswith(
        "Rank 1 came last to 10 of 10 all_reduce of group default, and the others waited "
    )
    assert "before that at train.py:10; just now it sleeps in asyncio.sleep at train.py:101" in verdict.sentence


def test_a_thousand_ranks_are_told_in_one_sentence() -> None:
    size = 1000
    documents = [rank(number, collective(), size=size) for number in range(size) if number != 7]
    found = Why(Job([*documents, rank(7, size=size)]))
    assert found.verdict().sentence.startswith(
        "Rank 7 has not called all_reduce #0 of group default, in which ranks 0, 1"
    )
    assert len(found.rows()) == size


def written(folder: Path, name: str, **more: Any) -> None:
    (folder / name).write_text(json.dumps({**rank(0), **more}))


def test_of_a_failure_the_first_dump_counts_and_of_failures_the_last(tmp_path: Path) -> None:
    for name, reason, time_s in (
        ("rank_0.json", "handled", NOW_S),
        ("rank_0.1.json", "failure", NOW_S + 2 * AFTERMATH_S),
        ("rank_0.2.json", "aftermath", NOW_S + 2 * AFTERMATH_S + 1),
    ):
        written(tmp_path, name, reason=reason, time=time_s, pid=3)
    assert Job.read(tmp_path).documents[0]["reason"] == "failure"
    written(tmp_path, "rank_0.json", reason="another run", time=NOW_S + 3 * AFTERMATH_S, pid=4)
    assert Job.read(tmp_path).documents[0]["reason"] == "another run"


def test_files_that_are_no_dumps_are_skipped_and_said(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(command, ["why", str(tmp_path)]).exit_code == 2
    (tmp_path / "rank_1.json").write_text(json.dumps(rank(1))[:-30])
    (tmp_path / "rank_2.json").write_text("[" * 100_000)
    (tmp_path / "rank_3.json").write_text(json.dumps({**rank(0), "version": VERSION + 1}))
    with (tmp_path / "rank_4.json").open("wb") as file:
        file.truncate(MAX_DUMP_BYTES + 1)
    (tmp_path / "other.json").write_text("no")
    found = run(command, ["doctor", str(tmp_path)])
    assert found.exit_code == 2
    assert "has no dump that can be read" in found.output
    written(tmp_path, "rank_0.json", entries=[collective(site="/home/\x1b[2Jtrain.py:1")])
    found = run(command, ["doctor", str(tmp_path)])
    assert found.exit_code == 1
    assert "\x1b[2J" not in found.output
    for name in ("rank_1.json: ", "rank_2.json: ", "rank_3.json: a dump of version", "rank_4.json: more than"):
        assert f"not read: {name}" in found.output


def test_nothing_that_ranks_say_controls_the_terminal(tmp_path: Path) -> None:
    for one in range(2):
        entry = collective(issued=NOW_S - 10 + one, ended=NOW_S) | {"group": "\x1b]0;title\x07"}
        written(tmp_path, f"rank_{one}.json", **rank(one, entry))
    found = CliRunner().invoke(command, ["trace", str(tmp_path), "-o", str(tmp_path / "out")])
    assert (found.exit_code, "came last" in found.output, "\x1b" in found.output) == (0, True, False), found.output


def test_exit_codes_and_json(tmp_path: Path) -> None:
    run = CliRunner().invoke
    written(tmp_path, "rank_0.json", world_size=1)
    found = run(command, ["doctor", "--json", str(tmp_path)])
    (report,) = json.loads(found.output)
    assert (found.exit_code, report["verdict"]["kind"], report["ranks"][0]["state"]) == (0, "healthy", "runs")
    written(tmp_path, "rank_0.json")
    assert run(command, ["why", str(tmp_path)]).exit_code == 2
    assert run(command, ["doctor", str(tmp_path)]).output.startswith(
        "Nothing is wrong as far as rank 0 can tell, but rank 1"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.just(2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
DIALS = [{"to": "tcp 10.0.0.1:1", "rtt_s": 1e-4}, {"to": "tcp 10.0.0.1:2", "error": "ETIMEDOUT"}]
LINK = {"why": "", "state": "open", "over": "tcp 10.0.0.1:1", "sent": 1, "received": 1, "last_error": ""}
LOOK = {"host_id": "h", "transport": "auto", "ports": "", "listens": [{"ip": "10.0.0.1", "port": 1}]}
LOOK |= {"interfaces": [{"name": "eth0", "ip": "10.0.0.2"}], "bytes_per_s": 1.0, "error": ""}
WHOLE = [
    rank(0, collective(waiting_for=[1]), message("recv", 1), store("k"), collective(0, "a", ended=NOW_S, error="e")),
    rank(1, message("isend", 0, tag=2), collective(1), awaits=tasks(main={"waits": "tasks", "tasks": ["b"]}, b={})),
]
for number, each in enumerate(WHOLE):
    each["network"] = LOOK | {"peers": [LINK | {"rank": 1 - number, "dials": DIALS}]}


def test_a_verdict_about_an_operation_follows_that_one() -> None:
    older, expired = store("k", issued=NOW_S - 100), collective(1, "a", issued=NOW_S - 0.1)
    job = Job([rank(0, older, expired), rank(1)])
    about = {"group_id": GROUPS["a"], "tag": 0, "sequence": 1}
    assert "key 'k'" in Why(job).verdict().sentence
    assert Why(job, 0.0, about).hang().startswith("Rank 1 has not called all_reduce #1 of group a")
    assert not Why(job, 0.0, about | {"sequence": 2}).hang()


@pytest.mark.parametrize(
    ("state", "said"), [("stopped", True), ("gone", True), ("silent", False), ("refused", False), ("undumped", False)]
)
def test_no_rank_is_accused_that_nothing_is_known_of(state: str, said: bool) -> None:
    job = Job([rank(0, collective(waiting_for=[1])), {"rank": 1, "state": state}])
    assert bool(Why(job).hang()) == said


@pytest.mark.parametrize("name", ["host", "pid", "reason", "loop_late", "loop_cpu"])
def test_what_a_document_says_wrongly_of_its_process_is_left_out(name: str) -> None:
    assert name not in checked(rank(0) | {name: [float("inf")]})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_hostile_documents_are_refused_or_judged(data: st.DataObject) -> None:
    documents = json.loads(json.dumps(WHOLE))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = data.draw(st.sampled_from(documents))
        while True:
            if not isinstance(place, dict | list) or not place:
                break
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
            if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
                place[key] = data.draw(JSON)
                break
            place = place[key]
    found = []
    for document in documents:
        try:
            found.append(checked(document))
        except ValueError:
            continue
    looked = Why(Job(found))
    assert looked.verdict().sentence
    assert json.dumps(looked.rows(), allow_nan=False)
    assert json.dumps(look_now(Job(found)) | look_back(Job(found), NOW_S), allow_nan=False)
    assert b"".join(trace(found)) or not found
    network = Network(Job(found))
    assert json.dumps(network.report(), allow_nan=False)
    assert all(network.cell([one], [other]) is not None for one in range(2) for other in range(2))


ODD = (float("nan"), float("inf"), -float("inf"), 10**400, 1 << 63, "1", None, [], {})


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd!r:.8}")
def test_what_is_no_number_is_no_time_and_no_size(odd: object) -> None:
    with pytest.raises(ValueError, match="no time"):
        rank(0, time=odd)
    for name in ("issued", "ended", "bytes", "tag", "sequence"):
        assert rank(0, collective() | {name: odd})["entries"] == []
    assert rank(0, collective(waiting_for=[1, odd]))["entries"] == []
    assert rank(0, message("send", 1, transport=[odd]))["entries"] == []


def test_messages_of_ranks_that_were_not_heard_and_clocks_that_are_none_have_no_arrow() -> None:
    clock = {"host": "a", "compared": [{"rank": 1, "ahead_s": float("inf"), "bound_s": 0.0}]}
    documents = [rank(0, message("recv", 7, ended=NOW_S), clock=clock), rank(1, collective(), clock={"host": "b"})]
    assert b"recv" in b"".join(trace(documents))


def test_no_program_is_read_that_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    for site in (f"{pipe}:1", "/dev/zero:1"):
        awaits = {"main": {"site": site, "waits": "timer"}}
        assert "which nobody has set" in told(rank(0, store("k")), rank(1, awaits=awaits))


def test_thousands_of_messages_are_judged_at_once() -> None:
    documents = [rank(one, *(message("recv", 1 - one, tag) for tag in range(4000))) for one in range(2)]
    began_s = time.thread_time()
    assert why(Job(documents)).kind == "deadlock"
    assert b"".join(trace(documents))
    assert time.thread_time() - began_s < 5
