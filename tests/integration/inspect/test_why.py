"""`asyncdist why` on jobs that hang: real processes, each hanging in a way of its own, and the dumps they leave."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from hang_sentences import PROGRAM, PROVEN, SENTENCES, places
from jobs import free_port, start_ranks
from launching import until

from asyncdist.cli import main as command

pytestmark = pytest.mark.slow("jobs of three ranks each, all started at once, that hang for a moment")

RANKS = 3
HANG_S = 0.8
SLOW_S = 1.5


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
