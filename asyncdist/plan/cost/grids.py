"""What rings on a grid of ranks ask: all_reduce, reduce_scatter, all_gather."""

from __future__ import annotations

from asyncdist.plan.algorithms.ring_2d import row_length
from asyncdist.plan.cost.load import AT_HOME, Hop, Load, Shape, Way, Work, alike, cold
from asyncdist.plan.problem import Problem

__all__ = ["grid_all_gather", "grid_all_reduce", "grid_reduce_scatter"]


def grid_all_reduce(shape: Shape) -> Load:
    """Along the rows and the columns, and back."""
    return _grid(shape, phases=2, reductions=1)


def grid_reduce_scatter(shape: Shape) -> Load:
    """Along the rows, then the columns."""
    return _grid(shape, phases=1, reductions=1)


def grid_all_gather(shape: Shape) -> Load:
    """Along the columns, then the rows."""
    return _grid(shape, phases=1, reductions=0)


def _grid(shape: Shape, *, phases: int, reductions: int) -> Load:
    world, block = shape.world, shape.block
    width = row_length(Problem("all_reduce", world, (0,), 0, shape.ranks_per_host))
    height = world // width
    pieces = shape.pieces(block)
    # all_reduce cuts what travels in a row as one, the others, whose blocks are the caller's, block by block.
    row_pieces = shape.pieces(height * block) if phases == 2 else height * pieces
    chunk = block / pieces
    row_steps, column_steps = width - 1, height - 1
    row_blocks, column_blocks = shape.full(row_steps * height), shape.full(column_steps)
    rows, columns = _ways(shape, width)
    worked = cold(chunk, chunk) * reductions
    # Columns begin when rows are all but done: what one has on the wire hides nothing of the other's.
    path = (
        Hop(phases * row_steps, phases * row_blocks * block, row_steps * worked, rows),
        Hop(phases * column_steps, phases * column_blocks * block, column_steps * worked, columns),
    )
    row_idle = row_steps if row_pieces == 1 else min(1, row_steps)
    column_idle = column_steps if pieces == 1 else min(1, column_steps)
    idle = (Hop(phases * row_idle, 0, 0, rows), Hop(phases * column_idle, 0, 0, columns))
    once = shape.full(world - 1) * block
    moved = phases * once
    messages = 2 * phases * (row_blocks / height * row_pieces + column_blocks * pieces)
    work = Work(messages, moved, moved, cold(once, chunk) * reductions)
    load = alike(shape, path, idle, work, AT_HOME)
    leaving = phases * block * (rows.leaving * row_blocks + columns.leaving * column_blocks)
    partial = phases == 1 and reductions  # reduce_scatter, which only reads its input
    return load._replace(card=leaving, scratch=2 * height * block if partial else 0.0)


def _ways(shape: Shape, width: int) -> tuple[Way, Way]:
    """How messages go within a row, and within a column."""
    if shape.one_host:
        return AT_HOME, AT_HOME
    inside = shape.ranks_per_host % width == 0
    columns = min(width, shape.ranks_per_host)
    return AT_HOME if inside else shape.neighbors(), Way(1.0, columns, columns)
