"""What the commands of this folder have in common: lists in options, and a progress bar."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Bar", "ListOf"]


class ListOf(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """Several values with commas."""

    name = "list"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(self._item.convert(part.strip(), param, ctx) for part in value.split(","))


class Bar:
    """A progress bar; of unknown length where the number of runs is not known beforehand."""

    def __init__(self, console: Console, total: int | None = None) -> None:
        columns = (
            SpinnerColumn(),
            TimeElapsedColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Show what runs now and count it."""
        self._progress.update(self._task, advance=1, description=text)
