"""What `explain`, `simulate` and `tune` take and show: collectives, constants, sizes and times, and their tables."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click
from rich.console import Console

from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.plan.cost.constants import BUILT_IN, Constants
from asyncdist.plan.problem import PRIVATE_COLLECTIVES
from asyncdist.world.tuning_file import read_file, stored_constants

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


OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "allreduce": "all_reduce",
        "bcast": "broadcast",
        "allgather": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "all_gather_array": "all_gather",
        "reducescatter": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_block": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
        "alltoall": "all_to_all",
        "all_to_all_single": "all_to_all",
    }
)


class CollectiveName(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """One of `known`, or another name for it; says what is meant where it can."""

    name = "collective"

    def __init__(self, known: Sequence[str]) -> None:
        self._known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name used here."""
        word = str(value).strip().lower().replace("-", "_").replace(".", "_").removeprefix("mpi_")
        word = OTHER_NAMES.get(word, word)
        if word in self._known:
            return word
        if word in PRIVATE_COLLECTIVES:
            first = algorithms(word)[0]
            text = (
                f"{word} is not chosen by time, since no rank knows all lengths: it is shared with a lane, else {first}"
            )
            self.fail(text, param, ctx)
        close = difflib.get_close_matches(word, [*self._known, *OTHER_NAMES], 1)
        meant = f"; did you mean {OTHER_NAMES.get(close[0], close[0])}?" if close else ""
        self.fail(f"there is no collective {value!r}{meant or '.'} There are: {', '.join(self._known)}", param, ctx)


def transport_here() -> str:
    """Return the transport that the environment names, auto if it names none."""
    return os.environ.get("ASYNCDIST_TRANSPORT", "").strip().lower() or "auto"


def named_constants(source: str, transport: str) -> Constants:
    """Return a built-in set, or those for `transport` of a file of `asyncdist tune`. Raises ValueError and OSError."""
    if source in BUILT_IN:
        return BUILT_IN[source]
    if not Path(source).exists():
        raise ValueError(f"constants {source!r} are no file and no built-in set; those are {', '.join(BUILT_IN)}")
    constants = stored_constants(Path(source), transport)
    if constants is None:
        known = ", ".join(read_file(Path(source))["transports"])
        raise ValueError(f"{source} has no constants for transport {transport!r}; it has: {known}")
    return constants
