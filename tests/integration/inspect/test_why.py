"""`asyncdist why` on jobs that hang: real processes, each hanging in a way of its own, and the dumps they leave."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import hang_programs
import pytest
from click.testing import CliRunner
from jobs import free_port, start_ranks
from launching import until

from asyncdist.cli import main as command

pytestmark = pytest.mark.slow("jobs of three ranks each, all started at once, that hang for a moment")

PROGRAM = Path(hang_programs.__file__)
RANKS = 3
HANG_S = 0.8
SLOW_S = 1.5

NOT_CALLED = "Rank {0} has not called all_reduce #1 of group default, in which ranks {1} wait at {{waits}}: "
SENTENCES = {
    "never_calls": NOT_CALLED.format(2, "0 and 1") + "it sleeps in asyncio.sleep at {culprit} (never_calls).",
    "calls_something_else": "Ranks differ in call #1 of group default: "
    "rank 2 called broadcast (root 0, float64) at {culprit}, "
    "and ranks 0 and 1 called all_reduce (ReduceOp.SUM, float64) at {waits}.",
    "groups_in_different_order": "Deadlock of ranks 0 and 1: "
    "rank 0 waits in all_reduce #0 of group default/1 at {rank 0} for rank 1; "
    "rank 1 waits in all_reduce #0 of group default/2 at {rank 1} for rank 0.",
    "sends_that_cross": "Deadlock of ranks 0 and 1: "
    "rank 0 waits in send of 32 MiB to rank 1 at {rank}, which rank 1 has not received; "
    "rank 1 waits in send of 32 MiB to rank 0 at {rank}, which rank 0 has not received.",
    "tasks_that_wait_for_each_other": "Deadlock of ranks 0 and 1: "
    "rank 0 waits in all_reduce #0 of group default/1 at {rank 0} for rank 1; "
    "rank 1 waits in get of 'ready' of the store at {rank 1}, which rank 0 would set at {key}.",
    "computes": NOT_CALLED.format(1, "0 and 2") + "it computes at {culprit} (_spin.<locals>.<genexpr>).",
    "sleeps": NOT_CALLED.format(1, "0 and 2") + "it sleeps in time.sleep at {culprit} (sleeps).",
    "is_stopped": NOT_CALLED.format(1, "0 and 2") + "its process is stopped, by SIGSTOP or a debugger.",
    "is_killed": "Rank 1 is lost: the connection was closed without a goodbye (it failed, was killed, broke off, or "
    "ended without destroy_process_group(): see its own output). It had not called all_reduce #1 of group default, "
    "in which ranks 0 and 2 waited at {waits}.",
    "left_early": "Rank 1 has left without calling all_reduce #1 of group default, "
    "in which ranks 0 and 2 waited at {waits}.",
    "wrong_tag": "Rank 0 receives from rank 1 with tag 5 at {waits}, "
    "but rank 1 has sent with tag 6 at {culprit}, which rank 0 does not receive.",
    "key_never_set": "Rank 1 waits for the key 'config' of the store (get at {culprit}), which nobody has set; "
    "ranks 0 and 2 wait in barrier #1 of group default at {waits} for rank 1.",
    "two_roots": "Ranks differ in call #1 of group default: rank 2 called broadcast (root 1, float64) at {all}, "
    "and ranks 0 and 1 called broadcast (root 0, float64) at {all}.",
}
PROVEN = {"groups_in_different_order", "sends_that_cross", "tasks_that_wait_for_each_other", "key_never_set"}


def places(name: str) -> dict[str, str]:
    """The lines of `hang_programs.py` that are marked with this name."""
    marks = (
        (line.rpartition(f"# {name}: ")[2], number)
        for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        if f"# {name}: " in line
    )
    return {who: f"{PROGRAM.name}:{number}" for who, number in marks}


class Hung(NamedTuple):
    """What was said of each program while it ran, how long that took, and its dumps."""

    said: dict[str, str]
    took_s: dict[str, float]
    dumps: Path


def hung(names: list[str], folder: Path, hang_s: float) -> Hung:
    """Run these programs at once, ask why they hang once they have for a moment, and end them with SIGTERM."""
    start = f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    ports = {name: free_port() for name in names}
    ranks = []
    said, took_s = {}, {}
    try:
        for name, port in ports.items():
            environ = {"ASYNCDIST_DUMP_DIR": str(folder / name), "MASTER_PORT": str(port)}
            ranks += start_ranks(f"sys.argv = ['', {name!r}]\n{start}", RANKS, environ)
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "begins\n"
        time.sleep(hang_s)
        for name, port in ports.items():
            began_s = time.monotonic()
            said[name] = ask("--store", f"127.0.0.1:{port}")[1].strip()
            took_s[name] = time.monotonic() - began_s
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        expected = [
            (folder / name, f"rank_{rank}.*")  # a rank that sees another end first may not come to write its first
            for name in names
            for rank in range(RANKS)
            if rank != 1 or name not in ("is_stopped", "is_killed", "left_early")
        ]
        until(lambda: all(any(where.glob(name)) for where, name in expected), "the dumps")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return Hung(said, took_s, folder)


@pytest.fixture(scope="module")
def all_hung(tmp_path_factory: pytest.TempPathFactory) -> Hung:
    return hung(list(SENTENCES), tmp_path_factory.mktemp("dumps"), HANG_S)


def ask(*options: str) -> tuple[int, Any]:
    found = CliRunner().invoke(command, ["why", "--after", "0.5", *options])
    return found.exit_code, found.output


@pytest.mark.parametrize("name", SENTENCES)
def test_a_running_job_says_why_it_hangs(all_hung: Hung, name: str) -> None:
    assert all_hung.said[name] == SENTENCES[name].format(**places(name))
    assert all_hung.took_s[name] < 2


@pytest.mark.parametrize("name", SENTENCES)
def test_dumps_say_why_a_job_hangs(all_hung: Hung, name: str) -> None:
    code, said = ask(str(all_hung.dumps / name))
    assert said.strip() == SENTENCES[name].format(**places(name))
    assert code == 1
    if name in PROVEN:
        assert json.loads(ask(str(all_hung.dumps / name), "--json")[1])[0]["proven"]


def test_a_rank_that_is_slower_is_named(tmp_path: Path) -> None:
    found = hung(["is_slower"], tmp_path, SLOW_S)
    for said in found.said["is_slower"], ask(str(tmp_path / "is_slower"))[1]:
        assert said.startswith("Rank 1 came last to ")
        assert f"look at what it does before that at {places('is_slower')['all']}" in said
    (report,) = json.loads(CliRunner().invoke(command, ["doctor", str(tmp_path / "is_slower"), "--json"]).output)
    assert report["stragglers"][0]["rank"] == 1
    assert report["verdict"]["kind"] == "slow"
