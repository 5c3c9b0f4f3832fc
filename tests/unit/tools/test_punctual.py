"""What is late is tried again, what is wrong is not."""

from __future__ import annotations

import pytest
from punctual import TRIES, Late, assert_within, punctual


@pytest.mark.parametrize("late", [0, TRIES - 1, TRIES])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_is_late_is_tried_again(late: int, asynchronous: bool) -> None:
    took_s = iter([2.0] * late + [0.5])

    @punctual
    async def waits() -> None:
        assert_within(1, next(took_s))

    @punctual
    def runs() -> None:
        assert_within(1, next(took_s))

    async def tried() -> None:
        if asynchronous:
            await waits()
        else:
            runs()

    if late == TRIES:
        with pytest.raises(Late, match=r"it took 2\.000 s, and not less than 1 s"):
            await tried()
    else:
        await tried()


def test_what_is_wrong_is_not_tried_again() -> None:
    tries: list[int] = []

    @punctual
    def wrong() -> None:
        tries.append(1)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        wrong()
    assert tries == [1]
