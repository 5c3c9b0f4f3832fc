"""Why a group is aborted: as a kind that travels between ranks, and as the error that each rank raises.

| kind | cause |
| --- | --- |
| `abort` | a rank called `abort`, or left with an exception: point-to-point ends too |
| `failed` | a rank could not go on, for want of memory perhaps |
| `lost`, `left` | a rank is gone, without or with a goodbye |
| `timeout` | an operation's deadline passed |
| `mismatch` | two ranks asked for different things: `rank`, and as `missing` the rank that found it |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    RemoteProtocolError,
)

FAILED: Final = "failed"
SHRUNK: Final = "its ranks were asked who survives: shrink() was called"
"""Why a rank aborts a group that goes on without those that are lost."""

CONSEQUENCES: Final = (PeerLostError, GroupAbortedError, CollectiveTimeoutError)
"""Errors of a rank whose causes all members of the group hear of by themselves."""


def abort_cause(kind: str, text: str, rank: int | None, missing: Sequence[int], own: int) -> DistError:
    """Return the error to raise on rank `own` for an abort that another rank tells of.

    Of a mismatch `rank` and `missing` are the ranks that differ; the error names one that is not this rank.
    """
    if kind in ("lost", "left") and rank is not None:
        return PeerLostError(text, rank, left=kind == "left")
    if kind == "timeout":
        return CollectiveTimeoutError(text, missing)
    if kind == "mismatch":
        return CollectiveMismatchError(text, next((side for side in (rank, *missing) if side not in (None, own)), None))
    if kind == "abort" and rank is not None:
        return aborted_by(rank, text)
    return GroupAbortedError(text, text, rank)


def aborted_by(rank: int, reason: str) -> GroupAbortedError:
    """Return what all members raise when `rank` calls `abort(reason)`."""
    said = reason.startswith(f"rank {rank} ")  # then the rank need not be named twice
    return GroupAbortedError(reason if said else f"rank {rank} aborted the group: {reason}", reason, rank)


def failed_on(rank: int, operation: str, error: BaseException) -> GroupAbortedError:
    """Return what all members raise when `rank` cannot carry out `operation` (`all_reduce #1`)."""
    text = f"rank {rank} failed in {operation}: {named(error)}"
    failed = GroupAbortedError(text, text, rank)
    failed.__cause__ = error
    return failed


def named(error: BaseException) -> str:
    """`KeyError: 'x'`: an exception's text often means little without its type."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def kind_of(error: BaseException) -> str:
    """Return the kind of abort that an operation's failure, if it is no mismatch, makes of its group.

    Empty where no other rank depends on it: the world is closed, and so the group; or a result cannot be used here.
    """
    if isinstance(error, PeerLostError):
        return "left" if error.left else "lost"
    return "" if isinstance(error, ClosedError | RemoteProtocolError) else FAILED


def explain(where: str, error: BaseException) -> DistError:
    """Return the same error, which says as well which operation it ended; its cause is the cause of `error`.

    An operation that `where` ends with and the error begins with is named once.
    """
    operation = where.rpartition(", ")[2]
    text = f"{where}: {str(error).removeprefix(operation + ' ')}"
    if isinstance(error, PeerLostError):
        explained: DistError = PeerLostError(text, error.rank, error.left)
    elif isinstance(error, CollectiveTimeoutError):
        explained = CollectiveTimeoutError(text, error.missing)
    elif isinstance(error, CollectiveMismatchError):
        explained = CollectiveMismatchError(text, error.peer)
    elif isinstance(error, GroupAbortedError):
        explained = GroupAbortedError(text, error.reason, error.rank)
    elif isinstance(error, ClosedError | RemoteProtocolError | DistBackendError | DistStoreError):
        explained = type(error)(text)
    else:
        explained = DistError(text if isinstance(error, DistError) else f"{where}: {named(error)}")
    explained.__cause__ = error.__cause__ if type(explained) is type(error) else error
    return explained


def first_cause(error: BaseException) -> BaseException:
    """Return the first exception of a group, as a TaskGroup raises, that is no consequence of an aborted group.

    Where all are consequences, the first of all. Any other exception is returned itself.
    """
    leaves = _leaves(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, CONSEQUENCES)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
