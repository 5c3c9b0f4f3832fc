"""`asyncdist doctor --network` on running jobs, on one that waits for a rank, and as a job of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from jobs import start_rank, start_ranks
from launching import run, until

from asyncdist.cli import main
from asyncdist_server.serving.threaded import serve_in_thread

JOB = """
if os.environ["RANK"] == "1":
    os.environ["ASYNCDIST_ADVERTISE"] = "127.0.0.1:1"
async def main():
    async with dist.init_process_group() as group:
        print("ready", flush=True)
        time.sleep(100)
dist.run(main())
"""


def doctor(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", "--network", *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.slow("starts ranks")
def test_ranks_whose_loops_hang_say_whom_they_cannot_reach() -> None:
    """Rank 1 advertises a port that nobody listens on; nobody has dialed it yet."""
    with serve_in_thread() as server:
        where = "--store", f"127.0.0.1:{server.port}", "--namespace", "network"
        environ = {"ASYNCDIST_JOB_ID": "network", "ASYNCDIST_STORE": where[1], "ASYNCDIST_TRANSPORT": "tcp"}
        ranks = start_ranks(JOB, 3, environ)
        try:
            for each in ranks:
                assert each.stdout is not None
                assert each.stdout.readline() == "ready\n"
            code, said = doctor(*where)
            (report,) = json.loads(doctor(*where, "--json")[1])
        finally:
            for each in ranks:
                each.kill()
                each.communicate()
    assert code == 1
    assert "cannot reach rank 1" in said
    assert " at tcp 127.0.0.1:1: it is refused" in said
    assert "Pairs of ranks that fail so, to that host: 2." in said
    assert "4 of 6 pairs of ranks that were tried reach each other" in said
    assert "sleeps or is blocked at <string>" in said
    looks: dict[int, Any] = {look["rank"]: look for look in report["network"]["ranks"]}
    assert looks[1]["listens"] == [{"ip": "127.0.0.1", "port": 1}]
    (to_one, to_two) = looks[0]["peers"]
    assert to_one["dials"] == [{"to": "tcp 127.0.0.1:1", "error": "ECONNREFUSED"}]
    assert 0 < to_two["dials"][0]["rtt_s"] < 1
    assert to_two["state"] == "not connected"


@pytest.mark.slow("starts a rank")
def test_of_ranks_that_wait_for_others_the_store_says_what_they_advertise() -> None:
    with serve_in_thread() as server:
        environ = {"ASYNCDIST_JOB_ID": "waits", "ASYNCDIST_STORE": f"127.0.0.1:{server.port}"}
        rank = start_rank("async def main():\n  await dist.init_process_group()\ndist.run(main())", 0, 2, environ)
        try:
            where = "--store", f"127.0.0.1:{server.port}", "--namespace", "waits"
            until(lambda: "did not join" in doctor(*where)[1], "the rank")
            code, said = doctor(*where)
        finally:
            rank.kill()
            rank.communicate()
    assert code == 1
    assert "Rank 1 did not join: " in said
    assert "did not say whom they reach: it waits for other ranks to join" in said
    assert "127.0.0.1 " in said


@pytest.mark.slow("starts ranks")
def test_a_job_that_only_checks_the_network() -> None:
    done = run("--nproc-per-node", "2", "-m", "asyncdist", "doctor", "--bandwidth", "--join", COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 pairs of ranks that were tried reach each other" in done.stdout
    assert done.stdout.count("from \\ to") == 1


def test_what_cannot_be_asked_is_refused(tmp_path: Any) -> None:
    assert doctor(str(tmp_path))[0] == 2
    code, said = doctor("--join")
    assert (code, "--join is for ranks" in said) == (2, True)
