"""One pipelined binary tree: bytes, depth, order and memory."""

from __future__ import annotations

import pytest
from plan_counts import plans_of, received, rounds, sent

from asyncdist.plan.algorithms.trees import tree_node
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.steps import Recv, Reduce, Send

WORLDS = [2, 3, 5, 8, 13, 24, 33]


def depth(world):
    """Of the tree over ranks 0 .. world - 1."""
    found = [0] * world
    for rank in range(world):
        node = tree_node(rank, world)
        while not node.is_root:
            found[rank] += 1
            node = tree_node(node.parent, world)
    return max(found)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_sends_as_much_as_its_children_and_parent_take(world):
    total = 40
    for rank, plan in enumerate(plans_of("broadcast", "binary_tree", world, total, chunk_length=7)):
        children = len(tree_node(rank, world).children)
        assert sent(plan) == children * total <= 2 * total
        assert received(plan) == (total if rank else 0)
    for rank, plan in enumerate(plans_of("reduce", "binary_tree", world, total, chunk_length=7)):
        assert sent(plan) == (total if rank else 0)
        assert received(plan) == len(tree_node(rank, world).children) * total
    for rank, plan in enumerate(plans_of("all_reduce", "binary_tree", world, total, chunk_length=7)):
        links = len(tree_node(rank, world).children) + (rank > 0)
        assert sent(plan) == received(plan) == links * total <= 3 * total


@pytest.mark.parametrize("world", WORLDS)
def test_rounds_are_the_depth_of_the_tree(world):
    levels = depth(world)
    assert levels <= (world - 1).bit_length()
    for root in (0, world - 1):
        assert rounds(plans_of("broadcast", "binary_tree", world, 4, root)) == levels
        assert rounds(plans_of("reduce", "binary_tree", world, 4, root)) == levels
    assert rounds(plans_of("all_reduce", "binary_tree", world, 4)) == 2 * levels


def test_rank_order_is_kept_where_the_tree_is_not_turned():
    assert plans_of("all_reduce", "binary_tree", 6, 4)[0].ordered
    assert [plans_of("reduce", "binary_tree", 6, 4, root)[2].ordered for root in range(3)] == [True, False, False]


def test_lower_children_are_reduced_on_the_left():
    reductions = [step for step in plans_of("all_reduce", "binary_tree", 8, 4)[4].steps if isinstance(step, Reduce)]
    assert [step.source_left for step in reductions] == [True, False]


@pytest.mark.parametrize("chunks", [WINDOW, WINDOW + 1])
def test_an_inner_rank_holds_a_window_of_chunks_for_each_child(chunks):
    for rank, plan in enumerate(plans_of("all_reduce", "binary_tree", 8, 10 * chunks, chunk_length=10)):
        assert plan.scratch_count == len(tree_node(rank, 8).children) * WINDOW * 10


def test_chunks_go_down_while_others_come_up():
    """The root sends the first result before it needs the second operand; a leaf sends all its operands at once."""
    plans = plans_of("all_reduce", "binary_tree", 4, 40, chunk_length=10)
    root = [step for step in plans[0].steps if isinstance(step, Send | Recv | Reduce)]
    assert [type(step) for step in root[:6]] == [Recv, Reduce, Send] * 2
    assert all(not step.after for step in root if isinstance(step, Recv))
    assert all(not step.after for step in plans[3].steps if isinstance(step, Send))
