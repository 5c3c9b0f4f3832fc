"""The proof: every algorithm passes in every world up to 33, for every root. `make prove` goes on to 257 and beyond.

`make test` leaves most worlds from 10 on to `.ci/run`.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from plan_proof.prove import BY_HOST, MAX_STEPS, SINGLE_COPIES, THOROUGH, families, prove
from plan_proof.verify import PlanError
from prove_plans import parse_worlds, prove_command

from asyncdist.plan.algorithms.binary_trees import _Hosts
from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, build
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Plan, RepeatedSteps

EVERY_COUNT = 9
"""The largest world proven with every count here: powers of two, primes, odd and even composites are among them."""

EVERY = [(collective, name) for collective in ALGORITHMS for name in algorithms(collective, shared=True)]


SMALL = [*range(1, 10), 12]
"""Worlds proven with every run of `make test`: all small ones and an even composite more."""

FEWER_COUNTS = (8, 9)
"""Of those that `.ci/run` proves with every count: the dearest."""

OTHERS = [world for world in range(1, 34) if world not in SMALL or world in FEWER_COUNTS]


@pytest.mark.parametrize(
    "worlds", [SMALL, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["small worlds", "others"]
)
@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_every_algorithm_is_proven_in_every_world(collective, algorithm, worlds):
    for world in worlds:
        every_count = world <= EVERY_COUNT and (worlds is OTHERS or world not in FEWER_COUNTS)
        proof = prove(collective, algorithm, world, thorough=every_count)
        assert proof.proven > 0
        assert not proof.left_out


def problems(collective, algorithm, world):
    found = [problem for family in families(collective, algorithm, world) for problem in family]
    return [problem if isinstance(problem, Problem) else problem[0] for problem in found]


def test_cases_have_no_element_one_fewer_than_ranks_uneven_and_several_chunks():
    counts = {problem.counts for problem in problems("all_reduce", "ring", 4)}
    assert {(0,), (1,), (3,), (4,), (7,), (41,)} <= counts
    for world, expected in {13: {True, False}, 64: {True, False}, 65: {False}, 128: {True}, 129: {False}}.items():
        assert {problem.even for problem in problems("all_gather", "ring", world) if problem.total} == expected


@pytest.mark.parametrize("collective", ["broadcast", "gather"])
def test_every_root_is_proven_in_worlds_up_to_128(collective):
    for world in (1, THOROUGH, THOROUGH + 1, 128):
        assert {problem.root for problem in problems(collective, "linear", world)} == set(range(world))
    assert {problem.root for problem in problems(collective, "linear", 129)} == {0, 1, 43, 64, 128}


def test_plans_that_are_others_with_a_single_copy_are_proven_so_too():
    for collective, algorithm in EVERY:
        problem = Problem.of(
            collective, 4, (3,) * 8 if collective == "all_to_all_uneven" else 0 if collective == "barrier" else 400
        )
        other = problem._replace(single_copy=True)
        differs = any(
            build(problem, algorithm, rank, 4).steps != build(other, algorithm, rank, 4).steps for rank in range(4)
        )
        proven = [one for one in problems(collective, algorithm, 4) if one.single_copy]
        assert differs == ((collective, algorithm) in SINGLE_COPIES) == bool(proven), (collective, algorithm)
        for one in proven:
            assert isinstance(build(one, algorithm, 0, 4).steps, RepeatedSteps)
            assert build(one._replace(single_copy=False), algorithm, 0, 4).steps != build(one, algorithm, 0, 4).steps


def test_only_algorithms_known_for_it_look_at_the_ranks_per_host():
    for collective, algorithm in EVERY:
        count = (3,) * 16 if collective == "all_to_all_uneven" else 0 if collective == "barrier" else 9
        differs = False
        for ranks_per_host in (2, 4, 8):
            problem = Problem.of(collective, 8, count, 3)
            other = problem._replace(ranks_per_host=ranks_per_host)
            differs |= any(build(problem, algorithm, rank, 4) != build(other, algorithm, rank, 4) for rank in range(8))
        assert differs == (algorithm in BY_HOST), (collective, algorithm)
    for algorithm in BY_HOST:
        assert {problem.ranks_per_host for problem in problems("all_reduce", algorithm, 12)} == {1, 2, 3, 4, 5, 6}
    by_world = {
        world: {one.ranks_per_host for one in problems("reduce", "double_tree", world)} for world in range(1, 66)
    }
    assert (by_world[13], by_world[32], by_world[65]) == ({1, 2}, {1, 8}, {1, 13})
    assert all(len(found) > 1 for found in by_world.values())


def test_another_root_is_compared_where_that_is_enough_and_run_where_not():
    assert prove("broadcast", "double_tree", 7).renamed > 0
    # hosts of two, three and five: roots at one place of different hosts are compared, if all hosts are full
    assert prove("broadcast", "double_tree", 9).renamed > 8 + 6
    ordered = prove("reduce", "linear", 7)  # whose operands are in rank order, whatever the root
    assert ordered.renamed == 0
    assert ordered.run > 7


def broken(collective, algorithm, change, monkeypatch):
    """Let an algorithm make other plans."""

    def build_changed(problem, name, rank, chunk_length):
        return change(build(problem, name, rank, chunk_length), problem)

    monkeypatch.setattr("plan_proof.prove.build", build_changed)
    with pytest.raises(PlanError) as caught:
        prove(collective, algorithm, 5)
    return str(caught.value)


def without_last_step(plan):
    return Plan(plan.collective, plan.algorithm, plan.rank, plan.world, plan.steps[:-1], plan.scratch_count)


def test_a_mistake_for_one_root_is_found(monkeypatch):
    message = broken(
        "broadcast",
        "chain",
        lambda plan, problem: without_last_step(plan) if problem.root == plan.rank == 3 and plan.steps else plan,
        monkeypatch,
    )
    assert "sent and not received" in message
    assert "root=3" in message


def test_a_mistake_in_trees_over_hosts_is_found(monkeypatch):
    """The second tree has the head of the first: then that rank gets a half from nobody, and another gets it twice."""
    head = _Hosts.head
    monkeypatch.setattr(_Hosts, "head", lambda hosts, tree, host: head(hosts, 0 if host == 2 else tree, host))
    for collective in ("all_reduce", "broadcast", "reduce"):
        prove(collective, "double_tree", 4, thorough=False)
        with pytest.raises(PlanError, match="ranks_per_host=2"):
            prove(collective, "double_tree", 6)


def test_a_mistake_on_one_rank_of_a_ring_is_found(monkeypatch):
    message = broken(
        "all_gather", "ring", lambda plan, _: without_last_step(plan) if plan.rank == 4 else plan, monkeypatch
    )
    assert "rank 4" in message


def test_an_algorithm_that_is_said_to_keep_the_order_of_ranks_must_say_so_itself(monkeypatch):
    message = broken("reduce", "linear", lambda plan, _: without_last_step(plan), monkeypatch)
    assert "rank 0 keeps no order of ranks" in message


def test_problems_are_left_out_from_one_step_past_the_limit(monkeypatch):
    steps = sum(len(build(Problem.of("scan", 40, 40), "recursive_doubling", rank, 8).steps) for rank in range(40))
    assert steps < MAX_STEPS
    monkeypatch.setattr("plan_proof.prove.MAX_STEPS", steps)
    assert not prove("scan", "recursive_doubling", 40).left_out
    monkeypatch.setattr("plan_proof.prove.MAX_STEPS", steps - 1)
    assert prove("scan", "recursive_doubling", 40).left_out > 0


def test_the_command_reports_and_fails_as_it_should(monkeypatch):
    arguments = ["--worlds", "1..3,5", "--collective", "barrier", "--jobs", "1"]
    result = CliRunner().invoke(prove_command, arguments)
    assert result.exit_code == 0
    assert "barrier:dissemination" in result.output
    assert "barrier:shared" in result.output
    assert f"{4 * len(algorithms('barrier', shared=True))} problems proven" in result.output
    assert "100 %" in result.output  # no terminal: lines instead of a bar
    monkeypatch.setattr("plan_proof.prove.build", lambda *_: Plan("barrier", "broken", 0, 1, ()))
    result = CliRunner().invoke(prove_command, arguments)
    assert result.exit_code == 1
    assert "barrier:dissemination FAILED in a world of 2" in result.output
    monkeypatch.setattr("plan_proof.prove.build", lambda *_: 1 // 0)
    result = CliRunner().invoke(prove_command, arguments)
    assert result.exit_code == 1
    assert "barrier:dissemination FAILED in a world of 1: ZeroDivisionError" in result.output


def test_the_command_works_in_several_processes():
    result = CliRunner().invoke(prove_command, ["--worlds", "1..6", "--algorithm", "circulant", "--jobs", "2"])
    assert result.exit_code == 0, result.output
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert f"{collective}:circulant" in result.output


@pytest.mark.parametrize("arguments", [["--worlds", "0..3"], ["--worlds", "x"], ["--algorithm", "magic"]])
def test_the_command_refuses_nonsense(arguments):
    assert CliRunner().invoke(prove_command, arguments).exit_code == 2


def test_worlds_are_numbers_and_ranges():
    assert parse_worlds("1..3,5,2") == [1, 2, 3, 5]


def test_without_affinity_there_is_a_process_for_every_core(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    arguments = ["--worlds", "3", "--collective", "broadcast", "--algorithm", "linear"]
    assert CliRunner().invoke(prove_command, arguments).exit_code == 0
