"""`asyncdist tune`: measure what messages, bytes and reductions cost here, and keep it for the selector."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from asyncdist.cli.sizes import show_seconds
from asyncdist.errors import DistError
from asyncdist.host_constants import default_path, read_file, save_constants
from asyncdist.plan.tuning import constants_from_terms, constants_to_terms
from asyncdist.transport.config import TRANSPORTS
from asyncdist.tuning.measure import PHASES
from asyncdist.tuning.session import constants_of, measure_here

__all__ = ["tune_command"]

DEFAULT_SECONDS: Final = 12.0
"""For all transports together: with the start of the processes below twenty seconds, which somebody may wait for."""


@click.command("tune", short_help="Measure this host for the choice of algorithms.")
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    help="What to measure, several times for several; else ASYNCDIST_TRANSPORT, else auto and tcp.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=600),
    default=DEFAULT_SECONDS,
    show_default=True,
    help="How long to measure, in all.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file; else this host's in the cache directory.",
)
@click.option("--show", is_flag=True, help="Show what the file says, and measure nothing.")
def tune_command(transports: tuple[str, ...], seconds: float, output: Path | None, show: bool) -> None:
    """Measure with two processes on this host, and write the constants to a file that `init_process_group` reads.

    Rank 0's file counts for all ranks of a world. ASYNCDIST_TUNING names another file, or `off` for built-in values.
    Links between hosts are not measured: for those built-in values count.
    """
    path = output or default_path(os.environ)
    if path is None:
        raise click.UsageError("neither XDG_CACHE_HOME nor HOME is set: give --output")
    try:
        if not show:
            _measure_all(transports or _from_environment(), seconds, path)
        _show(path)
    except FileNotFoundError:
        raise click.ClickException(f"there is no {path} yet: run `asyncdist tune`") from None
    except (DistError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _from_environment() -> tuple[str, ...]:
    word = os.environ.get("ASYNCDIST_TRANSPORT", "").strip().lower()
    if word and word not in TRANSPORTS:
        raise click.UsageError(f"ASYNCDIST_TRANSPORT={word!r}: use one of {', '.join(TRANSPORTS)}")
    return (word,) if word and word != "auto" else ("auto", "tcp")


def _measure_all(transports: tuple[str, ...], seconds: float, path: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[phase]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for transport in transports:
            task = progress.add_task(transport, total=len(PHASES), phase="starting")

            def report(phase: str, share: float, task: Any = task) -> None:
                progress.update(task, completed=PHASES.index(phase) + share, phase=phase)

            measured, connection = measure_here(transport, seconds / len(transports), report)
            progress.update(task, completed=len(PHASES), phase="done")
            # Rejects what cannot be: a clock that stood still, say.
            constants = constants_from_terms(constants_to_terms(constants_of(measured)))
            details = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "connection": connection,
                "machine": _machine(),
                "measured": measured._asdict(),
            }
            save_constants(path, transport, constants, details)


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _show(path: Path) -> None:
    console = Console()
    console.print(str(path), highlight=False, soft_wrap=True)
    table = Table()
    for title in ("transport", "message", "overhead", "link GB/s", "copy GB/s", "reduction GB/s", "measured"):
        table.add_column(title, no_wrap=True)
    for transport, entry in read_file(path)["transports"].items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"{path}: {transport}: not a set of constants")
        constants = constants_from_terms(entry.get("constants"))
        table.add_row(
            str(transport),
            show_seconds(constants.alpha_s),
            show_seconds(constants.overhead_s),
            f"{1e-9 / constants.beta_s:.3g}",
            f"{1e-9 / constants.copy_s:.3g}" if constants.copy_s else "-",
            f"{1e-9 / constants.gamma_s:.3g}",
            str(entry.get("date", "")),
        )
    console.print(table)
