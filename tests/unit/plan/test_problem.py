"""Problem.of: what it accepts, refuses and derives."""

from __future__ import annotations

import pytest

from asyncdist.plan.problem import BLOCK_COLLECTIVES, Problem


def test_counts_are_normalized():
    assert Problem.of("all_reduce", 3, 5).counts == (5,)
    assert Problem.of("all_reduce", 3, (5,)).counts == (5,)
    assert Problem.of("all_gather", 3, 5).counts == (5, 5, 5)
    assert Problem.of("all_gather", 3, [1, 2, 3]).counts == (1, 2, 3)


def test_a_root_is_kept_only_where_there_is_one():
    assert Problem.of("broadcast", 3, 5, root=2).root == 2
    assert Problem.of("all_reduce", 3, 5, root=2).root == 0


def test_hosts_are_unknown_unless_said():
    assert Problem.of("all_reduce", 4, 5).ranks_per_host == 1
    assert Problem.of("all_reduce", 4, 5, ranks_per_host=2).ranks_per_host == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_to_none", 2, 1), "unknown collective"),
        (("all_reduce", 0, 1), "at least one rank"),
        (("broadcast", 2, 1, 2), "root 2 is not a rank"),
        (("broadcast", 2, 1, -1), "root -1 is not a rank"),
        (("all_reduce", 2, -1), "negative"),
        (("all_gather", 2, (1, -1)), "negative"),
        (("all_gather", 2, (1, 2, 3)), "3 block lengths for a world of 2"),
        (("all_reduce", 2, (1, 2)), "one element count"),
        (("all_to_all", 2, (1, 2)), "one element count"),
        (("all_to_all_uneven", 2, 1), "2 lengths to send and 2 to receive"),
        (("all_to_all_uneven", 2, (1, 2, 3)), "2 lengths to send and 2 to receive"),
        (("all_to_all_uneven", 2, (1, 2, 3, -1)), "negative"),
        (("all_reduce", 2, 1, 0, 0), "0 ranks per host"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Problem.of(*arguments)


@pytest.mark.parametrize(
    ("collective", "inputs", "outputs"),
    [
        ("all_reduce", [0, 0, 0], [4, 4, 4]),
        ("broadcast", [0, 0, 0], [4, 4, 4]),
        ("reduce", [4, 4, 4], [0, 4, 0]),
        ("all_gather", [1, 2, 3], [6, 6, 6]),
        ("reduce_scatter", [6, 6, 6], [1, 2, 3]),
        ("gather", [1, 2, 3], [0, 6, 0]),
        ("scatter", [0, 6, 0], [1, 2, 3]),
        ("scan", [0, 0, 0], [4, 4, 4]),
        ("exscan", [0, 0, 0], [4, 4, 4]),
        ("all_to_all", [12, 12, 12], [12, 12, 12]),
        ("all_to_all_uneven", [6, 6, 6], [15, 15, 15]),
        ("gather_uneven", [1, 2, 3], [0, 6, 0]),
        ("scatter_uneven", [0, 6, 0], [1, 2, 3]),
    ],
)
def test_buffer_lengths(collective, inputs, outputs):
    count = (1, 2, 3) if collective in BLOCK_COLLECTIVES else (1, 2, 3, 4, 5, 6) if "uneven" in collective else 4
    problem = Problem.of(collective, 3, count, root=1)
    assert [problem.input_length(rank) for rank in range(3)] == inputs
    assert [problem.output_length(rank) for rank in range(3)] == outputs


def test_an_exchange_knows_its_blocks():
    even, uneven = Problem.of("all_to_all", 2, 3), Problem.of("all_to_all_uneven", 2, (1, 2, 3, 4))
    assert (even.send_counts, even.receive_counts, even.private) == ((3, 3), (3, 3), False)
    assert (uneven.send_counts, uneven.receive_counts, uneven.private) == ((1, 2), (3, 4), True)
    assert (even.total, uneven.total) == (6, 3)
