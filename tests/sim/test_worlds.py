"""Random programs on whole worlds in virtual time: right results, or the right error, and never a hang.

`make test` runs some seeds, `make sim` thousands (`make sim SEEDS=20000`). A failure names its seed; add it to PINNED
once its cause is fixed.
"""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest
from sim_exchanges import with_exchanges
from sim_programs import Collective, Fault, Scenario, Track, scenario
from sim_worlds import run_scenario

from asyncdist import ReduceOp
from asyncdist.collectives.executor.runner import Execution
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.group.process_group import ProcessGroup
from asyncdist.transport.in_memory import MemoryNetwork
from asyncdist.world.world import World

SEEDS = 100
"""Unless the environment says otherwise: some seconds."""
BLOCK = 25
"""Seeds in one test: few tests even for thousands of seeds; a failure names its seed in the message."""
PINNED = [
    (False, 1),  # leaving the world aborted subgroups that others still used
    (False, 154),  # scratch of a refused operation was lost
    (False, 1742),  # a rank that heard of a refusal left before others heard of it
    (True, 15),  # close waited for an operation that could not start
    (True, 55),  # an abort did not reach those who connected later
    (True, 134),  # an abort left point-to-point alone where collectives had ended before
    (True, 855),  # a rank that had issued the operation was named missing
]


@pytest.fixture(autouse=True, scope="module")
def only_new_garbage() -> None:
    """Every run collects its garbage, to see exceptions nobody retrieved; none of it was there before.

    What is frozen stays so: among it is all that pytest has collected, which later collections would search.
    """
    gc.collect()
    gc.freeze()


def program_of(seed: int, *, faulty: bool) -> Scenario:
    """Every second seed's program has exchanges, prefixes and uneven gathers too; these came later than PINNED."""
    made = scenario(seed, faulty=faulty)
    return with_exchanges(made) if seed % 2 else made


def run_block(first: int, last: int, *, faulty: bool) -> None:
    """Run the seeds; the first failure names its own, and how many others failed."""
    failures: list[AssertionError] = []
    for seed in range(first, last):
        try:
            run_scenario(program_of(seed, faulty=faulty))
        except AssertionError as error:
            failures.append(error)
    if failures:
        raise AssertionError(f"{len(failures)} of seeds {first} to {last - 1} failed. {failures[0]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """As many blocks as ASYNCDIST_SIM_SEEDS asks for."""
    if "first" in metafunc.fixturenames:
        seeds = int(os.environ.get("ASYNCDIST_SIM_SEEDS", SEEDS))
        blocks = [(first, min(first + BLOCK, seeds)) for first in range(0, seeds, BLOCK)]
        ids = [f"{first}-{last - 1}" for first, last in blocks]
        cases = [blocks[0], *(pytest.param(*block, marks=pytest.mark.thorough) for block in blocks[1:])]
        metafunc.parametrize(("first", "last"), cases, ids=ids)


@pytest.mark.slow("runs 25 programs")
def test_without_faults_every_result_is_right(first: int, last: int) -> None:
    run_block(first, last, faulty=False)


@pytest.mark.slow("runs 25 programs")
def test_with_faults_every_operation_ends_as_promised(first: int, last: int) -> None:
    run_block(first, last, faulty=True)


@pytest.mark.parametrize(("faulty", "seed"), PINNED)
def test_seeds_that_found_something(faulty: bool, seed: int) -> None:
    run_scenario(scenario(seed, faulty=faulty))
    run_scenario(program_of(seed, faulty=faulty))


# The simulation must notice what it is there for.


def program(*kinds: str, count: int = 20_000, size: int = 4, fault: Fault | None = None) -> Scenario:
    """These collectives in a row, and a pair of senders."""
    operations = tuple(Collective(kind, count, "int64", ReduceOp.SUM, 0, None) for kind in kinds)
    tracks = [Track("collectives", 0, 1, collectives=operations)]
    tracks.append(Track("pair", 0, 2, (), (5, 20_000), (1,), 0))
    return Scenario(1, size, [tuple(range(size))], tracks, fault, barrier=True)


PROGRAM = program("all_reduce", "reduce", "all_gather", "reduce_scatter_tensor", "all_reduce")


def test_the_program_of_the_canaries_is_sound() -> None:
    run_scenario(PROGRAM)


def test_a_dropped_dependency_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Execution._advance

    def eager(self: Execution, ready: list[int]) -> None:
        pending = self._pending
        for index, waits in enumerate(pending):
            if waits == 1 and index % 3 == 0:  # starts a step before the one it waits for is done
                pending[index] = 99
                ready = [*ready, index]
        advance(self, ready)

    monkeypatch.setattr(Execution, "_advance", eager)
    with pytest.raises(AssertionError, match="wrong result"):
        run_scenario(PROGRAM)


def test_a_lost_message_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    received, count = Execution.message_received, [0]

    def forgetful(self: Execution, token: Any, receive: Any) -> None:
        count[0] += 1
        if count[0] != 30:
            received(self, token, receive)

    monkeypatch.setattr(Execution, "message_received", forgetful)
    with pytest.raises(AssertionError, match="nothing can happen any more"):
        run_scenario(PROGRAM)


def test_a_flipped_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_up, count = MemoryNetwork.cut_up, [0]

    def flip(self: MemoryNetwork, data: memoryview) -> list[memoryview]:
        count[0] += 1
        if len(data) > 10_000 and count[0] > 40:
            data = memoryview(bytes(data[:-1]) + bytes((data[-1] ^ 1,)))
        return cut_up(self, data)

    monkeypatch.setattr(MemoryNetwork, "cut_up", flip)
    with pytest.raises(AssertionError, match="wrong"):
        run_scenario(PROGRAM)


def test_news_nobody_hears_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "tell", lambda self, ranks, message, *, dial: [])
    with pytest.raises(AssertionError, match=r"late|before the fault|nothing can happen"):
        run_block(0, 40, faulty=True)


@pytest.mark.slow("runs programs until one notices")
def test_an_array_still_used_after_an_abort_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Execution, "stop", lambda self: None)
    monkeypatch.setattr(HostBackend, "abort", lambda self, error: None)
    with pytest.raises(AssertionError, match="after its operation had ended"):
        run_block(0, 60, faulty=True)


def test_a_task_left_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    close = ProcessGroup.close

    async def leaky(self: ProcessGroup) -> None:
        self._leak = asyncio.create_task(asyncio.sleep(1_000))  # type: ignore[attr-defined]
        await close(self)

    monkeypatch.setattr(ProcessGroup, "close", leaky)
    with pytest.raises(AssertionError, match="task left"):
        run_scenario(PROGRAM)
