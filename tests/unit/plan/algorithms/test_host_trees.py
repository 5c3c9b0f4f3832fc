"""Trees over hosts: who speaks for a host, how deep they are, and what passes from one host to another."""

from __future__ import annotations

import pytest
from plan_counts import plans_of, received, rounds, sent

from asyncdist.plan.algorithms.binary_trees import host_pair, host_tree, rooted_host_pair
from asyncdist.plan.algorithms.trees import NO_PARENT, pair_nodes, pair_tops, rooted_pair_nodes, tree_node
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Send

SHAPES = [(2, 2), (2, 3), (3, 2), (4, 4), (5, 3), (6, 8), (7, 5), (8, 6), (13, 2)]
"""Hosts, and ranks of each."""

TOTAL = 48
TREES = ("first", "second", "single", "below the root, first", "below the root, second")


def nodes_of(tree, hosts, size, root=0):
    """All ranks' nodes in one of the trees."""
    problem = Problem.of("broadcast", hosts * size, 1, root, size)
    make = [host_pair, host_pair, host_tree, rooted_host_pair, rooted_host_pair][TREES.index(tree)]
    nodes = [make(problem, rank) for rank in range(hosts * size)]
    return nodes if tree == "single" else [pair[tree.endswith("second")] for pair in nodes]


def depth_of(nodes, rank):
    steps = 0
    while not nodes[rank].is_root:
        rank, steps = nodes[rank].parent, steps + 1
    return steps


def levels(number):
    return (number - 1).bit_length()


