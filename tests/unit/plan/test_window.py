"""Windows."""

from __future__ import annotations

import pytest

from asyncdist.plan.chunks import WINDOW, Window, first_that_fits


@pytest.mark.parametrize(("added", "waits_for"), [(WINDOW - 1, None), (WINDOW, 0), (WINDOW + 1, 1)])
def test_a_step_waits_for_the_one_a_window_before(added, waits_for):
    window = Window(WINDOW)
    for step in range(added):
        window.add(step)
    assert window.after == (waits_for,)


def test_a_step_without_elements_takes_no_room():
    window = Window(1)
    window.add(7)
    window.add(None)
    assert window.after == (7,)


@pytest.mark.parametrize(
    ("lengths", "room", "first"),
    [([8, 4, 2, 1], 7, 1), ([8, 4, 2, 1], 6, 2), ([8, 4, 2, 1], 15, 0), ([8, 4], 3, 2), ([], 3, 0), ([0, 0], 0, 0)],
)
def test_the_last_rounds_that_fit(lengths, room, first):
    assert first_that_fits(lengths, room) == first
