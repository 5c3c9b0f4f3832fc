"""`asyncdist tune`: measure what messages, bytes and reductions cost here, and keep it for the selector.

With `--links` every rank of a world on several hosts runs this, to measure the link between two of them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from asyncdist.api.groups import new_group
from asyncdist.cli.tables import show_bytes, show_seconds, table_console
from asyncdist.concurrency.loop import run
from asyncdist.errors import DistError
from asyncdist.group.process_group import ProcessGroup
from asyncdist.init import init_process_group
from asyncdist.plan.cost.constants import Constants, Link
from asyncdist.plan.selection.tuning import constants_from_terms, constants_to_terms
from asyncdist.transport.config import TRANSPORTS
from asyncdist.tuning.fit import CLOSE, TOLERABLE, Choice, judge, summary
from asyncdist.tuning.measure import measure_link
from asyncdist.tuning.session import WORLDS, Cell, Report, find_here, try_here
from asyncdist.tuning.trials import EXERCISES, Trial
from asyncdist.world.tuning_file import (
    VERSION,
    built_in_constants,
    default_path,
    host_cores,
    read_file,
    save_constants,
    stored_constants,
)

DEFAULT_SECONDS: Final = 16.0
"""For all transports together: with the start of the processes about thirty seconds, for which a user may wait."""

CHECK_SECONDS: Final = 60.0
"""For each transport: less would say more of the moment than of the algorithms."""

CHECKED_SIZES: Final = tuple((1 << 10) << step for step in range(0, 15, 2))
"""Bytes: 1 KiB to 16 MiB."""

LINK_SECONDS: Final = 5.0
"""Some hundred round trips and a few long messages of most networks."""


@click.command("tune", short_help="Measure this host for the choice of algorithms.")
@click.option(
    "--transport",
    "transports",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    help="Transport to measure; may be given several times; else ASYNCDIST_TRANSPORT, else auto and tcp.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=600),
    help=f"How long to measure, in all: {DEFAULT_SECONDS:g}; {CHECK_SECONDS:g} for each transport with --check, "
    f"{LINK_SECONDS:g} with --links.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; else the file of this host in the cache directory.",
)
@click.option("--show", is_flag=True, help="Show what the file says; measure nothing.")
@click.option(
    "--check", is_flag=True, help="Try all algorithms and say whether the fastest are chosen; change nothing."
)
@click.option(
    "--links",
    is_flag=True,
    help="Measure the link between hosts instead; run it as the ranks of a world on several hosts.",
)
@click.option("--candidates", is_flag=True, help="With --check: a line for every algorithm.")
def tune_command(
    transports: tuple[str, ...],
    seconds: float | None,
    output: Path | None,
    show: bool,
    check: bool,
    links: bool,
    candidates: bool,
) -> None:
    """Measure with two and with four processes on this host, and write what messages, bytes, reductions and shared
    memory cost to a file that `init_process_group` reads.

    Rank 0's file counts for all ranks of a world. ASYNCDIST_TUNING names another file, or `off` for built-in values.
    Links between hosts are measured with --links, by `asyncdist run --nnodes 2 --nproc-per-node 1 --rdzv-endpoint
    HOST:PORT -m asyncdist tune --links` on two of them; rank 0 writes the file. Until then built-in values count.
    """
    path = output or default_path(os.environ)
    if path is None:
        raise click.UsageError("neither XDG_CACHE_HOME nor HOME is set: give --output")
    if check + show + links > 1 or (candidates and not check):
        raise click.UsageError("--check, --show and --links are three things, and --candidates goes with --check")
    transports = transports or _from_environment()
    try:
        if check:
            _check_all(transports, seconds or CHECK_SECONDS * len(transports), path, everything=candidates)
            return
        if links:
            with _progress() as progress:
                first = _measure_links(transports, seconds or LINK_SECONDS, path, _reporter(progress, "link"))
            if not first:
                return
        elif not show:
            _measure_all(transports, seconds or DEFAULT_SECONDS, path)
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
    with _progress() as progress:
        for transport in transports:
            found = find_here(transport, seconds / len(transports), _reporter(progress, transport))
            # Rejects what cannot be: a clock that stood still, say.
            constants = constants_from_terms(
                constants_to_terms(replace(found.constants, between=_stored_link(path, transport)))
            )
            details = {
                "date": _now(),
                "connection": found.connection,
                "machine": _machine(),
                "measured": found.measured._asdict(),
                "trials": len(found.trials),
            }
            save_constants(path, transport, constants, details)


def _stored_link(path: Path, transport: str) -> Link | None:
    """What a file says of links between hosts, which only --links measures."""
    try:
        constants = stored_constants(path, transport)
    except (OSError, ValueError):
        return None
    return None if constants is None else constants.between


def _check_all(transports: tuple[str, ...], seconds: float, path: Path, *, everything: bool) -> None:
    """Try every algorithm of five collectives over each transport, and show what would be chosen."""
    cells = tuple(Cell(collective, nbytes) for collective in EXERCISES for nbytes in CHECKED_SIZES)
    each_s = seconds / len(transports) / len(WORLDS)
    for transport in transports:
        measured = None
        with contextlib.suppress(FileNotFoundError):
            measured = stored_constants(path, transport)
        constants = measured or built_in_constants(transport)
        with _progress() as progress:
            report = _reporter(progress, transport)
            tried = [try_here(transport, world, cells, constants, each_s, report) for world in WORLDS]
        _show_check(transport, list(chain(*tried)), measured, everything=everything)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[phase]}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _reporter(progress: Progress, transport: str) -> Report:
    task = progress.add_task(transport, total=1.0, phase="starting")

    def report(phase: str, share: float) -> None:
        progress.update(task, completed=share, phase=phase)

    return report


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _measure_links(transports: Sequence[str], seconds: float, path: Path, report: Callable[[str, float], None]) -> bool:
    """Join the world of this process's environment, measure between rank 0 and the last, and write rank 0's file.

    Returns whether this is rank 0. Raises ValueError without a world of several hosts, and what joining it does.
    """
    if not os.environ.get("RANK"):
        raise ValueError(
            "--links measures between hosts: run it on two at once, e.g. `asyncdist run --nnodes 2 --nproc-per-node 1 "
            "--rdzv-endpoint HOST:PORT -m asyncdist tune --links` on each"
        )
    return run(_measure_in_world(transports, seconds, path, report))


async def _measure_in_world(
    transports: Sequence[str], seconds: float, path: Path, report: Callable[[str, float], None]
) -> bool:
    async with init_process_group() as group:
        if group.size < 2:
            raise ValueError("--links needs ranks on two hosts, but this world has one rank")
        last = group.size - 1
        pair = new_group([0, last])
        if isinstance(pair, ProcessGroup):
            link = await measure_link(pair, seconds, report)
            connection = group.world.mesh.describe(last if group.rank == 0 else 0)
            if "tcp" not in connection:
                raise ValueError(f"--links measures between hosts, but ranks 0 and {last} share one ({connection})")
            if group.rank == 0:
                _save_link(path, transports, link, connection)
        await group.barrier()
        return group.rank == 0


def _save_link(path: Path, transports: Sequence[str], link: Link, connection: str) -> None:
    """Put the link beside what the file says of the host, or beside built-in constants."""
    entries: dict[str, Any] = read_file(path)["transports"] if path.exists() else {}
    measured = {"date": _now(), "connection": connection}
    for transport in transports:
        entry = dict(entries.get(transport) or {})
        terms = entry.pop("constants", None)
        constants = built_in_constants(transport) if terms is None else constants_from_terms(terms)
        constants = constants_from_terms(constants_to_terms(replace(constants, between=link)))
        save_constants(path, transport, constants, {**entry, "link": measured})


def _show(path: Path) -> None:
    console = table_console()
    console.print(str(path), highlight=False, soft_wrap=True)
    messages, memory = Table(title="messages", title_justify="left"), Table(title="shared memory", title_justify="left")
    for title in ("transport", "message", "overhead", "link GB/s", "copy GB/s", "reduction GB/s", "turn", "measured"):
        messages.add_column(title, no_wrap=True)
    for title in ("transport", "wake-up", "item", "begin", "operand", "copy GB/s", "reduction GB/s", "read GB/s"):
        memory.add_column(title, no_wrap=True)
    links = Table(title="between hosts", title_justify="left")
    for title in ("transport", "message", "link GB/s", "measured"):
        links.add_column(title, no_wrap=True)
    for transport, entry in read_file(path)["transports"].items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"{path}: {transport}: not a set of constants")
        constants = constants_from_terms(entry.get("constants"))
        messages.add_row(
            str(transport),
            show_seconds(constants.alpha_s),
            show_seconds(constants.overhead_s),
            f"{1e-9 / constants.beta_s:.3g}",
            f"{1e-9 / constants.copy_s:.3g}" if constants.copy_s else "-",
            f"{1e-9 / constants.gamma_s:.3g}",
            show_seconds(constants.turn_s),
            str(entry.get("date", "")),
        )
        if constants.between is not None:
            link, measured = constants.between, entry.get("link")
            date = measured.get("date", "") if isinstance(measured, Mapping) else ""
            links.add_row(str(transport), show_seconds(link.alpha_s), f"{1e-9 / link.beta_s:.3g}", str(date))
        shared = constants.shared
        if transport in ("auto", "shm"):
            memory.add_row(
                str(transport),
                *map(show_seconds, (shared.wake_s, shared.step_s, shared.begin_s, shared.operand_s)),
                f"{1e-9 / shared.copy_s:.3g}",
                f"{1e-9 / shared.reduce_s:.3g}",
                f"{1e-9 / shared.read_s:.3g}",
            )
    console.print(messages)
    for table in (memory, links):
        if table.row_count:
            console.print(table)


def _show_check(transport: str, trials: Sequence[Trial], measured: Constants | None, *, everything: bool) -> None:
    """Say how good the choices by these constants are, `measured` and built in; `everything`: of each candidate."""
    console = table_console()
    built_in = judge(trials, _with_cores(built_in_constants(transport)))
    judged = built_in if measured is None else judge(trials, _with_cores(measured))
    console.print(_candidates(judged) if everything else _cells(judged))
    console.print(_line(f"{transport}, built-in constants", built_in), highlight=False)
    if measured is not None:
        console.print(_line(f"{transport}, as measured here", judged), highlight=False)
    else:
        console.print(f"{transport}: nothing of version {VERSION} was measured here yet (`asyncdist tune`)")


def _with_cores(constants: Constants) -> Constants:
    return replace(constants, cores=host_cores(max(WORLDS)))


def _line(title: str, choices: Sequence[Choice]) -> str:
    found = summary(choices)
    return (
        f"{title}: of {found.cells} choices {found.fastest} are the fastest, {found.close} within "
        f"{round(100 * (CLOSE - 1))} % of it, {found.tolerable} within {round(100 * (TOLERABLE - 1))} %; "
        f"mean {found.mean:.3f}, worst {found.worst:.2f}"
    )


def _cells(choices: Sequence[Choice]) -> Table:
    table = _table("collective,ranks,bytes,chosen,predicted,measured,fastest,predicted,measured,chosen / fastest")
    for choice in choices:
        timed = (
            (each.trial.algorithm, show_seconds(each.predicted_s), show_seconds(each.trial.seconds))
            for each in (choice.chosen, choice.fastest)
        )
        mark = " !" if choice.ratio > TOLERABLE else ""
        table.add_row(*_cell(choice.chosen.trial), *chain(*timed), f"{choice.ratio:.2f}{mark}")
    return table


def _candidates(choices: Sequence[Choice]) -> Table:
    table = _table("collective,ranks,bytes,algorithm,chunk,predicted,measured,/ fastest,samples")
    for choice in choices:
        for number, (trial, predicted_s) in enumerate(choice.candidates):
            table.add_row(
                *(("", "", "") if number else _cell(trial)),
                trial.algorithm if number else f"{trial.algorithm} <- chosen",
                show_bytes(trial.chunk_bytes),
                show_seconds(predicted_s),
                show_seconds(trial.seconds),
                f"{trial.seconds / choice.fastest.trial.seconds:.2f}",
                str(trial.samples),
                end_section=number == len(choice.candidates) - 1,
            )
    return table


def _table(titles: str) -> Table:
    table = Table()
    for title in titles.split(","):
        is_name = title in ("collective", "algorithm", "chosen", "fastest")
        table.add_column(title, justify="left" if is_name else "right")
    return table


def _cell(trial: Trial) -> tuple[str, str, str]:
    return trial.collective, str(trial.world), show_bytes(trial.nbytes)
