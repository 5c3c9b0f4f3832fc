"""`asyncdist ps`, `stacks` and `top`: what the ranks of a running job do."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich.live import Live
from rich.text import Text

from asyncdist.cli.live import live_worlds
from asyncdist.cli.store_target import Target, store_options
from asyncdist.cli.tables import show_seconds, table_console
from asyncdist.inspect.endpoint import ALL, NOW
from asyncdist.world.live import LiveWorld

COLUMNS: Final = dict(
    zip(("RANK", "STATE", "OPERATION", "FOR", "WAITS FOR", "HOST", "PID", "LATE"), "><<><<>>", strict=True)
)
"""With the side on which their cells stand."""
SHOWN_RANKS: Final = 8
"""Of those that an operation waits for."""
STORE_LIMIT_S: Final = 3.0
"""How long the store has for an answer, by default: the process that hosts it may be what hangs."""
COMPUTING: Final = 0.02
"""The part of the time that a thread has the processor, at least, if it computes on a host with much to do."""
OURS: Final = ("/asyncdist/", "/asyncio/", "/uvloop/", "/selectors.py", "/threading.py", "/runpy", "<frozen ")
"""Parts of the paths of files that are no program's."""

_store_options = functools.partial(store_options, timeout_s=STORE_LIMIT_S)
_group_option = click.option("--group", default="", help="One world: the group_name of its init_process_group.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("ps", short_help="Show what each rank of a running job does.")
@_store_options
@_group_option
@_json_option
def ps_command(target: Target, group: str, as_json: bool) -> None:
    """Show what each rank of running jobs does: a line for each.

    With no store given, by option or environment, these are the jobs of this user on this host. LATE is how long the
    rank's event loop took to turn when it was asked; `>` means that it has not turned yet.
    """
    worlds = _ask(target, group, NOW)
    if as_json:
        click.echo(json.dumps([vars(world) for world in worlds]))
        return
    for world in worlds:
        click.echo("\n".join(_shown(world)))


@click.command("stacks", short_help="Show where the tasks and threads of a running job are.")
@click.argument("rank", type=click.IntRange(min=0), required=False)
@_store_options
@_group_option
@_json_option
def stacks_command(target: Target, rank: int | None, group: str, as_json: bool) -> None:
    """Show where each task and thread of RANK, or of all ranks, is: the innermost line first."""
    worlds = _ask(target, group, ALL)
    for world in worlds:
        world.documents = {one: found for one, found in world.documents.items() if rank in (None, one)}
    if as_json:
        click.echo(json.dumps([vars(world) for world in worlds]))
        return
    for world in worlds:
        for one, document in world.documents.items():
            click.echo(
                _printable(
                    f"{_title(world)}, rank {one} ({document['host']} pid {document['pid']}): "
                    f"{document.get('why', '')}".rstrip()
                )
            )
            for kind in "task", "thread":
                for name, lines in document[f"{kind}s"].items():
                    click.echo(_printable(f"  {kind} {name}"))
                    for line in lines:
                        click.echo(_printable(f"    {line}"))


@click.command("top", short_help="Watch what the ranks of a running job do.")
@_store_options
@_group_option
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many looks.")
def top_command(target: Target, group: str, interval: float, count: int | None) -> None:
    """Show what `ps` shows, again and again until interrupted."""
    console = table_console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        looks = 0
        while True:
            worlds = live_worlds(target, group, NOW)
            lines = [line for world in worlds for line in _shown(world)] or ["no job runs here"]
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            looks += 1
            if looks == count:
                return
            time.sleep(interval)


def _ask(target: Target, group: str, question: bytes) -> list[LiveWorld]:
    worlds = live_worlds(target, group, question)
    if not worlds:
        where = "in the store" if target.is_given else "of this user on this host; --store asks a store"
        raise click.ClickException(f"there is no world {group or 'of a job'} {where}")
    return worlds


def _title(world: LiveWorld) -> str:
    return f"job {world.job}, group {world.name}" if world.job else f"group {world.name}"


def _shown(world: LiveWorld) -> Iterator[str]:
    """A title, names of columns, and a line for each rank: by hand, as rich takes a second for a thousand."""
    here = len(world.documents)
    yield _printable(f"{_title(world)}: {world.size} ranks" + ("" if here == world.size else f", {here} of them here"))
    rows = [(str(rank), *_cells(document)) for rank, document in sorted(world.documents.items())]
    rows = [tuple(COLUMNS), *(tuple(map(_printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, COLUMNS.values(), strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, width, side in cells).rstrip()


def _cells(document: dict[str, Any]) -> Iterator[str]:
    """State, operation, since when, whom it waits for, host, pid, lateness."""
    entries = sorted((one for one in document["entries"] if "ended" not in one), key=lambda one: one["issued"])
    ours = [one for one in entries if one["kind"] != "store"] or entries
    late = not document.get("loop_turns", True)
    yield document.get("state") or ("busy" if late else "waiting" if ours else "running")
    if late:
        yield _where(document)
    elif ours:
        yield _operation(ours[0]) + (f" and {len(entries) - 1} more" if len(entries) > 1 else "")
    else:
        yield document.get("why", "")
    yield show_seconds(max(0.0, document["time"] - ours[0]["issued"])) if ours else ""
    yield _waited_for(ours[0]) if ours else ""
    yield document["host"]
    yield str(document["pid"] or "")
    yield (">" if late else "") + show_seconds(document["loop_late"]) if "loop_late" in document else ""


def _operation(entry: dict[str, Any]) -> str:
    if entry["kind"] == "store":
        return f"store {entry['operation']} {', '.join(entry['keys'])}"
    number = f" #{entry['sequence']}" if "sequence" in entry else ""
    tag = f" tag {entry['tag']}" if entry.get("tag") else ""
    group = f" of {entry['group']}" if entry["group"] != "default" else ""
    site = f" at {_short(entry['site'])}" if "site" in entry else ""
    return f"{entry['operation']}{number}{tag}{group}{site}"


def _waited_for(entry: dict[str, Any]) -> str:
    if "peer" in entry:
        return "any rank" if entry["peer"] < 0 else f"rank {entry['peer']}"
    ranks = entry.get("waiting_for") or []
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f"rank {', '.join(map(str, ranks[:SHOWN_RANKS]))}{more}" if ranks else ""


def _where(document: dict[str, Any]) -> str:
    """The innermost line of the program in the main thread."""
    lines: list[str] = next((lines for name, lines in document["threads"].items() if name.startswith("MainThread")), [])
    line = next((line for line in lines if not any(part in line for part in OURS)), "")
    where, _, function = line.partition(" ")
    computes = document["loop_cpu"] > COMPUTING * document["loop_late"]
    verb = "computes" if computes else "sleeps or is blocked"
    return f"{verb} at {_short(where)} {function}" if line else verb


def _short(site: str) -> str:
    path, _, line = site.rpartition(":")
    return f"{Path(path).name}:{line}"


def _printable(text: str) -> str:
    """Return `text` with escapes, as in Python, for what is no visible character."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
