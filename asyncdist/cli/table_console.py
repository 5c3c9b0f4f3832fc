"""Where tables are printed."""

from __future__ import annotations

import os
from typing import Final

from rich.console import Console

__all__ = ["table_console"]

TABLE_WIDTH: Final = 150
"""Columns of a table that goes to a file or a pipe."""


def table_console() -> Console:
    """Return standard output, as wide as the terminal or COLUMNS says, else wide enough for every table."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = TABLE_WIDTH
    return console
