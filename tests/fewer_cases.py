"""Which cases of a test `make test` runs; `make sim` runs all, as pytest itself does.

Of three parameters or more, those with every pair of values of any two: what goes wrong does so for a value, or for two
together, and a third hardly ever has to be just right, too. So of loops, transports and sizes every loop is run with
every transport, every transport with every size and every size with every loop, in fewer cases than the product has.

A unit test with one parameter runs each value on one of the event loops, by turns, and so do the tests of a file that
have none: units do no input and output, which is what loops differ in, and fake GPUs neither; daemons and launchers do
it on a loop of their own. Of a range of seeds, the
first third: seeds are as good as one another. Of random examples of a property, `examples`.

Cases marked `bench` or `thorough` are left to `make test-rest`, which runs nothing else; `.ci/run` runs both.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

__all__ = ["REST", "SEEDS", "VARIABLE", "covering", "examples", "left_out"]

VARIABLE: Final = "ASYNCDIST_FEWER_CASES"
"""Of the environment: set, and not to nothing, where fewer are enough; to REST for those that were put off."""

REST: Final = "rest"

PUT_OFF: Final = ("bench", "thorough")
"""Markers of cases that `make test` leaves to `make test-rest`."""

LOOP: Final = "_asyncio_loop_factory"
"""The parameter with which pytest-asyncio runs a test on each event loop."""

LOOPS: Final = (LOOP, "loop", "loop_factory")
"""The parameters that say on which event loop a test runs."""

NO_INPUT: Final = {"unit", "gpu_fake", "server", "launch"}
"""Folders of tests that do no input and output, or leave it to other processes."""

INPUT: Final = {"transport", "store"}
"""Folders among these whose tests do."""

SEEDS: Final = 1 / 3
"""Of those that a test has, rounded up."""


def examples(number: int) -> int:
    """Return how many random examples of a property are tried: `number`, or ASYNCDIST_EXAMPLES times as many."""
    return number * int(os.environ.get("ASYNCDIST_EXAMPLES", "1"))


def covering(rows: Sequence[Sequence[Hashable]]) -> set[int]:
    """Return the numbers of rows that have every pair of values of two columns between them that any row has."""
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return chosen


def left_out(items: Iterable[Any], rest: bool = False) -> list[Any]:
    """Return those of pytest's `items` that need not be run beside the others: of the rest, or of all but the rest."""
    gone = []
    tests: dict[tuple[Hashable, Hashable], list[Any]] = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(name) for name in PUT_OFF) != rest:
            gone.append(item)
        elif hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    turns: Counter[Hashable] = Counter()
    for (parent, _), cases in tests.items():
        gone += _left_out(cases, turns[parent])
        turns[parent] += 1
    return gone


def _left_out(cases: Sequence[Any], turn: int) -> list[Any]:
    kept = list(cases)
    for mark in cases[0].iter_markers("parametrize"):
        name, values = mark.args
        if name == "seed" and isinstance(values, range):  # others were picked by somebody
            first = values[: math.ceil(len(values) * SEEDS)]
            kept = [case for case in kept if case.callspec.params[name] in first]
    rows = [_values(case) for case in kept]
    if len(rows[0]) > 2:
        chosen = covering(rows)
        kept = [case for number, case in enumerate(kept) if number in chosen]
    elif NO_INPUT & (folders := {*kept[0].nodeid.split("/")}) and (len(rows[0]) == 2 or not INPUT & folders):
        for name in (name for name in LOOPS if name in kept[0].callspec.params):
            kept = _by_turns(kept, name, turn)
    gone = {id(case) for case in cases} - {id(case) for case in kept}
    return [case for case in cases if id(case) in gone]


def _by_turns(cases: Sequence[Any], loop: str, turn: int) -> list[Any]:
    """Keep every value on one loop: on the one and the other by turns."""
    loops = list(dict.fromkeys(id(case.callspec.params[loop]) for case in cases))
    others: dict[Hashable, list[Any]] = defaultdict(list)
    for case in cases:
        values = {name: id(value) for name, value in case.callspec.params.items() if name != loop}
        others[tuple(sorted(values.items()))].append(case)
    kept = []
    for number, same in enumerate(others.values(), turn):
        wanted = loops[number % len(loops)]
        kept += [case for case in same if id(case.callspec.params[loop]) == wanted] or same
    return kept


def _values(case: Any) -> list[tuple[int, ...]]:
    """Say which values a case has. Those that one decorator lists together are one: who wrote it means every line."""
    single = dict(case.callspec.params)
    values = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        values.append(tuple(id(single.pop(name)) for name in names))  # the same object in every case
    return values + [(id(value),) for value in single.values()]
