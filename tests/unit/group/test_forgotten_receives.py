"""Receives that nobody has awaited when their group closes."""

from __future__ import annotations

import asyncio
import gc
import warnings

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.group.point_to_point import FORGOTTEN_NAMED
from asyncdist.testing import run_world


def said_by(receives: int, asked: int = 0) -> list[str]:
    """What is said where a rank closes with so many receives, of which it has asked about some."""

    async def main(group: Group) -> None:
        works = [group.recv(np.zeros(1), 1 - group.rank, 7) for _ in range(receives)]
        works.append(group.recv_array())
        waits = [asyncio.ensure_future(work.wait()) for work in works[:asked]]
        await asyncio.sleep(0)
        works.pop().cancel()
        await group.barrier()
        await group.close()
        for wait in waits:
            with pytest.raises(dist.ClosedError):
                await wait

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(2, main)
    return sorted(str(warning.message) for warning in caught if "never awaited" in str(warning.message))


def test_a_receive_that_is_dropped_is_named() -> None:
    said = said_by(1)
    assert len(said) == 2
    assert said[0].startswith(
        "group default, rank 0, close: never awaited, and dropped as the group closes: recv of tag 7 from rank 1; await"
    )


def test_those_that_somebody_waits_for_are_not() -> None:
    assert not said_by(2, asked=2)
    assert all(text.count("recv of tag 7") == 1 for text in said_by(2, asked=1))


@pytest.mark.parametrize("more", [0, 1])
def test_so_many_are_named(more: int) -> None:
    for text in said_by(FORGOTTEN_NAMED + more):
        assert text.count("recv of tag 7") == FORGOTTEN_NAMED
        assert ("and 1 more;" in text) is bool(more)


@pytest.mark.parametrize("debug", [False, True])
def test_where_lines_are_kept_that_of_the_call_is_named(debug: bool) -> None:
    async def main(group: Group) -> None:
        asyncio.get_running_loop().set_debug(debug)
        sub = dist.new_group([0])
        assert isinstance(sub, Group)
        sub.recv(np.zeros(1), 0)
        await sub.close()
        await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(1, main)
        gc.collect()
    (said,) = [str(warning.message) for warning in caught]
    assert ("recv of tag 0 from rank 0, issued at test_forgotten_receives.py:" in said) is debug
    assert ("-X dev" in said) is not debug


def test_the_group_closes_where_warnings_are_errors() -> None:
    problems: list[BaseException] = []

    async def main(group: Group) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context["exception"]))
        group.irecv(np.zeros(1))
        await group.close()
        assert group.closed

    run_world(1, main)
    assert len(problems) == 1
    assert isinstance(problems[0], RuntimeWarning)
    assert "irecv of tag 0 from any rank" in str(problems[0])
