"""Random messages in virtual time, judged against a model: tests/soak/message_program.py. `make sim` runs thousands."""

from __future__ import annotations

import os

import pytest
from group_kit import Group
from message_program import RANKS, Messages, Notes, problems_of

from asyncdist.testing import run_world

SEEDS = int(os.environ.get("ASYNCDIST_SIM_SEEDS", "40"))
BLOCK = 20


def run_seed(seed: int) -> list[Notes]:
    async def main(group: Group) -> Notes:
        return await Messages(group, seed, messages=25, largest=1 << 20).run()

    return run_world(RANKS, main, seed=seed)


@pytest.mark.slow("runs 20 programs")
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(BLOCK, SEEDS, BLOCK))]
)
def test_what_is_acknowledged_is_received_once_and_in_order(first: int) -> None:
    for seed in range(first, first + BLOCK):
        problems = problems_of(run_seed(seed))
        assert not problems, f"seed {seed}: {problems[0]}, and {len(problems) - 1} more"