@pytest.mark.parametrize(("hosts", "size"), SHAPES)
@pytest.mark.parametrize("tree", TREES)
def test_each_is_one_tree_with_one_way_into_each_host(tree, hosts, size):
    own_root = tree in TREES[2:]
    for root in range(hosts * size) if own_root else (0,):
        nodes = nodes_of(tree, hosts, size, root)
        for rank, node in enumerate(nodes):
            assert all(nodes[child].parent == rank for child in node.children)
        assert sum(len(node.children) for node in nodes) == hosts * size - 1
        (top,) = [rank for rank, node in enumerate(nodes) if node.is_root]
        assert not own_root or top == root
        # of two trees below the root each has a level more, among hosts and inside the root's
        deepest = levels(hosts) + levels(size) + (tree in TREES[3:])
        assert max(depth_of(nodes, rank) for rank in range(hosts * size)) <= deepest
        into = [rank // size for rank, node in enumerate(nodes) if node.parent // size != rank // size]
        assert sorted(into) == list(range(hosts))  # the root's host has it from nobody: NO_PARENT // size
        assert NO_PARENT // size == -1


@pytest.mark.parametrize(("hosts", "size"), SHAPES)
def test_of_two_trees_each_host_is_inside_one_and_no_rank_is_the_head_in_both(hosts, size):
    pair = [nodes_of(tree, hosts, size) for tree in TREES[:2]]
    for nodes, tops in zip(pair, zip(*[pair_tops(size)] * hosts, strict=True), strict=True):
        heads = [rank for rank, node in enumerate(nodes) if node.parent // size != rank // size]
        assert [head % size for head in heads] == list(tops)
    assert len(set(pair_tops(size))) == 2
    for host in range(hosts):
        ranks = range(host * size, (host + 1) * size)
        outside = [child for nodes in pair for rank in ranks for child in nodes[rank].lower + nodes[rank].upper]
        assert len([child for child in outside if child // size != host]) <= 2
    for rank in range(hosts * size):
        children = [child for nodes in pair for child in nodes[rank].children]
        assert len([child for child in children if child // size == rank // size]) <= 2


@pytest.mark.parametrize(("hosts", "size"), [*SHAPES, (1, 6), (6, 1)])
def test_the_single_tree_is_in_rank_order(hosts, size):
    nodes = nodes_of("single", hosts, size)

    def inorder(rank):
        lower, right = nodes[rank].lower, nodes[rank].inside + nodes[rank].upper
        return [
            *(one for child in lower for one in inorder(child)),
            rank,
            *(one for kid in right for one in inorder(kid)),
        ]

    assert inorder(0) == list(range(hosts * size))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("one_host", [False, True])
def test_without_hosts_they_are_the_trees_over_ranks(world, one_host):
    for root in range(world):
        problem = Problem.of("broadcast", world, 1, root, world if one_host else 1)
        for rank in range(world):
            assert [node.children for node in host_pair(problem, rank)] == [
                node.children for node in pair_nodes(rank, world)
            ]
            assert [(node.parent, node.children) for node in rooted_host_pair(problem, rank)] == [
                (node.parent, node.children) for node in rooted_pair_nodes(rank, world, root)
            ]
            turned = tree_node((rank - root) % world, world).renamed(lambda place, root=root: (place + root) % world)
            assert host_tree(problem, rank).children == turned.children


def test_the_last_host_may_have_fewer_ranks():
    nodes = [host_pair(Problem.of("all_reduce", 7, 1, 0, 3), rank) for rank in range(7)]
    assert [rank for rank, (first, _) in enumerate(nodes) if first.parent // 3 != rank // 3] == [0, 3, 6]
    assert [rank for rank, (_, second) in enumerate(nodes) if second.parent // 3 != rank // 3] == [1, 4, 6]


def leaving(plans, size, host):
    """Elements that leave a host, and that come into it."""
    crossing = [
        (rank // size, step.peer // size, step.source.length)
        for rank, plan in enumerate(plans)
        for step in plan.steps
        if isinstance(step, Send) and step.peer // size != rank // size
    ]
    out = sum(length for source, _, length in crossing if source == host)
    return out, sum(length for _, target, length in crossing if target == host)


@pytest.mark.parametrize(("hosts", "size"), SHAPES)
@pytest.mark.parametrize(
    ("collective", "algorithm", "out", "into"),
    [
        ("all_reduce", "double_tree", 2, 2),
        ("all_reduce", "binary_tree", 3, 3),
        ("broadcast", "double_tree", 1, 1),
        ("broadcast", "binary_tree", 2, 1),
        ("reduce", "double_tree", 1, 1),
        ("reduce", "binary_tree", 1, 2),
    ],
)
def test_a_host_moves_what_one_rank_would(collective, algorithm, out, into, hosts, size):
    root = hosts * size // 2
    plans = plans_of(collective, algorithm, hosts * size, TOTAL, root, chunk_length=5, ranks_per_host=size)
    moved = [leaving(plans, size, host) for host in range(hosts)]
    assert max(sent for sent, _ in moved) <= out * TOTAL
    assert max(received for _, received in moved) <= into * TOTAL
    both = 2 if collective == "all_reduce" else 1
    assert sum(sent for sent, _ in moved) == both * (hosts - 1) * TOTAL
    assert sum(map(sent, plans)) == sum(map(received, plans)) == both * (hosts * size - 1) * TOTAL
    most = 4 if algorithm == "binary_tree" else 3
    assert max(map(sent, plans)) <= most * TOTAL


def test_rounds_are_those_of_hosts_and_of_one_host():
    assert rounds(plans_of("all_reduce", "double_tree", 64, 4, ranks_per_host=8)) == 2 * (3 + 3)
    assert rounds(plans_of("broadcast", "double_tree", 48, 4, 5, ranks_per_host=6)) <= 1 + 3 + 3


def test_rank_order_is_kept_on_hosts_as_without():
    assert all(plan.ordered for plan in plans_of("all_reduce", "binary_tree", 12, 4, ranks_per_host=4))
    assert plans_of("reduce", "binary_tree", 12, 4, ranks_per_host=4)[5].ordered
    assert not plans_of("reduce", "binary_tree", 12, 4, 4, ranks_per_host=4)[5].ordered
    assert not plans_of("all_reduce", "double_tree", 12, 4, ranks_per_host=4)[5].ordered


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_rank_holds_more_than_four_windows(size):
    for algorithm in ("binary_tree", "double_tree"):
        for plan in plans_of("all_reduce", algorithm, 8 * size, 2 * 10 * (WINDOW + 1), 0, 10, size):
            assert plan.scratch_count <= 4 * WINDOW * 10
