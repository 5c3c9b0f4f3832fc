"""Pictures of plans: ranks from left to right, rounds from top to bottom, an arrow for each message or fetched item."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Fetch, FetchReduce, Plan, Publish, Recv, RecvReduce, Reduce, Send, Slice, Step

MAX_RANKS: Final = 32
"""More do not fit beside each other."""

_COLUMN: Final = 74
_ROW: Final = 64
_LEFT: Final = 70
_TOP: Final = 78


class Arrow(NamedTuple):
    """`elements` go from one rank to another, and leave in `round`; `reduced` where they meet what is there."""

    source: int
    target: int
    round: int
    elements: Slice
    reduced: bool


def arrows(plans: Sequence[Plan]) -> list[Arrow]:
    """What moves between the ranks of these plans, in rounds: a step is one later than what it waits for has left."""
    found: list[Arrow] = []
    rounds: list[dict[int, int]] = [{} for _ in plans]  # of each step, when it is done
    left: dict[tuple[object, ...], tuple[int, Slice]] = {}  # of messages and items: when, and what
    waiting = [(plan.rank, index, step) for plan in plans for index, step in enumerate(plan.steps)]
    while waiting:
        still = []
        for rank, index, step in waiting:
            known = rounds[rank]
            origin = _origin(rank, step)
            if any(other not in known for other in step.after) or (origin is not None and origin not in left):
                still.append((rank, index, step))
                continue
            begun = max((known[other] for other in step.after), default=0)
            if origin is not None:
                leaves, elements = left[origin]
                begun = max(begun, leaves + 1)
            match step:
                case Send():
                    left[rank, step.peer, step.slot] = begun, step.source
                case Publish():
                    left[rank, step.item] = begun, step.source
                case Recv() | RecvReduce():
                    reduced = isinstance(step, RecvReduce) or _is_reduced(plans[rank], index, step.target)
                    found.append(Arrow(step.peer, rank, begun - 1, elements, reduced))
                case Fetch() | FetchReduce():
                    part = Slice(elements.buffer, elements.offset + step.offset, step.target.length)
                    reduced = isinstance(step, FetchReduce) or _is_reduced(plans[rank], index, step.target)
                    found.append(Arrow(step.peer, rank, begun - 1, part, reduced))
            known[index] = begun
        assert len(still) < len(waiting), "the plans wait for each other"
        waiting = still
    return sorted(found, key=lambda arrow: (arrow.round, arrow.source, arrow.target, arrow.elements))


def _is_reduced(plan: Plan, index: int, target: Slice) -> bool:
    """Whether what a step has taken in is reduced by a step of its own."""
    later = (step for step in plan.steps[index:] if isinstance(step, Reduce) and index in step.after)
    return any(target.overlaps(step.source) or target.overlaps(step.target) for step in later)


def _origin(rank: int, step: Step) -> tuple[object, ...] | None:
    """The name of the message or item that a step takes in."""
    match step:
        case Recv() | RecvReduce():
            return step.peer, rank, step.slot
        case Fetch() | FetchReduce():
            return step.peer, step.item
    return None


def draw(problem: Problem, algorithm: str) -> str:
    """Return an SVG of an algorithm. Raises ValueError for more than MAX_RANKS ranks, and for what `build` refuses."""
    if problem.world > MAX_RANKS:
        raise ValueError(f"a picture shows up to {MAX_RANKS} ranks, not {problem.world}")
    whole = max(problem.total, 1)
    moved = arrows([build(problem, algorithm, rank, whole) for rank in range(problem.world)])
    rounds = max((arrow.round + 1 for arrow in moved), default=0)
    sent = [sum(arrow.elements.length for arrow in moved if arrow.source == rank) for rank in range(problem.world)]
    title = f"{problem.collective} by {algorithm}, {problem.world} ranks: {rounds} round{'s' * (rounds != 1)}"
    if any(sent):
        title += f"; a rank sends up to {_share(max(sent), whole)}"
    width, height = 2 * _LEFT + _COLUMN * (problem.world - 1), _TOP + _ROW * rounds + 34
    width = max(width, 8 * len(title))
    return svg(
        title, width, height, *_frame(problem.world, rounds), *(each for one in moved for each in _drawn(one, whole))
    )


def svg(title: str, width: int, height: int, *elements: str) -> str:
    """Return a whole picture with its title."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="16" y="24" font-size="14">{escape(title)}</text>',
            *elements,
            "</svg>\n",
        ]
    )


def _frame(world: int, rounds: int) -> Iterator[str]:
    bottom = _TOP + _ROW * rounds
    for rank in range(world):
        x = _LEFT + _COLUMN * rank
        yield f'<text x="{x}" y="{_TOP - 18}" text-anchor="middle">rank {rank}</text>'
        yield f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{bottom + 8}" stroke="#ccc"/>'
    for number in range(rounds):
        yield f'<text x="16" y="{_TOP + _ROW * number + _ROW // 2 + 4}" fill="#888">{number + 1}</text>'


def _drawn(arrow: Arrow, whole: int) -> Iterator[str]:
    """The line and its end: a full circle where it is reduced, an empty one where it is taken as it comes."""
    x1, x2 = (_LEFT + _COLUMN * rank for rank in (arrow.source, arrow.target))
    y1, y2 = _TOP + _ROW * arrow.round, _TOP + _ROW * (arrow.round + 1)
    colour = _colour(arrow.elements.offset / whole) if arrow.elements.length else "#888"
    share = _share(arrow.elements.length, whole) if arrow.elements.length else "a signal"
    yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.5">'
    yield f"<title>rank {arrow.source} to rank {arrow.target}: {share}</title></line>"
    fill = colour if arrow.reduced else "white"
    yield f'<circle cx="{x2}" cy="{y2}" r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'


def _colour(place: float) -> str:
    """From red at the beginning of the vector to violet at its end."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(0.83 * place, 0.45, 0.7))


def _share(length: int, whole: int) -> str:
    share = Fraction(length, whole)
    return f"{share} of the vector" if share < 1 else "the vector" if share == 1 else f"{float(share):g} vectors"
