"""What torchrun has and `asyncdist run` has not: options that are taken and unused, and those refused with a hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

__all__ = ["TorchrunCommand", "unused_options"]

Command = Callable[..., Any]

_HINTS: Final = {
    "--logs-specs": "it names a plugin of torch's; --log-dir, --redirects and --tee say where output goes",
    "--event-log-handler": "it names a plugin of torch's; what happens to the job is said on stderr",
    "--numa-binding": "bind in the script, by LOCAL_RANK, or start the workers with --no-python numactl",
}


class TorchrunCommand(click.Command):
    """A command that says what to do instead of an option that only torchrun has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name == "-n":  # of -np as well
                raise click.UsageError("mpiexec's -n is --nproc-per-node here.", ctx) from None
            hint = _HINTS.get(error.option_name.replace("_", "-"))
            if hint is None:
                raise
            raise click.UsageError(f"asyncdist run has no {error.option_name}, as torchrun has: {hint}.", ctx) from None


def unused_options(command: Command) -> Command:
    """Give a command the options that torchrun's users write out of habit, hidden, and let none of them reach it."""

    def quiet(ctx: click.Context, param: click.Parameter, value: object) -> None:
        """Parsed and checked, no more."""

    for option in (
        click.option("--rdzv-backend", type=click.Choice(["static", "c10d"]), **_hidden(quiet)),
        click.option("--monitor-interval", type=float, **_hidden(quiet)),
        click.option("--start-method", **_hidden(quiet)),
        click.option("--use-env", is_flag=True, **_hidden(quiet)),
        click.option("--run-path", is_flag=True, **_hidden(quiet)),
    ):
        command = option(command)
    return command


def _hidden(callback: Callable[..., None]) -> dict[str, Any]:
    return {"hidden": True, "expose_value": False, "callback": callback, "help": "Taken, as torchrun does, and unused."}
