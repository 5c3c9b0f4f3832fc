"""Two-dimensional ring: rings along the rows of a grid of ranks, and along its columns; rows are within hosts.

With rows of q ranks and columns of c, p = qc, a vector of m bytes, latency a and b seconds per byte:

| collective | what happens | rounds | bytes sent per rank | of them between hosts |
| --- | --- | --- | --- | --- |
| all_reduce | reduce_scatter in rows, all_reduce in columns, all_gather in rows | 2(q+c-2) | 2m(p-1)/p | 2m(c-1)/p |
| reduce_scatter | in rows, then in columns | q+c-2 | m(p-1)/p | m(c-1)/p |
| all_gather | in columns, then in rows | q+c-2 | m(p-1)/p | m(c-1)/p |

Cost: rounds times a, bytes times b. That is as many bytes as one ring in far fewer rounds; and each host takes in what
it lacks once. Where a host has q ranks, its q columns share its link.

A row is the largest number of ranks that divides the world and a host's ranks alike. Where that is one, or the whole
world, hosts do not tell, and the grid is as near to a square as the world has divisors. A prime world has one column:
the plain ring.

Where hosts differ, in size or as ranks are no runs of them, the rows of all_reduce are the hosts' ranks whatever their
length, and there are as many columns as the smallest host has ranks. So many ranks of each host get a part of the
vector; the others add theirs to every part that passes them, and pass the results on.

Chunks travel one behind another, through the phases as well: the column begins with the second chunk that is reduced
in the row. Operations must commute; each element is reduced along
one path, so results are bit-identical. Temporary memory: a window of chunks; reduce_scatter, which only reads INPUT,
holds up to two columns of partial sums, 2m/q.

Source: the two-dimensional torus all-reduce of Mikami, Suganuma et al., "Massively distributed SGD: ImageNet/ResNet-50
training in a flash", 2018 (arXiv); the rings are those of `ring`.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise, zip_longest
from math import gcd, isqrt
from typing import Final, NamedTuple

from asyncdist.plan.algorithms import ring
from asyncdist.plan.algorithms.algorithm import Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, blocks_of, cut_blocks, offsets, partition, split
from asyncdist.plan.cost.load import AT_HOME, NO_WORK, Hop, Load, Shape, Way, Work, alike, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["row_length"]

SETS: Final = 2
"""Columns of partial sums in reduce_scatter: one is received while the one before is sent."""

ROW_CHUNKS: Final = 4
"""Chunks of a piece that travels within a host, of an all_reduce between hosts: fewer messages, long enough to be read
where they lie. A network takes longer for a chunk than a host for such a piece."""


class _Grid:
    """Where a rank stands, and who its neighbors are. Rows are runs of ranks, or hosts."""

    def __init__(self, problem: Problem, rank: int) -> None:
        by_host = problem.collective == "all_reduce" and bool(problem.hosts)
        width = row_length(problem)
        self._rows = problem.by_host if by_host else [range(row, row + width) for row in range(0, problem.world, width)]
        self.row, self.column = row, column = problem.place(rank) if by_host else divmod(rank, width)
        self.width = min(map(len, self._rows))
        self.height = len(self._rows)
        self.length = len(self._rows[row])
        """Of the rank's own row."""
        self.left, self.right = self.at(row, column - 1), self.at(row, column + 1)
        self.above, self.below = self.at(row - 1, column), self.at(row + 1, column)

    def at(self, row: int, column: int) -> int:
        """The rank at a place; both coordinates wrap around."""
        ranks = self._rows[row % self.height]
        return ranks[column % len(ranks)]


