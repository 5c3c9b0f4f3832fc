"""The running jobs that a command is about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import click

from asyncdist.cli.store_target import Target, store_options
from asyncdist.errors import ConnectTimeoutError, DistNetworkError, StoreTimeoutError
from asyncdist.inspect.endpoint import ALL
from asyncdist.store.tcp_store import StoreObserver
from asyncdist.world.live import LiveWorld, asked_by_store, asked_on_this_host, jobs_of

STORE_LIMIT_S: Final = 3.0
"""How long the store has for an answer, by default: the process that hosts it may be what hangs."""


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say which jobs it is about: a `Target` as its first argument, and `group`."""
    of_group = click.option("--group", default="", help="One world: the group_name of its init_process_group.")
    return store_options(of_group(command), timeout_s=STORE_LIMIT_S)


def live_worlds(target: Target, group: str = "", question: bytes = ALL) -> list[LiveWorld]:
    """Ask the jobs of a store, or, where no store is given, those of this user on this host.

    `group` names one world of each, else all are asked. A store that does not answer is told of, and its ranks on this
    host are asked. Raises click.ClickException where it refuses, or what is given cannot be followed.
    """
    if target.is_given:
        try:
            return [found for job in _jobs(target) for found in _asked_in(target, job, group, question)]
        except click.ClickException as error:
            if not isinstance(error.__cause__, ConnectTimeoutError | DistNetworkError | StoreTimeoutError):
                raise
            click.echo(f"{error.message}; asking the ranks of this host", err=True)
    worlds = asyncio.run(asked_on_this_host(question))
    return [world for world in worlds if group in ("", world.name) and target.namespace in ("", world.job)]


def _jobs(target: Target) -> list[str]:
    if target.namespace:
        return [target.namespace]
    return target.run(jobs_of, StoreObserver)


def _asked_in(target: Target, job: str, group: str, question: bytes) -> list[LiveWorld]:
    return target.run_in(job, lambda store: asked_by_store(store, job, group, question))
