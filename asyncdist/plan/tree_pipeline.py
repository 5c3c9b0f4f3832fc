"""TreePipeline: what one rank does in one tree, chunk by chunk, whatever the tree and whatever else runs beside it."""

from __future__ import annotations

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Slice
from asyncdist.plan.trees import Node
from asyncdist.plan.window import WINDOW, Window

__all__ = ["TreePipeline"]


class TreePipeline:
    """Adds steps for one chunk a call; all ranks call the same methods in the same order.

    What comes from children is received into a window of chunks of SCRATCH for each, `longest` elements a chunk at
    most, whose receives are ready as soon as there is room; what comes to its place in OUTPUT goes through a window
    too. Operands are merged in the tree's order.
    """

    def __init__(self, builder: PlanBuilder, node: Node, longest: int) -> None:
        self._builder = builder
        self._node = node
        self._longest = longest
        self._whole = Window()
        self._incoming: dict[int, list[Slice]] = {child: [] for child in node.children}
        self._reduced = 0

    def pass_down(self, piece: Slice) -> None:
        """Receive `piece` from the parent, if there is one, and send it to the children."""
        builder, node = self._builder, self._node
        if not node.is_root:
            self._whole.add(builder.recv(node.parent, piece, after=self._whole.after))
        for child in node.children:
            builder.send(child, piece)

    def reduce_in_place(self, piece: Slice) -> None:
        """Reduce what the children send into `piece`, and send it to the parent."""
        builder, node = self._builder, self._node
        incoming = {child: self._receive(child, piece.length) for child in node.children}
        for child in node.nearest_first:
            builder.reduce(incoming[child], piece, source_left=child in node.lower)
        if not node.is_root:
            builder.send(node.parent, piece)
        self._reduced += 1

    def reduce_from(self, piece: Slice, result: Slice) -> None:
        """Reduce `piece`, which is only read, with what the children send: into `result` at the root, else passed on.

        `result` is not touched where there is a parent.
        """
        builder, node = self._builder, self._node
        if not node.children:
            if node.is_root:
                builder.copy(piece, result)
            else:
                builder.send(node.parent, piece)
            return
        first, *others = node.nearest_first
        if node.is_root:
            total = result
            self._whole.add(builder.recv(first, total, after=self._whole.after))
        else:
            total = self._receive(first, piece.length)
        incoming = [self._receive(child, piece.length) for child in others]
        builder.reduce(piece, total, source_left=first not in node.lower)
        for child, operand in zip(others, incoming, strict=True):
            builder.reduce(operand, total, source_left=child in node.lower)
        if not node.is_root:
            builder.send(node.parent, total)
        self._reduced += 1

    def _receive(self, child: int, length: int) -> Slice:
        window = self._incoming[child]
        if len(window) < WINDOW:
            window.append(self._builder.scratch(self._longest))
        room = window[self._reduced % WINDOW]
        target = Slice(room.buffer, room.offset, length)
        self._builder.recv(child, target)
        return target
