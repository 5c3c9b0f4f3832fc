"""TreePipeline: what one rank does in one tree, chunk by chunk, whatever the tree and whatever else runs beside it."""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.trees import Node
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Slice
from asyncdist.plan.window import Window

__all__ = ["SENDS_UP", "TreePipeline"]

SENDS_UP: Final = 3
"""Chunks on their way to a parent at a time, in each of a pair of trees. Every rank is a leaf in one, where all of its
chunks are ready at once: given to the network together, they stand before those of the other tree, which others wait
for. Two already lose up to 4 % where a chunk takes less time than its message's latency; four gain a little less."""


class TreePipeline:
    """Adds steps for one chunk a call; all ranks call the same methods in the same order.

    What comes from children is received into a window of chunks of SCRATCH for each, `longest` elements a chunk at
    most, whose receives are ready as soon as there is room; what comes to its place in OUTPUT goes through a window
    too. Operands are merged in the tree's order. `paired` if the rank has chunks of another tree to send.
    """

    def __init__(self, builder: PlanBuilder, node: Node, longest: int, *, paired: bool = False) -> None:
        self._builder = builder
        self._node = node
        self._longest = longest
        self._whole = builder.window()
        self._upward = Window(SENDS_UP) if paired else None
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
            self._send_up(piece)
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
                self._send_up(piece)
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
            self._send_up(total)
        self._reduced += 1

    def _send_up(self, piece: Slice) -> None:
        builder, window = self._builder, self._upward
        if window is None:
            builder.send(self._node.parent, piece)
        else:
            window.add(builder.send(self._node.parent, piece, after=window.after))

    def _receive(self, child: int, length: int) -> Slice:
        window = self._incoming[child]
        if len(window) < self._builder.window_size:
            window.append(self._builder.scratch(self._longest))
        room = window[self._reduced % self._builder.window_size]
        target = Slice(room.buffer, room.offset, length)
        self._builder.recv(child, target)
        return target
