"""Log-log pictures: time against size, one PNG per operation. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench import messages
from bench.cases import format_bytes
from bench.model import Cell
from bench.operations import COLLECTIVES

WIDTH_INCHES: Final = 5.5
HEIGHT_INCHES: Final = 4.5
DOTS_PER_INCH: Final = 110
MARKS: Final = "osD^v<>P*X"


def missing_matplotlib() -> str | None:
    """Why nothing can be drawn, or None."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return "plots need matplotlib: pip install 'asyncdist[plot]'"
    return None


def draw(cells: Sequence[Cell], folder: Path, prefix: str) -> list[Path]:
    """Draw one picture for each operation with several sizes, a panel for each number of ranks; return the files.

    Ranks that are not bound to cores are drawn, if there are any.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    modes = {cell.mode for cell in cells}
    named = COLLECTIVES | messages.OPERATIONS
    chosen = [cell for cell in cells if cell.case.operation in named and (cell.mode == "free" or "free" not in modes)]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for operation in dict.fromkeys(cell.case.operation for cell in chosen):
        mine = [cell for cell in chosen if cell.case.operation == operation]
        if len({cell.case.nbytes for cell in mine}) < 2:
            continue
        ranks = sorted({cell.ranks for cell in mine})
        names = list(dict.fromkeys(name for cell in mine for name, m in cell.measurements.items() if m.runs_s))
        figure, panels = pyplot.subplots(
            1, len(ranks), figsize=(WIDTH_INCHES * len(ranks), HEIGHT_INCHES), squeeze=False, sharey=True
        )
        for panel, number in zip(panels[0], ranks, strict=True):
            _panel(panel, [cell for cell in mine if cell.ranks == number], names)
            panel.set_title(f"{operation}, {number} ranks")
        panels[0][0].set_ylabel("seconds, median")
        panels[0][0].legend(fontsize="small")
        figure.tight_layout()
        path = folder / f"{prefix}-{operation.replace('_', '-').replace(' ', '-')}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        pyplot.close(figure)
        written.append(path)
    return written


def _panel(panel: Any, cells: Sequence[Cell], names: Sequence[str]) -> None:
    """Draw one number of ranks; a name looks alike in all panels, and is in the legend even where it was not run."""
    for position, name in enumerate(names):
        points = sorted(
            (cell.case.nbytes, cell.measurements[name].p50_s())
            for cell in cells
            if name in cell.measurements and cell.measurements[name].runs_s
        )
        sizes, times = zip(*points, strict=True) if points else ((), ())
        style = "-" if name.startswith("asyncdist") else "--"
        mark, color = MARKS[position % len(MARKS)], f"C{position % 10}"
        panel.plot(sizes, times, style, marker=mark, color=color, markersize=4, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({cell.case.nbytes for cell in cells})
    panel.set_xticks(ticks, [format_bytes(tick) for tick in ticks], rotation=45, fontsize="small")
    panel.grid(visible=True, which="major", alpha=0.3)
