"""How an operation's error says what ended it, in as few words as that takes."""

from __future__ import annotations

import pytest

from asyncdist.causes import explain, first_cause
from asyncdist.errors import (
    ClosedError,
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    RemoteProtocolError,
)


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("rank 0 lost rank 1: reset", 1),
        CollectiveTimeoutError("timed out", [1]),
        GroupAbortedError("aborted", "aborted", 1),
        ClosedError("closed"),
        RemoteProtocolError("no object"),
    ],
)
def test_an_error_of_the_same_kind_is_not_shown_twice(error: DistError) -> None:
    error.__cause__ = reset = ConnectionResetError("reset")
    explained = explain("group default, rank 0, all_reduce #1", error)
    assert type(explained) is type(error)
    assert str(explained) == f"group default, rank 0, all_reduce #1: {error}"
    assert explained.__cause__ is reset
    assert getattr(explained, "rank", None) == getattr(error, "rank", None)


def test_an_error_of_another_kind_is_the_cause() -> None:
    error = MemoryError("no room")
    explained = explain("here", error)
    assert type(explained) is DistError
    assert explained.__cause__ is error


def test_the_first_cause_of_a_group_is_no_consequence() -> None:
    lost, own = PeerLostError("lost", 1), KeyError("mine")
    assert first_cause(own) is own
    assert first_cause(ExceptionGroup("two", [lost, ExceptionGroup("inner", [own])])) is own
    assert first_cause(BaseExceptionGroup("one", [lost])) is lost
