"""`asyncdist ps`, `stacks` and `top` on running jobs, with ranks that compute, sleep, are stopped or killed."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jobs import free_port, start_ranks
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from waiting import PATIENCE_S

from asyncdist.cli import main
from asyncdist_server.serving.threaded import serve_in_thread
from asyncdist_server.wire.auth import new_token

JOB = """
async def main():
    async with dist.init_process_group() as group:
        await dist.barrier()
        print("ready", flush=True)
        if group.rank == 1:
            time.sleep(60)
        if group.rank == 2:
            while True:
                pass
        if group.rank == 3:
            await asyncio.sleep(60)
        await dist.all_reduce(np.ones(3))
dist.run(main())
"""
SIZE = 5


@contextlib.contextmanager
def job(name: str, code: str = JOB, size: int = SIZE, **environ: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that have all come."""
    ranks = start_ranks(code, size, {"ASYNCDIST_JOB_ID": name, **environ})
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    return result


def documents(*arguments: object) -> dict[int, dict[str, Any]]:
    (world,) = json.loads(invoke(*arguments, "--json").stdout)
    assert (world["name"], world["size"]) == ("default", SIZE)
    return {int(rank): document for rank, document in world["documents"].items()}


def states(*arguments: object) -> dict[int, str]:
    lines = [line.split() for line in invoke("ps", *arguments).stdout.splitlines()]
    return {int(line[0]): line[1] for line in lines if line[0].isdigit()}


def soon(expected: dict[int, str], *where: object) -> None:
    """A rank of a host that has much to do may answer too late, or not have come so far."""
    until_s = time.monotonic() + PATIENCE_S
    while not (found := states(*where)).items() >= expected.items():
        assert time.monotonic() < until_s, found


@pytest.mark.slow("ranks begin to wait when they have the processor")
@pytest.mark.parametrize("by_store", [True, False], ids=["store", "host"])
def test_each_rank_says_what_it_does_whatever_that_is(by_store: bool) -> None:
    with serve_in_thread() as server, job(f"ps {by_store}", ASYNCDIST_STORE=f"127.0.0.1:{server.port}") as ranks:
        where = ["--namespace", f"ps {by_store}"] + (["--store", f"127.0.0.1:{server.port}"] if by_store else [])
        soon({0: "waits", 1: "busy", 2: "busy", 3: "runs", 4: "waits"}, *where)
        lines = {line.split()[0]: line for line in invoke("ps", *where).stdout.splitlines()}
        assert "all_reduce #1" in lines["4"]
        assert "1, 2, 3" in lines["4"]
        assert "sleeps or is blocked at <string>:" in lines["1"]
        assert "computes at <string>:" in lines["2"]
        found = documents("ps", *where)
        assert [found[rank]["pid"] for rank in range(SIZE)] == [rank.pid for rank in ranks]
        assert found[0]["loop_late"] < 1
        assert found[1]["loop_late"] > 0.05
        ranks[3].send_signal(signal.SIGSTOP)
        soon({3: "stopped"}, *where)
        if by_store:
            ranks[2].kill()
            soon({2: "gone", 3: "stopped"}, *where)


def test_stacks_name_the_lines_of_tasks_and_threads() -> None:
    with job("stacks"):
        time.sleep(0.3)
        said = invoke("stacks", 1, "--namespace", "stacks").stdout
        assert said.startswith("job stacks, group default, rank 1 (")
        assert "thread MainThread" in said
        assert re.search(r"\n    <string>:\d+ main\n", said)
        assert "rank 0" not in said
        found = documents("stacks", "--namespace", "stacks")
        assert any("main" in line for line in next(iter(found[3]["tasks"].values())))
        assert not any(name.startswith("asyncdist inspect") for name in found[3]["threads"])
        looked = invoke("top", "--namespace", "stacks", "--count", 1).stdout.splitlines()
        assert any("computes at" in line for line in looked if line.split()[0] == "2")


def test_a_store_with_a_token_is_asked_with_it_and_no_other(tmp_path: Path) -> None:
    token, port = new_token(), free_port()
    (tmp_path / "token").write_text(token)
    (tmp_path / "wrong").write_text(new_token())
    with job("token", MASTER_PORT=str(port), ASYNCDIST_TOKEN=token):
        where = ["--store", f"127.0.0.1:{port}", "--namespace", "token"]
        wrong = CliRunner().invoke(main, ["ps", *where, "--token-file", str(tmp_path / "wrong")])
        assert (wrong.exit_code, "tokens of client and server differ" in wrong.output) == (1, True)
        assert states(*where, "--token-file", tmp_path / "token")[0] == "waits"


