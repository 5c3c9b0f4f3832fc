"""What tables show: sizes and times as people write and read them; and where tables are printed."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final

import click
from rich.console import Console

__all__ = ["BYTES", "show_bytes", "show_seconds", "table_console"]

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}

MAX_BYTES: Final = 1 << 50
"""Largest size taken: a pebibyte, beyond every array."""


class _Bytes(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not a size: write 4096, 64KiB or 1MB", param, ctx)
        unit = match[2] or ""
        nbytes = float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit])
        if nbytes > MAX_BYTES:
            self.fail(f"{value!r} is more than a pebibyte", param, ctx)
        return round(nbytes)


BYTES: Final = _Bytes()
"""An option's value in bytes."""


def show_bytes(nbytes: float) -> str:
    """`0 B`, `64 KiB`, `1.5 MiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """`1.9 us`, `12.3 ms`, `2.95 s`, `22,900 s`."""
    if seconds >= 1000:
        digits = 2 - math.floor(math.log10(seconds))
        return f"{round(seconds, digits):,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


TABLE_WIDTH: Final = 150
"""Columns of a table that goes to a file or a pipe."""


def table_console() -> Console:
    """Return standard output, as wide as the terminal or COLUMNS says, else wide enough for every table."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = TABLE_WIDTH
    return console
