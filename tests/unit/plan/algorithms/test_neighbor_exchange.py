"""Neighbor exchange."""

from __future__ import annotations

import pytest
from plan_counts import peers, plans_of, received, rounds, sent

from asyncdist.plan.steps import Buffer, Send


@pytest.mark.parametrize("world", [2, 4, 6, 8, 14])
def test_half_a_ring_s_rounds_with_two_peers(world):
    plans = plans_of("all_gather", "neighbor_exchange", world, 6, chunk_length=4)
    assert rounds(plans) == world // 2
    for rank, plan in enumerate(plans):
        assert sent(plan) == received(plan) == 6 * (world - 1)
        assert peers(plan) == {(rank + 1) % world, (rank - 1) % world}
        first = next(step for step in plan.steps if isinstance(step, Send))
        assert (first.source.buffer, first.after) == (Buffer.INPUT, ())


def test_an_odd_world_is_the_plain_ring():
    for plan, plain in zip(
        plans_of("all_gather", "neighbor_exchange", 5, 6), plans_of("all_gather", "ring", 5, 6), strict=True
    ):
        assert (plan.steps, plan.algorithm) == (plain.steps, "neighbor_exchange")
