"""How an operation's error says what ended it, in as few words as that takes."""

from __future__ import annotations

import pytest

from asyncdist.errors import (
    ClosedError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    RemoteProtocolError,
)
from asyncdist.group.abort_reasons import aborted_by, explain, first_cause


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("rank 0 lost rank 1: reset", 1),
        CollectiveTimeoutError("timed out", [1]),
        GroupAbortedError("aborted", "aborted", 1),
        ClosedError("closed"),
        RemoteProtocolError("no object"),
        DistBackendError("cudaErrorLaunchFailure"),
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


def test_an_exception_of_pythons_is_named_with_its_type() -> None:
    assert str(explain("here", KeyError("x"))) == "here: KeyError: 'x'"
    assert str(explain("here", MemoryError())) == "here: MemoryError"


def test_the_operation_is_named_once() -> None:
    error = CollectiveTimeoutError("all_reduce #1 timed out on rank 0", [1])
    where = "group default, rank 2, "
    assert str(explain(f"{where}all_reduce #1", error)) == f"{where}all_reduce #1: timed out on rank 0"
    assert str(explain(f"{where}all_reduce #11", error)) == f"{where}all_reduce #11: {error}"
    assert str(explain(f"{where}barrier #1", error)) == f"{where}barrier #1: {error}"


def test_a_rank_that_aborts_is_named_once() -> None:
    assert str(aborted_by(1, "enough")) == "rank 1 aborted the group: enough"
    assert str(aborted_by(1, "rank 1 left with KeyError: 'x'")) == "rank 1 left with KeyError: 'x'"
    assert str(aborted_by(1, "rank 12 is ill")) == "rank 1 aborted the group: rank 12 is ill"


def test_the_first_cause_of_a_group_is_no_consequence() -> None:
    lost, own = PeerLostError("lost", 1), KeyError("mine")
    assert first_cause(own) is own
    assert first_cause(ExceptionGroup("two", [lost, ExceptionGroup("inner", [own])])) is own
    assert first_cause(BaseExceptionGroup("one", [lost])) is lost