def test_where_the_store_does_not_answer_the_ranks_of_this_host_are_asked() -> None:
    """As where rank 0, which hosts it, is what hangs."""
    port = free_port()
    with job("hosted", MASTER_PORT=str(port)) as ranks:
        ranks[0].send_signal(signal.SIGSTOP)
        result = invoke("ps", "--store", f"127.0.0.1:{port}", "--namespace", "hosted", "--timeout", 0.5)
        assert "; asking the ranks of this host" in result.stderr
        assert {line.split()[0]: line.split()[1] for line in result.stdout.splitlines()}["0"] == "stopped"


def test_it_can_be_turned_off() -> None:
    with job(
        "off",
        ASYNCDIST_INSPECT="off",
        size=1,
        code="async def main():\n  async with dist.init_process_group():\n"
        "    print('ready', flush=True); await asyncio.sleep(60)\nasyncio.run(main())",
    ):
        result = CliRunner().invoke(main, ["ps", "--namespace", "off"])
        assert (result.exit_code, "no world" in result.output) == (1, True)


def test_a_world_without_a_store_is_found_on_its_host(tmp_path: Path) -> None:
    code = f"""
async def main():
    rank = int(os.environ["RANK"])
    async with dist.init_process_group(init_method="file://{tmp_path}/store", rank=rank, world_size=5) as group:
        await dist.barrier()
        print("ready", flush=True)
        await group.recv(np.empty(3), (rank + 1) % 5, tag=7)
asyncio.run(main())
"""
    with job("by file", code):
        lines = invoke("ps", "--namespace", "by file").stdout.splitlines()
    (line,) = [line for line in lines if line.split()[0] == "4"]
    assert "recv from rank 0 (tag 7)" in line
    assert "rank 0" in line


def test_nothing_is_left_behind_by_a_world_that_has_closed() -> None:
    code = """
import threading
from asyncdist.inspect.endpoint import THREAD
async def main():
    for _ in range(2):
        async with dist.init_process_group():
            await dist.barrier()
            assert [thread for thread in threading.enumerate() if thread.name == THREAD]
        assert not [thread for thread in threading.enumerate() if thread.name == THREAD]
    print("ready", flush=True)
asyncio.run(main())
"""
    with job("closed", code, size=2) as ranks:
        assert [rank.wait(30) for rank in ranks] == [0, 0], [rank.stderr.read() for rank in ranks if rank.stderr]


EXCHANGE = """
async def main():
    async with dist.init_process_group() as group:
        x = np.ones(3)
        for _ in range(5):
            await group.all_reduce(x)
            await (group.send(x, 1, tag=7) if group.rank == 0 else group.recv(x, 0, tag=7))
        print("ready", flush=True)
        await asyncio.sleep(60)
dist.run(main())
"""


def test_the_timeline_of_a_running_job_has_its_operations_and_sends_before_receives(tmp_path: Path) -> None:
    out = tmp_path / "job.pftrace"
    with serve_in_thread() as server, job("timeline", EXCHANGE, 2, ASYNCDIST_STORE=f"127.0.0.1:{server.port}"):
        assert "2 ranks" in invoke("trace", "--namespace", "timeline", "-o", out).stdout
    names: dict[str, int] = {}
    flows: dict[int, list[tuple[int, int]]] = {}
    for packet in Trace.FromString(out.read_bytes()).packet:
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            names[event.name] = names.get(event.name, 0) + 1
        for number in event.flow_ids:
            flows.setdefault(number, []).append((packet.timestamp, 0))
        for number in event.terminating_flow_ids:
            flows[number].append((packet.timestamp, 1))
    assert names.items() >= {"all_reduce": 10, "send": 5, "recv": 5}.items()
    arrows = [ends for ends in flows.values() if ends[-1][1]]
    assert len(arrows) == 5
    assert all(sent < received for (sent, _), (received, _) in arrows)
    result = CliRunner().invoke(main, ["trace", "--namespace", "no such job", "-o", str(out)])
    assert result.exit_code == 1
    assert "what runs: none" in result.output
