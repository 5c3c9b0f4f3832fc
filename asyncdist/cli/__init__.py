"""The command line, `asyncdist`. Commands are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Final

import click

from asyncdist_server.descriptors import open_standard_descriptors

__all__ = ["main"]

_COMMANDS: Final = {
    "explain": ("asyncdist.cli.explain_command", "explain_command"),
    "run": ("asyncdist.cli.run_command", "run_command"),
    "simulate": ("asyncdist.cli.simulate_command", "simulate_command"),
    "store": ("asyncdist.cli.store_commands", "store_group"),
    "token": ("asyncdist.cli.token_command", "token_command"),
    "tune": ("asyncdist.cli.tune_command", "tune_command"),
}


class _LazyGroup(click.Group):
    """Imports a command's module when the command is asked for, so that `asyncdist run` starts quickly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="asyncdist", prog_name="asyncdist")
def main() -> None:
    """Distributed communication for asyncio: launch workers, look into a store, measure and explain collectives."""
    open_standard_descriptors()
