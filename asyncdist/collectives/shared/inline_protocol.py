"""Express operations, as a lane sees them: small collectives whose payloads travel in its records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.collectives.shared.channel import Needs

__all__ = ["Express", "ExpressKind", "Payloads"]


class ExpressKind(Protocol):
    """What operations of one kind have in common."""

    fingerprint: int
    dtype: np.dtype[Any]
    nbytes: int
    """How long the payload of each member is that has one; 0 of `pieces`."""
    gives: bool
    """Whether we have."""
    needed: tuple[int, ...] | None
    """Members whose payload we take; None: all, as they take ours."""
    folds: bool
    """Whether every member first folds a part of all payloads and puts out the result, for the others to take."""
    pieces: bool
    """Whether payloads are pieces of lengths that only two ends know: then a member may put out items instead."""
    needs: Needs
    """Of `pieces`, which items we take then."""


class Payloads(NamedTuple):
    """Payloads of one place in the lane, as arrays over its memory."""

    own: Array
    operands: list[Array]
    """Of the members whose we take, in that order."""


class Express(Protocol):
    """An operation that travels in the records of its lane."""

    number: int
    nbytes: int
    """`kind.nbytes`; of pieces, how long our payload is."""
    payloads: Payloads
    """Set as it begins, but for pieces."""
    folded: bool
    """Whether our result is out."""

    @property
    def kind(self) -> ExpressKind:
        """What it has in common with others."""

    def wakes(self, *, last: bool) -> Iterable[int]:
        """Members that may go on now that we have begun, where not all take from all; `last` if all have begun."""

    def put(self, target: Array) -> None:
        """Put out its payload."""

    def fold(self) -> None:
        """All payloads are there: put out the result of our part, in its place in our payload."""

    def take(self) -> None:
        """All payloads, or results, that it takes are there."""

    def by_items(self) -> None:
        """A member puts out items: go on as `SharedLane.add_begun` has it."""

    def done(self) -> None:
        """Report success. It may issue others."""

    def fail(self, error: BaseException) -> None:
        """The operation cannot go on."""