def row_length(problem: Problem) -> int:
    """Ranks in a row of the grid; 1 if the world is prime."""
    world = problem.world
    shared = gcd(world, problem.ranks_per_host)
    if shared not in (1, world):
        return shared
    return next(divisor for divisor in range(isqrt(world), 0, -1) if world % divisor == 0)


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The vector is one part per column, each of one block per row; a part is reduced in the rows first.

    Rows longer than there are columns have parts without elements besides.
    """
    rank = builder.rank
    grid = _Grid(problem, rank)
    if grid.height == problem.world:
        return ring.all_reduce(builder, problem, chunk_length)
    starts = offsets(partition(problem.total, grid.width * grid.height))
    together = _row_chunks(problem)
    vector = _Parts(starts, grid.height, grid.length, chunk_length, together)
    row, column = grid.row, grid.column
    pieces = max(2, builder.window_size // together)
    operands = Window(pieces)
    for step in range(grid.length - 1):
        builder.send_all(grid.right, vector.part(column - step, row))
        builder.recv_reduce_all(grid.left, vector.part(column - step - 1, row), operands, incoming_left=True)
    part = (column + 1) % grid.length
    above, below = grid.at(row - 1, part - 1), grid.at(row + 1, part - 1)
    operands = builder.window()
    for step in range(grid.height - 1):
        builder.send_all(below, vector.block(part, row - step))
        builder.recv_reduce_all(above, vector.block(part, row - step - 1), operands, incoming_left=True)
    results = builder.window()
    for step in range(grid.height - 1):
        builder.send_all(below, vector.block(part, row + 1 - step))
        builder.recv_all(above, vector.block(part, row - step), results)
    results = Window(pieces)
    for step in range(grid.length - 1):
        builder.send_all(grid.right, vector.part(part - step, row + 1, results=True))
        builder.recv_all(grid.left, vector.part(part - step - 1, row + 1, results=True), results)
    return builder.build()


def _row_chunks(of: Problem | Shape) -> int:
    """Chunks of a piece that travels in a row of all_reduce."""
    width = row_length(Problem("all_reduce", of.world, (0,), 0, 1 if of.hosts else of.ranks_per_host))
    inside = bool(of.hosts) or (of.world > of.ranks_per_host and of.ranks_per_host % width == 0)
    return ROW_CHUNKS if inside else 1


class _Parts(NamedTuple):
    """A vector of one part per column, each of `height` blocks that start at `starts`."""

    starts: tuple[int, ...]
    height: int
    length: int
    """Parts by which numbers wrap around; those behind the last column have no elements."""
    chunk_length: int
    together: int
    """Chunks of a piece, which is what travels in rows."""

    def block(self, part: int, row: int) -> list[Slice]:
        """Chunks of one block; both numbers wrap around. Halves come first and last where rows have longer pieces."""
        number = part % self.length * self.height + row % self.height
        if number + 1 >= len(self.starts):
            return []
        chunks = cut_blocks(self.starts, number, 1, self.chunk_length)
        if self.together == 1 or len(chunks) < 3:
            return chunks
        return [*_halves(chunks[0]), *chunks[1:-1], *_halves(chunks[-1])]

    def part(self, part: int, row: int, *, results: bool = False) -> list[Slice]:
        """Pieces of a part: those of the block of `row` and of that before it in turn, then those before, in order.

        The column begins with these two: with the one it sends first, and with the one it receives into first. Their
        pieces grow, and those of the last block of `results` shrink: the columns' links are idle before and after.
        """
        first = part % self.length * self.height
        if first + 1 >= len(self.starts):
            return []
        if self.starts[first + self.height] - self.starts[first] < self.height * self.chunk_length:
            return cut_blocks(self.starts, first, self.height, self.together * self.chunk_length)
        blocks = [self.block(part, row - step) for step in range(self.height)]
        if results:
            pieces = [*map(self._pieces, blocks[:-1]), self._pieces(blocks[-1][::-1], growing=True)[::-1]]
        else:
            pieces = [*(self._pieces(block, growing=True) for block in blocks[:2]), *map(self._pieces, blocks[2:])]
        first_two = [piece for pair in zip_longest(*pieces[:2]) for piece in pair if piece is not None]
        return [*first_two, *chain.from_iterable(pieces[2:])]

    def _pieces(self, chunks: list[Slice], *, growing: bool = False) -> list[Slice]:
        """Pieces of a block; `growing`: of one chunk, two, and so on."""
        begins, size = [0], 1 if growing else self.together
        while begins[-1] + size < len(chunks):
            begins.append(begins[-1] + size)
            size = min(2 * size, self.together)
        return [_joined(chunks[begin:end]) for begin, end in pairwise([*begins, len(chunks)])]


def _halves(chunk: Slice) -> tuple[Slice, ...]:
    return split(chunk, -(-chunk.length // 2))


def _joined(chunks: list[Slice]) -> Slice:
    """Chunks that follow each other, in either order, as one."""
    return chunks[0]._replace(offset=min(chunks[0].offset, chunks[-1].offset), length=sum(one.length for one in chunks))


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Each column gathers its blocks, then rows pass whole columns around."""
    rank = builder.rank
    grid = _Grid(problem, rank)
    if grid.width == 1:
        return ring.all_gather(builder, problem, chunk_length)
    own = split(Slice(Buffer.INPUT, 0, problem.counts[rank]), chunk_length)
    blocks = [split(block, chunk_length) for block in blocks_of(Buffer.OUTPUT, problem.counts)]

    def have(owner: int) -> tuple[Slice, ...]:  # the own block is sent from INPUT, so that nothing waits for its copy
        return own if owner == rank else blocks[owner]

    row, column = grid.row, grid.column
    window = builder.window()
    for step in range(grid.height - 1):
        builder.send_all(grid.below, have(grid.at(row - step, column)))
        builder.recv_all(grid.above, blocks[grid.at(row - step - 1, column)], window)
    window = builder.window()
    for step in range(grid.width - 1):
        for back in range(grid.height):
            builder.send_all(grid.right, have(grid.at(row - back, column - step)))
        for back in range(grid.height):
            builder.recv_all(grid.left, blocks[grid.at(row - back, column - step - 1)], window)
    for source, target in zip(own, blocks[rank], strict=True):
        builder.copy(source, target)
    return builder.build(block_aligned=True)


