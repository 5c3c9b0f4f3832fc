"""PiecesOperation: an uneven all_to_all, gather or scatter whose pieces travel in the records of a lane, being short.

Only its two ends know how long a piece is, so which way it goes is nothing to agree on: each rank decides for what it
gives. If all of that is short it is the rank's payload, behind a table of bounds; else its pieces are items. Who takes
looks which it is. Where all is in payloads, it takes that in one go; else it goes on with the steps of its plan, as who
is to take a piece too long for a payload does from the start. Steps find pieces either way (`Lane.piece`).

Who gives what to whom, as which item, is read off the plan (`plan.algorithms.shared_pieces`), which is proven.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.host.operation import Operation, Recipe
from asyncdist.collectives.shared.inline import ExpressKind, ExpressOperation, no_kernel
from asyncdist.collectives.shared.operation import another_length
from asyncdist.collectives.shared.runner import SharedLane
from asyncdist.plan.problem import PRIVATE_COLLECTIVES
from asyncdist.plan.records import LaneMemory, pieces_bytes
from asyncdist.plan.steps import Copy, Fetch, Plan, Publish

if TYPE_CHECKING:
    from asyncdist.collectives.host.backend import AioBackend

__all__ = ["PiecesKind", "PiecesOperation", "pieces_of"]

NO_TABLE: Final = struct.Struct("")

ALIGNMENT: Final = 16
"""Pieces begin where this suits every dtype; all of a payload are of one."""


@dataclass(slots=True, eq=False)
class PiecesKind(ExpressKind):
    """What all calls with one recipe share. Arrays are named by their place in `Call.pieces`."""

    giving: tuple[int, ...] = ()
    """What goes to others, in the order of its items."""
    taking: tuple[tuple[int, int, int], ...] = ()
    """Member and item, and where it goes."""
    own: tuple[tuple[int, int], ...] = ()
    """What stays here, and where it goes."""
    table: struct.Struct = NO_TABLE
    """Of bounds, with which the payload begins."""
    most_bytes: int = 0
    """The longest payload."""

    def bounds(self, call: Call) -> list[int] | None:
        """Where each piece that we give begins in our payload, and the last one ends; None if there are to be steps."""
        assert call.pieces is not None
        given, taken = call.pieces
        end = -(-self.table.size // ALIGNMENT) * ALIGNMENT
        bounds = [end]
        for index in self.giving:
            end += given[index].nbytes
            bounds.append(end)
        if end > self.most_bytes or any(taken[index].nbytes > self.most_bytes for _, _, index in self.taking):
            return None
        return bounds


def pieces_of(call: Call, program: Program, memory: LaneMemory, fingerprint: int) -> PiecesKind | None:
    """How calls like this one are carried out in records, if their pieces are short."""
    plan: Plan = program.plan
    if plan.collective not in PRIVATE_COLLECTIVES or plan.algorithm != "shared":
        return None
    published = [step for step in plan.steps if isinstance(step, Publish)]
    fetched = [step for step in plan.steps if isinstance(step, Fetch)]
    givers = tuple(step.peer for step in fetched)
    return PiecesKind(
        fingerprint,
        call.dtype,
        0,
        plan.rank,
        None,
        no_kernel,
        gives=bool(published),
        needed=None if published and fetched else givers,
        readers=tuple(step.reader for step in published),
        pieces=True,
        needs=program.needs,
        giving=tuple(step.source.offset for step in published),
        taking=tuple((step.peer, step.item, step.target.offset) for step in fetched),
        own=tuple((step.source.offset, step.target.offset) for step in plan.steps if isinstance(step, Copy)),
        table=struct.Struct(f"<{len(published) + 1}I"),
        most_bytes=pieces_bytes(plan.world, memory),
    )


class PiecesOperation(ExpressOperation):
    """One call under way; see the module, and ExpressOperation."""

    __slots__ = ("_bounds", "_recipe")

    _bounds: list[int]
    _recipe: Recipe
    kind: PiecesKind

    @classmethod
    def of(
        cls,
        backend: AioBackend,
        lane: SharedLane,
        recipe: Recipe,
        kind: PiecesKind,
        call: Call,
        work: CollectiveWork,
        on_end: Callable[[CollectiveWork, BaseException | None], None],
    ) -> PiecesOperation | None:
        """The operation; None if there are to be steps from the start."""
        bounds = kind.bounds(call)
        if bounds is None:
            return None
        operation = cls(backend, lane, kind, call, work, on_end)
        operation._recipe = recipe
        operation._bounds = bounds
        operation.nbytes = bounds[-1] if kind.gives else 0
        return operation

    def put(self, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Put out what this rank gives."""
        kind, pieces, bounds = self.kind, self._call.pieces, self._bounds
        assert pieces is not None
        kind.table.pack_into(target.data, 0, *bounds)
        for index, (begin, end) in zip(kind.giving, pairwise(bounds), strict=True):
            target[begin:end] = pieces[0][index].view(np.uint8)

    def take(self) -> None:
        """All that this rank takes is in payloads. Raises LaneFault, CollectiveMismatchError."""
        kind, call, lane = self.kind, self._call, self._lane
        assert call.pieces is not None
        given, taken = call.pieces
        for source, index in kind.own:  # before what it may share memory with is written
            taken[index][...] = given[source]
        for member, item, index in kind.taking:
            piece, target = lane.core.piece(self.number, member, item), taken[index]
            if len(piece) != target.nbytes:
                raise another_length(self._backend.ranks[member], len(piece), target.nbytes)
            if piece:
                target[...] = np.frombuffer(piece, target.dtype)
                lane.moved += len(piece)
        for flat in call.outputs:
            if flat.is_copy:
                flat.write_back()

    def by_items(self) -> None:
        """A member puts out items: go on with the steps of the plan."""
        backend, recipe = self._backend, self._recipe
        operation = Operation(backend, self._call, recipe, self._work, self._on_end)
        backend.running[self._work.key] = operation
        operation.share(self._lane.add_begun(self, recipe.program, operation))
        operation.begin()
