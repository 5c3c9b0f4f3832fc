"""`asyncdist store`: look into a running store, and change it, from a shell."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import timedelta
from typing import Any, Final, TypeVar

import click

from asyncdist.cli import SuggestingGroup
from asyncdist.cli.store_target import Target, store_options
from asyncdist.store import Store, TCPStore, WaitingClient
from asyncdist.store.base import decoded_key, encoded_key
from asyncdist.store.tcp_store import StoreObserver
from asyncdist_server.wire.key_text import escaped, unescaped

__all__ = ["store_group"]

DEFAULT_TIMEOUT_S: Final = 10.0
"""A user waits at the keyboard."""

SHOWN_VALUE_BYTES: Final = 60
"""What a line of `watch` shows of a value."""

T = TypeVar("T")


class _StoreGroup(SuggestingGroup):
    """Says where its options go when they are given to a command, which every one of them concerns."""

    def invoke(self, ctx: click.Context) -> object:
        """As click's, with that hint."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            name = error.option_name
            if not any(name in parameter.opts for parameter in self.params):
                raise
            where = f"asyncdist store {name} ... {ctx.invoked_subcommand}"
            raise click.UsageError(f"{name} goes before the command: {where} ...", error.ctx) from None


def _key_argument(text: str) -> str:
    """Return the key as the store's methods take it: the `type` of a click argument."""
    try:
        return decoded_key(unescaped(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}.") from error


def _key_text(key: str) -> str:
    """Return `key` as a command shows it, and takes it."""
    return escaped(encoded_key(key))


def _printable(text: str) -> str:
    """Return `text` with escapes, as in Python, for what is no visible character."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@click.group("store", cls=_StoreGroup)
@store_options
def store_group(target: Target) -> None:
    r"""Look into a running store: its keys, and who waits for what.

    A key may be any bytes. All commands read and print keys in one form: \xHH is a byte that is no visible text, \\ is
    a backslash, and all else is UTF-8 and stands for itself.
    """
    click.get_current_context().obj = target


@store_group.command("get")
@click.argument("key", type=_key_argument)
@click.pass_obj
def get_command(target: Target, key: str) -> None:
    """Print the value of KEY, waiting for it until the time-out. On a terminal a new line follows it."""
    value = target.run(lambda store: store.get(key))
    click.echo(value, nl=sys.stdout.isatty())


@store_group.command("set")
@click.argument("key", type=_key_argument)
@click.argument("value")
@click.pass_obj
def set_command(target: Target, key: str, value: str) -> None:
    """Store VALUE under KEY. A VALUE of - is read from standard input."""
    data = sys.stdin.buffer.read() if value == "-" else value.encode(errors="surrogateescape")
    target.run(lambda store: store.set(key, data))


@store_group.command("add", context_settings={"ignore_unknown_options": True})
@click.argument("key", type=_key_argument)
@click.argument("amount", type=int, default=1)
@click.pass_obj
def add_command(target: Target, key: str, amount: int) -> None:
    """Add AMOUNT to the counter KEY and print the sum. AMOUNT is 1 unless given, and may be negative."""
    click.echo(target.run(lambda store: store.add(key, amount)))


@store_group.command("wait")
@click.argument("keys", nargs=-1, required=True, type=_key_argument)
@click.pass_obj
def wait_command(target: Target, keys: tuple[str, ...]) -> None:
    """Wait until all KEYS exist. Fails with those still missing when the time-out ends."""
    target.run(lambda store: store.wait(keys))


@store_group.command("del")
@click.argument("keys", nargs=-1, required=True, type=_key_argument)
@click.pass_obj
def del_command(target: Target, keys: tuple[str, ...]) -> None:
    """Delete KEYS and print how many of them existed."""

    async def delete(store: Store) -> list[bool]:
        return [await store.delete_key(key) for key in keys]

    click.echo(sum(target.run(delete)))


@store_group.command("ls")
@click.argument("prefix", default="", type=_key_argument)
@click.option("--all-namespaces", is_flag=True, help="List those of all jobs: NAMESPACE, a tab, and the key.")
@click.pass_obj
def ls_command(target: Target, prefix: str, all_namespaces: bool) -> None:
    """Print the keys that begin with PREFIX, sorted, one a line."""

    def show(each: Target, before: str) -> None:
        for key in sorted(each.run(lambda store: store.list_keys(prefix))):
            click.echo(before + _key_text(key))

    if not all_namespaces:
        show(target, "")
        return
    for name in sorted(each.name for each in target.run(lambda store: store.namespaces(), StoreObserver)):
        show(dataclasses.replace(target, namespace=name), f"{_printable(name)}\t")


@store_group.command("watch")
@click.argument("prefix", default="", type=_key_argument)
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
                click.echo(f"watching '{_key_text(prefix)}' from revision {events.revision}", err=True)
            async for event in events:
                text = event.value.decode(errors="replace")
                key = _key_text(event.key)
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


@store_group.command("status")
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


@store_group.command("waits")
@click.option("--all-namespaces", is_flag=True, help="Show clients of all jobs, not only of the namespace.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def waits_command(target: Target, all_namespaces: bool, as_json: bool) -> None:
    """Print who waits for which keys, and how long; longest first. Ask this first when a job hangs."""
    found = target.run(lambda store: store.waits(all_namespaces=all_namespaces), StoreObserver)
    waits = [dataclasses.replace(wait, keys=tuple(map(_key_text, wait.keys))) for wait in found]
    if as_json:
        click.echo(json.dumps([{name: getattr(wait, name) for name in wait.__slots__} for wait in waits]))
        return
    if not waits:
        click.echo("nobody waits")
    for wait in waits:
        click.echo(_sentence(wait, all_namespaces))
    if not any(wait.for_keys for wait in waits):
        click.echo("no key is waited for; ask `asyncdist why` which ranks wait for each other", err=True)


@store_group.command("namespaces")
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
        click.echo(_printable(f"{each.keys:9,} keys {each.queues:6,} queues {each.clients:6,} clients  {name}"))


@store_group.command("clients")
@click.option("--all-namespaces", is_flag=True, help="Show clients of all jobs, not only of the namespace.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def clients_command(target: Target, all_namespaces: bool, as_json: bool) -> None:
    """Print who is connected, or was until a moment ago; by rank."""
    found = target.run(lambda store: store.clients(all_namespaces=all_namespaces), StoreObserver)
    found.sort(key=lambda each: (each.namespace, each.rank is None, each.rank or 0, each.client))
    if as_json:
        click.echo(json.dumps(list(map(dataclasses.asdict, found))))
        return
    for each in found:
        rank = "" if each.rank is None else f"rank {each.rank}"
        state = "connection lost" if each.away else f"{each.waits} waiting" if each.waits else ""
        namespace = f"of {each.namespace or 'the default namespace'}" if all_namespaces else ""
        fields = f"{rank:9} {each.client:24} {each.address:22} {state:16} {namespace}"
        click.echo(_printable(fields.rstrip()))


def _sentence(wait: WaitingClient, with_namespace: bool) -> str:
    rank = "" if wait.rank is None else f"rank {wait.rank}, "
    namespace = f" of {wait.namespace or 'the default namespace'}" if with_namespace else ""
    who = ", ".join(part for part in (wait.client, wait.address) if part)
    return _printable(f"{wait.waited:9.1f} s  {wait.operation} {', '.join(wait.keys)}  ({rank}{who}{namespace})")


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return str(timedelta(seconds=round(value))) if name.endswith("_s") else str(value)
