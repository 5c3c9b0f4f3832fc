"""The command line, `asyncdist`. Commands are imported when they are used."""

from __future__ import annotations

import difflib
import importlib
from typing import Final

import click
from click.shell_completion import get_completion_class

from asyncdist_server.serving.sockets import open_standard_descriptors

__all__ = ["SuggestingGroup", "completion_command", "main", "token_command"]

_COMMANDS: Final = {
    "completion": ("asyncdist.cli", "completion_command"),
    "doctor": ("asyncdist.cli.why_commands", "doctor_command"),
    "explain": ("asyncdist.cli.explain_command", "explain_command"),
    "flight-record": ("asyncdist.cli.flight_record_command", "flight_record_command"),
    "manifest": ("asyncdist.cli.manifest_command", "manifest_group"),
    "ps": ("asyncdist.cli.job_commands", "ps_command"),
    "run": ("asyncdist.cli.run_command", "run_command"),
    "simulate": ("asyncdist.cli.simulate_command", "simulate_command"),
    "stacks": ("asyncdist.cli.job_commands", "stacks_command"),
    "store": ("asyncdist.cli.store_commands", "store_group"),
    "token": ("asyncdist.cli", "token_command"),
    "top": ("asyncdist.cli.job_commands", "top_command"),
    "trace": ("asyncdist.cli.trace_command", "trace_command"),
    "tune": ("asyncdist.cli.tune_command", "tune_command"),
    "why": ("asyncdist.cli.why_commands", "why_command"),
}


class SuggestingGroup(click.Group):
    """Says which command is meant by a misspelt name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As the base class, with that hint."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            for near in difflib.get_close_matches(args[0], self.list_commands(ctx), 1):
                raise click.UsageError(f"{error.message} Did you mean {near}?", ctx) from None
            raise


class _LazyGroup(SuggestingGroup):
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


@click.command("token", short_help="Print a new token for ASYNCDIST_TOKEN.")
def token_command() -> None:
    """Print a new token: 256 random bits, for ASYNCDIST_TOKEN or a file named by ASYNCDIST_TOKEN_FILE."""
    from asyncdist_server.wire.auth import new_token

    click.echo(new_token())


@click.command("completion", short_help="Print what makes a shell complete commands and options.")
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
def completion_command(shell: str) -> None:
    """Print the completions for SHELL, of asyncdist and asyncdist-server.

    In ~/.bashrc or ~/.zshrc: eval "$(asyncdist completion bash)". For fish: asyncdist completion fish >
    ~/.config/fish/conf.d/asyncdist.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    for name in ("asyncdist", "asyncdist-server"):
        click.echo(kind(main, {}, name, f"_{name.replace('-', '_').upper()}_COMPLETE").source())
