"""`asyncdist store watch|status|waits|namespaces`: what happens in a store, and who waits in it."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from asyncdist.cli.key_argument import key_argument, key_text
from asyncdist.cli.printable import printable
from asyncdist.store.tcp_store import StoreObserver

if TYPE_CHECKING:
    from asyncdist.cli.store_commands import Target
    from asyncdist.store import TCPStore, WaitingClient

__all__ = ["namespaces_command", "status_command", "waits_command", "watch_command"]

SHOWN_VALUE_BYTES: Final = 60
"""What a line of `watch` shows of a value."""


@click.command("watch")
@click.argument("prefix", default="", type=key_argument)
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many events.")
@click.option("--from-revision", type=int, help="Begin with what happened at this revision, if it is still remembered.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line; values as text.")
@click.pass_obj
def watch_command(target: Target, prefix: str, count: int | None, from_revision: int | None, as_json: bool) -> None:
    """Print what happens to keys that begin with PREFIX. One line an event, until interrupted."""

    async def watch(store: TCPStore) -> None:
        seen = 0
        async with store.watch(prefix, from_revision) as events:
            if not as_json:
                click.echo(f"watching '{key_text(prefix)}' from revision {events.revision}", err=True)
            async for event in events:
                text = event.value.decode(errors="replace")
                key = key_text(event.key)
                if as_json:
                    line = json.dumps({"revision": event.revision, "kind": event.kind, "key": key, "value": text})
                else:
                    shown = repr(event.value[:SHOWN_VALUE_BYTES])[1:]
                    more = f" ... {len(event.value)} bytes" if len(event.value) > SHOWN_VALUE_BYTES else ""
                    line = f"{event.revision} {event.kind} {key}"
                    line += f" {shown}{more}" if event.kind == "set" else ""
                click.echo(line)
                seen += 1
                if seen == count:
                    return

    target.run(watch)


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def status_command(target: Target, as_json: bool) -> None:
    """Print what the daemon holds, and its age. Connections, keys, bytes, waiters, leases, memory, incarnation."""
    status = target.run(lambda store: store.status(), StoreObserver)
    if as_json:
        click.echo(json.dumps(status))
        return
    for name, value in status.items():
        click.echo(f"{name.removesuffix('_bytes').removesuffix('_s').replace('_', ' '):20} {_readable(name, value)}")


@click.command("waits")
@click.option("--all-namespaces", is_flag=True, help="Those of all jobs, not only of the namespace.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def waits_command(target: Target, all_namespaces: bool, as_json: bool) -> None:
    """Print who waits for which keys since when, longest first. The first question in every hang."""
    found = target.run(lambda store: store.waits(all_namespaces=all_namespaces), StoreObserver)
    waits = [dataclasses.replace(wait, keys=tuple(map(key_text, wait.keys))) for wait in found]
    if as_json:
        click.echo(json.dumps([{name: getattr(wait, name) for name in wait.__slots__} for wait in waits]))
        return
    if not waits:
        click.echo("nobody waits")
    for wait in waits:
        click.echo(_sentence(wait, all_namespaces))


@click.command("namespaces")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def namespaces_command(target: Target, as_json: bool) -> None:
    """Print the namespaces (jobs), most keys first."""
    found = target.run(lambda store: store.namespaces(), StoreObserver)
    if as_json:
        click.echo(json.dumps(list(map(dataclasses.asdict, found))))
        return
    for each in found:
        name = each.name or "the default namespace"
        click.echo(printable(f"{each.keys:9,} keys {each.queues:6,} queues {each.clients:6,} clients  {name}"))


def _sentence(wait: WaitingClient, with_namespace: bool) -> str:
    rank = "" if wait.rank is None else f"rank {wait.rank}, "
    namespace = f" of {wait.namespace or 'the default namespace'}" if with_namespace else ""
    who = ", ".join(part for part in (wait.client, wait.address) if part)
    return printable(f"{wait.waited:9.1f} s  {wait.operation} {', '.join(wait.keys)}  ({rank}{who}{namespace})")


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return str(timedelta(seconds=round(value))) if name.endswith("_s") else str(value)
