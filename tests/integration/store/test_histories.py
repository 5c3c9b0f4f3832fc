"""Histories of clients under faults, short ones: `make soak` has long ones, docs/proof.md says what is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_proxy import Chaos
from daemon_process import DaemonProcess
from proof_audit import Findings
from proof_rounds import MODES, Mode, Round, daemon_in, relaxed_round

ANSWERS = 400
MOST_ROUNDS = 20
on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])
"""The daemon is a process of its own, and the clients' connections are tested on both loops elsewhere."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proof_rounds.ROUND_ANSWERS", ANSWERS)
    monkeypatch.setattr("proof_audit.MAX_STEPS", 20_000)


async def one_round(mode: Mode, folder: Path, kills: int) -> Findings:
    async with daemon_in(mode, folder / "data") as daemon:
        return await Round(daemon, mode, "1").run(kills)


@on_uvloop
@pytest.mark.slow("kills or cuts off a daemon until its clients have met it again, twice")
@pytest.mark.parametrize("name", ["cuts", "memory", "durable"])
async def test_every_answer_can_be_explained(name: str, tmp_path: Path) -> None:
    findings = await one_round(MODES[name], tmp_path, 2)
    assert not findings.problems, "\n".join(findings.problems)
    assert (findings.lost, findings.twice, findings.undecided) == (0, 0, 0)
    assert findings.kills >= 2 or findings.pauses >= 2
    assert findings.operations > 100


@on_uvloop
async def test_what_relaxed_may_lose(tmp_path: Path) -> None:
    async with daemon_in(MODES["relaxed"], tmp_path / "data") as daemon:
        findings = await relaxed_round(daemon, "1", 2)
    assert not findings.problems, "\n".join(findings.problems)
    assert (findings.kills >= 2, findings.twice) == (True, 0)


# ---- daemons that are not what they should be

FORGETFUL = """
from asyncdist_server.engine import clients
clients.Client.take_replay = lambda self, request_id: (None, 0)
from asyncdist_server.cli import main
main()
"""
"""It makes every retried change again."""

STALE = """
import itertools
from asyncdist_server.engine import namespace, operations
turns = itertools.count()
remembered = {}
true_get = operations._get

def get(state, client, request, now):
    reply = true_get(state, client, request, now)
    if reply is not None and reply[1] == 0:
        old = remembered.get(request[2])
        if next(turns) % 10 == 0:
            remembered[request[2]] = reply[2]
            return (reply[0], 0, old) if old is not None else reply
    return reply

operations.OPERATIONS[operations.GET] = (get, 4)
from asyncdist_server.cli import main
main()
"""
"""Some of its answers to `get` are old."""

GAPPY = """
import itertools
from asyncdist_server.engine import history
turns = itertools.count(1)
true_append = history.History.append

def append(self, event):
    if next(turns) % 50:
        true_append(self, event)

history.History.append = append
from asyncdist_server.cli import main
main()
"""
"""It forgets to tell of some changes."""


@on_uvloop
async def test_lost_writes_are_found(tmp_path: Path) -> None:
    """A daemon without a journal that is taken for one with."""
    lying = Mode("lying", (), kills=True, forgets=False, proxied=0)
    findings = await one_round(lying, tmp_path, 1)
    assert findings.lost > 0
    assert any("not linearizable" in problem for problem in findings.problems)


@on_uvloop
@pytest.mark.slow("runs rounds until the fault is found")
@pytest.mark.parametrize(
    ("program", "told"),
    [
        pytest.param(FORGETFUL, "there", id="applied twice"),
        pytest.param(STALE, "not linearizable", id="stale reads"),
        pytest.param(GAPPY, "went from", id="gaps in watches"),
    ],
)
async def test_planted_faults_are_found(program: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proof_rounds.CHAOS", Chaos(cut_after=20_000, early=0.0))
    monkeypatch.setattr("proof_load.LOCK_TIMEOUT_S", 2.0)  # who takes a lock twice waits for itself
    async with DaemonProcess(program=("-c", program)) as daemon:
        for seed in range(MOST_ROUNDS):  # it takes a cut at the right moment, which a round may not have
            findings = await Round(daemon, MODES["cuts"], str(seed)).run(0)
            if any(told in problem for problem in findings.problems):
                break
        else:
            pytest.fail(f"not found in {MOST_ROUNDS} rounds: {findings}")
    assert (findings.twice > 0) == (program is FORGETFUL)
