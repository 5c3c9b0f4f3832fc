"""What `asyncdist doctor --network` shows, and the job that only checks the network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import click
from rich.table import Column, Table
from rich.text import Text

from asyncdist.cli.rank_lines import printable
from asyncdist.cli.tables import table_console
from asyncdist.init import init_process_group
from asyncdist.inspect.dumps import document
from asyncdist.inspect.job import Job, checked
from asyncdist.inspect.network import Network
from asyncdist.store import PrefixStore
from asyncdist.world.inspection import worlds_of
from asyncdist.world.live import LiveWorld, measure_speeds
from asyncdist.world.network import network_of

SENTENCES_SHOWN: Final = 8
"""Problems: what is wrong with many pairs has few causes."""
ROWS_SHOWN: Final = 64
"""Ranks that have a line for what they advertise: a screen or two."""
SIDE: Final = 12
"""Ranks, or hosts where there are more, in a matrix: as many as fit beside each other."""


def show_network(name: str, network: Network) -> None:
    """Print what is wrong, what ranks advertise, and how they reach each other; where they are many, their hosts."""
    sentences = [problem.sentence for problem in network.problems()]
    more = len(sentences) - SENTENCES_SHOWN
    told = [f"{more} problems more; --json shows all"] if more > 0 else []
    for sentence in (*sentences[:SENTENCES_SHOWN], *told, network.summary()):
        click.echo(printable((f"{name}: " if name else "") + sentence))
    console = table_console()
    rows = [["rank", "host", "listens on", "interfaces", "ports", "transport"]]
    for rank, look in list(network.looks.items())[:ROWS_SHOWN]:
        listens = "\n".join(f"{one['ip']} {one['port']}" for one in look.get("listens", ()))
        others = [each for each in look.get("interfaces", ()) if each["name"] != "lo"]
        interfaces = "\n".join(f"{each['name']} {each['ip']}" for each in others)
        host = network.places[rank].partition(" ")[0]
        rows.append([str(rank), host, listens, interfaces, look.get("ports") or "any", look.get("transport", "")])
    console.print(_table(rows))
    places: Mapping[str, Sequence[int]] = {f"rank {rank}": [rank] for rank in network.looks}
    if len(places) > SIDE:
        places = network.hosts
    if 1 < len(places) <= SIDE:
        matrix = ([one, *(network.cell(ones, others) for others in places.values())] for one, ones in places.items())
        console.print(_table([["from \\ to", *places], *matrix]))


def _table(rows: Iterable[Sequence[str]]) -> Table:
    """The first row has names of columns. What ranks say is no markup."""
    columns, *cells = ([Text("\n".join(map(printable, cell.split("\n")))) for cell in row] for row in rows)
    table = Table(*map(Column, columns))
    for row in cells:
        table.add_row(*row)
    return table


async def network_of_job(measure: bool) -> Job | None:
    """Join the world of this process's environment, and tell rank 0 by the store whom this rank reaches.

    Returns all on rank 0, None on others. Endpoints are asked for speeds only: a firewall may be before them, too.
    """
    async with init_process_group() as group:
        world = group.world
        own = document(group.rank, "asked", under_way=True, with_tasks=False)
        own["network"] = await asyncio.to_thread(network_of, world)
        store = PrefixStore("network check", world.store)
        await store.set(str(group.rank), json.dumps(own))
        if group.rank:
            await store.get("done")
            return None
        said = await store.multi_get([str(rank) for rank in range(group.size)])
        found = {one["rank"]: dict(one) for one in map(checked, map(json.loads, said))}
        live = LiveWorld("", group.name, group.size, found)
        if measure:
            endpoints = next(one.endpoints for one in await worlds_of(world.store) if one.name == group.name)
            await measure_speeds(live, endpoints, None if world.inspection is None else world.inspection.token)
        await store.set("done", "")
        return Job(live.documents.values(), group.size)
