"""A picture of times against numbers of ranks, as SVG: both axes are logarithms, and each algorithm has a line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from asyncdist.cli.picture import svg
from asyncdist.cli.tables import show_seconds

_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22")
_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 50, 560, 320


def draw_latency(title: str, worlds: Sequence[int], times_s: Mapping[str, Sequence[float]]) -> str:
    """Return the SVG. `times_s` has a time above 0 for each of `worlds`, which are two or more, by algorithm."""
    every = [seconds for line in times_s.values() for seconds in line]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    first, last = math.log2(worlds[0]), math.log2(worlds[-1])

    def across(world: int) -> float:
        return round(_LEFT + _WIDTH * (math.log2(world) - first) / (last - first), 1)

    def down(power: float) -> float:
        return round(_TOP + _HEIGHT * (high - power) / max(1, high - low), 1)

    def frame() -> Iterator[str]:
        for power in range(low, high + 1):
            y = down(power)
            yield f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDTH}" y2="{y}" stroke="#ddd"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{show_seconds(10.0**power)}</text>'
        for world in worlds:
            x, y = across(world), _TOP + _HEIGHT
            yield f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{y}" stroke="#eee"/>'
            yield f'<text x="{x}" y="{y + 14}" text-anchor="end" transform="rotate(-40 {x} {y + 14})">{world:,}</text>'
        yield f'<text x="{_LEFT + _WIDTH // 2}" y="{_TOP + _HEIGHT + 62}" text-anchor="middle">ranks</text>'

    def lines() -> Iterator[str]:
        for (name, line), colour in zip(times_s.items(), _COLOURS * len(times_s), strict=False):
            points = [(across(world), down(math.log10(each))) for world, each in zip(worlds, line, strict=True)]
            path = " ".join(f"{x},{y}" for x, y in points)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            x, y = points[-1]
            yield f'<text x="{x + 8}" y="{y + 4}" fill="{colour}">{escape(name)}: {show_seconds(line[-1])}</text>'

    return svg(title, _LEFT + _WIDTH + 190, _TOP + _HEIGHT + 76, *frame(), *lines())