def reduce_scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Rows reduce the blocks of one column each, then columns reduce those to one block per rank."""
    rank = builder.rank
    grid = _Grid(problem, rank)
    if grid.width == 1:
        return ring.reduce_scatter(builder, problem, chunk_length)
    held = _reduce_rows(builder, grid, problem, chunk_length)
    window = builder.window()
    for back in range(1, grid.height):
        builder.send_all(grid.below, held[back - 1])
        if back < grid.height - 1:
            builder.recv_reduce_all(grid.above, held[back], window, incoming_left=True)
    results = split(Slice(Buffer.OUTPUT, 0, problem.counts[rank]), chunk_length)
    for piece, result in zip(held[-1], results, strict=True):
        window.add(builder.recv(grid.above, result, after=window.after))
        builder.reduce(piece, result, source_left=False)
    return builder.build(block_aligned=True)


def _reduce_rows(builder: PlanBuilder, grid: _Grid, problem: Problem, chunk_length: int) -> list[list[Slice]]:
    """The rows' part of reduce_scatter: returns the chunks of this column's row sums, the block of the row before this
    one first, the own one last, in the order in which the column reduces them."""
    counts, vector = problem.counts, blocks_of(Buffer.INPUT, problem.counts)
    columns = [sum(counts[column :: grid.width]) for column in range(grid.width)]
    partial = [builder.scratch(max(columns)) for _ in range(min(SETS, grid.width - 1))]

    def blocks(column: int) -> list[tuple[Slice, ...]]:
        owners = [grid.at(grid.row - 1 - back, column) for back in range(grid.height)]
        return [split(vector[owner], chunk_length) for owner in owners]

    outgoing = [list(block) for block in blocks(grid.column - 1)]
    window = builder.window()
    for step in range(grid.width - 1):
        for block in outgoing:
            builder.send_all(grid.right, block)
        offset = partial[step % SETS].offset
        outgoing = []
        for operands in blocks(grid.column - 2 - step):
            outgoing.append([])
            for piece in operands:
                target = Slice(Buffer.SCRATCH, offset, piece.length)
                window.add(builder.recv(grid.left, target, after=window.after))
                builder.reduce(piece, target, source_left=False)
                outgoing[-1].append(target)
                offset += piece.length
    return outgoing


def _grid_cost(shape: Shape, *, phases: int, reductions: int) -> Load:
    world, block = shape.world, shape.block
    width = length = row_length(Problem("all_reduce", world, (0,), 0, 1 if shape.hosts else shape.ranks_per_host))
    height = world // width
    rows, columns = _ways(shape, width)
    by_host = phases == 2 and bool(shape.hosts)
    if by_host:
        width, length, height = min(shape.host_sizes), max(shape.host_sizes), len(shape.host_sizes)
        block, rows, columns = shape.total / (width * height), AT_HOME, Way(1.0, width, width)
    pieces = shape.pieces(block)
    # all_reduce cuts what travels in a row as one, the others, whose blocks are the caller's, block by block.
    row_pieces = -(-shape.pieces(height * block) // _row_chunks(shape)) if phases == 2 else height * pieces
    chunk = block / pieces
    row_steps, column_steps = length - 1, height - 1
    row_blocks, column_blocks = shape.full(min(width, row_steps) * height), shape.full(column_steps)
    worked = cold(chunk, chunk) * reductions
    # Columns begin when rows are all but done: what one has on the wire hides nothing of the other's. With rows longer
    # than there are columns they begin when the first block is done.
    filling = row_blocks / height if by_host else row_blocks
    path = (
        Hop(phases * row_steps, phases * filling * block, row_steps * worked, rows),
        Hop(phases * column_steps, phases * column_blocks * block, column_steps * worked, columns),
    )
    row_idle = row_steps if row_pieces == 1 else min(1, row_steps)
    column_idle = column_steps if pieces == 1 else min(1, column_steps)
    idle = (Hop(phases * row_idle, 0, 0, rows), Hop(phases * column_idle, 0, 0, columns))
    once = shape.full(min(width, row_steps) * height + column_steps) * block
    moved = phases * once
    messages = 2 * phases * (row_blocks / height * row_pieces + column_blocks * pieces)
    work = Work(messages, moved, moved, cold(once, chunk) * reductions)
    load = alike(shape, path, idle, work, AT_HOME)
    leaving = phases * block * (rows.leaving * row_blocks + columns.leaving * column_blocks)
    if by_host:  # some do less than the busiest: in all, every rank but one gives its vector away, and is given one
        load = load._replace(everyone=NO_WORK.plus(work, (world - 1) * shape.total / once))
    partial = phases == 1 and reductions  # reduce_scatter, which only reads its input
    return load._replace(card=leaving, scratch=2 * height * block if partial else 0.0)


def _ways(shape: Shape, width: int) -> tuple[Way, Way]:
    """How messages go within a row, and within a column."""
    if shape.one_host:
        return AT_HOME, AT_HOME
    inside = not (shape.hosts or shape.ranks_per_host % width)
    columns = min(width, shape.ranks_per_host)
    return AT_HOME if inside else shape.neighbors(), Way(1.0, columns, columns)


ALGORITHMS: Final = (
    Algorithm("all_reduce", "ring_2d", all_reduce, partial(_grid_cost, phases=2, reductions=1)),
    Algorithm("all_gather", "ring_2d", all_gather, partial(_grid_cost, phases=1, reductions=0)),
    Algorithm("reduce_scatter", "ring_2d", reduce_scatter, partial(_grid_cost, phases=1, reductions=1)),
)
