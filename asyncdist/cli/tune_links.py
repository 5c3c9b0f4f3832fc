"""`asyncdist tune --links`: what every rank of a world on several hosts runs, to measure the link between two."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncdist.api.groups import new_group
from asyncdist.concurrency.loop import run
from asyncdist.group.process_group import ProcessGroup
from asyncdist.init import init_process_group
from asyncdist.plan.cost.constants import Link
from asyncdist.plan.selection.tuning import constants_from_terms, constants_to_terms
from asyncdist.tuning.links import measure_link
from asyncdist.world.tuning_file import built_in_constants, read_file, save_constants

__all__ = ["measure_links"]


def measure_links(transports: Sequence[str], seconds: float, path: Path, report: Callable[[str, float], None]) -> bool:
    """Join the world of this process's environment, measure between rank 0 and the last, and write rank 0's file.

    Returns whether this is rank 0. Raises ValueError without a world of several hosts, and what joining it does.
    """
    if not os.environ.get("RANK"):
        raise ValueError(
            "--links measures between hosts: run it on two at once, e.g. `asyncdist run --nnodes 2 --nproc-per-node 1 "
            "--rdzv-endpoint HOST:PORT -m asyncdist tune --links` on each"
        )
    return run(_measure(transports, seconds, path, report))


async def _measure(transports: Sequence[str], seconds: float, path: Path, report: Callable[[str, float], None]) -> bool:
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
                _save(path, transports, link, connection)
        await group.barrier()
        return group.rank == 0


def _save(path: Path, transports: Sequence[str], link: Link, connection: str) -> None:
    """Put the link beside what the file says of the host, or beside built-in constants."""
    entries: dict[str, Any] = read_file(path)["transports"] if path.exists() else {}
    measured = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "connection": connection}
    for transport in transports:
        entry = dict(entries.get(transport) or {})
        terms = entry.pop("constants", None)
        constants = built_in_constants(transport) if terms is None else constants_from_terms(terms)
        constants = constants_from_terms(constants_to_terms(replace(constants, between=link)))
        save_constants(path, transport, constants, {**entry, "link": measured})
