"""Temporary memory of large vectors: SCRATCH and what receives hold until they are reduced."""

from __future__ import annotations

import pytest
from plan_counts import staged

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.problem import Problem

LARGE = ["ring", "ring_2d", "circulant", "halving_doubling", "binary_tree", "double_tree"]

CHUNK_BYTES = 1 << 20
"""The largest chunk that is chosen for 256 MiB."""

LIMIT_BYTES = 48 << 20
"""What an all_reduce of 256 MiB may take besides its operands, with the rounding of the pool: half as much again."""


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 24, 64])
@pytest.mark.parametrize("algorithm", LARGE)
def test_all_reduce_of_256_mib_stays_within_a_few_chunks(algorithm, world):
    problem = Problem.of("all_reduce", world, 256 << 20)
    plans = [build(problem, algorithm, rank, CHUNK_BYTES) for rank in {0, 1, world // 2, world - 1}]
    held = max(plan.scratch_count + staged(plan) for plan in plans)
    assert 0 < held <= 2 * WINDOW * CHUNK_BYTES
    assert 1.5 * held < LIMIT_BYTES


@pytest.mark.parametrize("algorithm", ["binary_tree", "double_tree"])
def test_on_hosts_trees_hold_a_few_chunks_more(algorithm):
    for size in (2, 3, 8):
        problem = Problem.of("all_reduce", 8 * size, 256 << 20, 0, size)
        held = [build(problem, algorithm, rank, CHUNK_BYTES).scratch_count for rank in range(4 * size, 6 * size)]
        assert 0 < max(held) <= 4 * WINDOW * CHUNK_BYTES
        assert 1.5 * max(held) < LIMIT_BYTES


@pytest.mark.parametrize("algorithm", ["chain", "binary_tree", "double_tree"])
def test_reduce_of_256_mib_stays_within_a_few_chunks(algorithm):
    problem = Problem.of("reduce", 8, 256 << 20, 3)
    for rank in range(8):
        plan = build(problem, algorithm, rank, CHUNK_BYTES)
        assert plan.scratch_count + staged(plan) <= 2 * WINDOW * CHUNK_BYTES


@pytest.mark.parametrize("algorithm", LARGE)
def test_steps_are_proportional_to_chunks(algorithm):
    few = len(build(Problem.of("all_reduce", 16, 1 << 20), algorithm, 5, 1 << 14).steps)
    many = len(build(Problem.of("all_reduce", 16, 1 << 22), algorithm, 5, 1 << 14).steps)
    assert 2 * few < many < 6 * few
