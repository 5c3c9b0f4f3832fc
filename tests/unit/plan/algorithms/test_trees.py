"""The tree over ranks and the pair of trees: what their docstring says of them, for every size to 600."""

from __future__ import annotations

import pytest

from asyncdist.plan.algorithms.trees import NO_PARENT, Node, pair_nodes, tree_node

SIZES = range(1, 601)


def pair(size):
    nodes = [pair_nodes(rank, size) for rank in range(size)]
    return [first for first, _ in nodes], [second for _, second in nodes]


def table(nodes):
    return {rank: node.children for rank, node in enumerate(nodes) if node.children}


def root_of(nodes):
    (root,) = [rank for rank, node in enumerate(nodes) if node.is_root]
    return root


def depths(nodes):
    found = {root_of(nodes): 0}
    queue = list(found)
    for rank in queue:
        for child in nodes[rank].children:
            assert nodes[child].parent == rank
            assert child not in found
            found[child] = found[rank] + 1
            queue.append(child)
    assert len(found) == len(nodes)
    return found


@pytest.mark.parametrize(
    ("size", "first", "second"),
    [
        (5, {0: {4}, 4: {2}, 2: {1, 3}}, {1: {0}, 0: {3}, 3: {2, 4}}),
        (6, {0: {4}, 4: {2, 5}, 2: {1, 3}}, {5: {1}, 1: {3, 0}, 3: {4, 2}}),
        (8, {0: {4}, 4: {2, 6}, 2: {1, 3}, 6: {5, 7}}, {7: {3}, 3: {5, 1}, 5: {6, 4}, 1: {2, 0}}),
        (
            13,
            {0: {8}, 8: {4, 12}, 4: {2, 6}, 12: {10}, 2: {1, 3}, 6: {5, 7}, 10: {9, 11}},
            {1: {9}, 9: {5, 0}, 5: {3, 7}, 0: {11}, 11: {10, 12}, 3: {2, 4}, 7: {6, 8}},
        ),
    ],
)
def test_known_pairs(size, first, second):
    for nodes, expected in zip(pair(size), (first, second), strict=True):
        assert {rank: set(children) for rank, children in table(nodes).items()} == expected


def test_each_is_one_tree_of_logarithmic_depth_whose_root_has_one_child():
    for size in SIZES:
        for nodes in pair(size):
            assert max(depths(nodes).values()) <= (size - 1).bit_length()
            assert len(nodes[root_of(nodes)].children) == (size > 1)
            assert max(len(node.children) for node in nodes) <= 2


def test_roots():
    for size in SIZES[1:]:
        first, second = pair(size)
        assert (root_of(first), root_of(second)) == ((0, size - 1) if size % 2 == 0 else (0, 1))


def test_nobody_has_more_than_two_children_over_both_trees():
    for size in SIZES[2:]:
        first, second = pair(size)
        both = [rank for rank in range(size) if first[rank].children and second[rank].children]
        assert both == ([0] if size % 2 else [])
        for rank in range(size):
            assert 1 <= len(first[rank].children) + len(second[rank].children) <= 2


def test_the_tree_is_in_rank_order():
    """Below the lower child are the positions next on the left, below the upper child those next on the right."""

    def inorder(nodes, rank):
        node = nodes[rank]
        before = [position for child in node.lower for position in inorder(nodes, child)]
        return before + [rank] + [position for child in node.upper for position in inorder(nodes, child)]

    for size in SIZES:
        assert inorder([tree_node(rank, size) for rank in range(size)], 0) == list(range(size))


def test_one_rank_is_a_root_without_children():
    assert pair_nodes(0, 1) == (Node(), Node())
    assert Node().parent == NO_PARENT
