"""A line for each rank of a job, as `ps`, `top` and `doctor` show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncdist.cli.tables import show_seconds
from asyncdist.concurrency.integers import spell_ranks

COLUMNS: Final = {
    "RANK": ">",
    "STATE": "<",
    "DOES": "<",
    "FOR": ">",
    "WAITS FOR": "<",
    "HOST": "<",
    "PID": ">",
    "LATE": ">",
}
"""With the side on which their cells stand."""


def rank_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of columns, and a line for each of `Why.rows`: by hand, as rich takes a second for a thousand."""
    cells = [tuple(COLUMNS), *(tuple(map(printable, _cells(row))) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        sides = zip(line, widths, COLUMNS.values(), strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, width, side in sides).rstrip()


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield str(row["rank"])
    yield row["state"]
    yield row["does"]
    yield show_seconds(row["since_s"]) if "since_s" in row else ""
    yield spell_ranks(row.get("waits_for", ()))
    yield row["host"] or ""
    yield str(row["pid"] or "")
    yield (">" if row["state"] == "busy" else "") + show_seconds(row["late_s"]) if "late_s" in row else ""


def printable(text: str) -> str:
    """Return `text` with escapes, as in Python, for what is no visible character."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
