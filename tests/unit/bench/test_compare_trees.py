"""What `bench.compare_trees` reads and divides."""

from __future__ import annotations

import json

import click
import pytest

from bench.compare_trees import figures_of, ratios


def report(p50_s: float, *, wrong: int = 0, failure: str | None = None) -> str:
    own = {"failure": failure, "wrong": wrong, "p50_s": p50_s}
    cell = {"subject": "p2p", "case": "4 B", "ranks": 2, "mode": "pinned", "candidates": {"asyncdist": own}}
    return json.dumps({"cells": [cell]})


def test_each_pair_is_divided_by_itself() -> None:
    pairs = [(figures_of(report(1.0)), figures_of(report(2.0))), (figures_of(report(10.0)), figures_of(report(5.0)))]
    assert ratios(pairs) == {("p2p: 4 B", 2, "pinned"): [2.0, 0.5]}


def test_a_cell_of_one_side_alone_is_left_out() -> None:
    assert ratios([(figures_of(report(1.0)), {})]) == {}


@pytest.mark.parametrize("bad", [report(1.0, wrong=1), report(1.0, failure="it hung")])
def test_a_figure_of_wrong_results_is_none(bad: str) -> None:
    with pytest.raises(click.ClickException, match="4 B"):
        figures_of(bad)
