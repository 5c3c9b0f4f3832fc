"""What errors say of the other ranks: the verdict of `asyncdist why`, and both calls of a mismatch."""

from __future__ import annotations

import re

import pytest
from hang_sentences import PROGRAM, SENTENCES, places
from jobs import start_ranks

pytestmark = pytest.mark.slow("jobs of three ranks each, whose operations time out")

PATIENT = (
    "import asyncdist.world.world as world, asyncdist.group.deadlines as group; world.WHY_S, group.PROBE_S = 20, 30"
)


def error_of(name: str, environ: dict[str, str]) -> str:
    """What an operation of rank 0 raises in that program, once it has had a second."""
    run = f"sys.argv = ['', {name!r}, '1']\nimport runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    ranks = start_ranks(f"{PATIENT}\n{run}", 3, environ)
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "begins\n"
        return ranks[0].stdout.readline().strip()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("name", ["never_calls", "key_never_set"])
def test_a_time_out_says_why(name: str) -> None:
    said = error_of(name, {})
    assert "missing: rank " in said
    assert said.endswith(SENTENCES[name].format(**places(name)))


def test_a_time_out_where_nobody_answers_says_what_it_knows() -> None:
    said = error_of("never_calls", {"ASYNCDIST_INSPECT": "off"})
    assert said.endswith("missing: rank 2 (not called there)")


@pytest.mark.parametrize(
    ("name", "environ", "first", "second"),
    [
        (
            "calls_something_else",
            {},
            "all_reduce float64[4] SUM (*) at {waits}",
            "broadcast float64[4] root 0 (*) at {culprit}",
        ),
        (
            "two_roots",
            {"ASYNCDIST_CALL_SITES": "1"},
            "broadcast float64[4] root 0 (*) at {all}",
            "broadcast float64[4] root 1 (*) at {all}",
        ),
    ],
    ids=["both wait", "one has ended"],
)
def test_a_mismatch_names_both_lines(name: str, environ: dict[str, str], first: str, second: str) -> None:
    said = re.sub(r"\(\w+\)", "(*)", error_of(name, environ))
    lines = places(name)
    assert re.search(rf"rank [01] runs {re.escape(first.format(**lines))}, rank 2 runs", said), said
    assert said.endswith(f"rank 2 runs {second.format(**lines)}")
