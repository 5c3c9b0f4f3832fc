"""Options of `asyncdist run`: those for output, those of torchrun that mean nothing here, and hints for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from asyncdist.launch.log_spec import LogSpec, parse_local_ranks, parse_needles, parse_streams

__all__ = ["TorchrunCommand", "output_options", "parsed_by", "to_log_spec", "unused_options"]

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


def parsed_by(
    parse: Callable[[str], object],
) -> Callable[[click.Context, click.Parameter, str | None], object]:
    """Return a callback for `click.option`; an option that was not given stays None."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def output_options(command: Command) -> Command:
    """Give a command the options; `to_log_spec` reads them."""
    for option in reversed(
        (
            click.option(
                "--log-dir",
                metavar="DIR",
                help="Directory of the logs: a folder for each run, in it one for each attempt, in that one for each "
                "local rank.",
            ),
            click.option(
                "-r",
                "--redirects",
                callback=parsed_by(parse_streams),
                metavar="STREAMS",
                default="0",
                help="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2.",
            ),
            click.option(
                "-t",
                "--tee",
                callback=parsed_by(parse_streams),
                metavar="STREAMS",
                default="0",
                help="Streams that go to files and to the terminal, written as for --redirects.",
            ),
            click.option(
                "--local-ranks-filter",
                callback=parsed_by(parse_local_ranks),
                metavar="RANKS",
                default="",
                help="Local ranks whose output may go to the terminal, as in 0,2. By default all.",
            ),
            click.option(
                "--duplicate-stdout-filters",
                callback=parsed_by(parse_needles),
                metavar="TEXTS",
                default="",
                help="Texts (a,b): lines of teed stdout that contain one of them are also collected in one file.",
            ),
            click.option(
                "--duplicate-stderr-filters",
                callback=parsed_by(parse_needles),
                metavar="TEXTS",
                default="",
                help="The same for teed stderr.",
            ),
        )
    ):
        command = option(command)
    return command


def to_log_spec(options: dict[str, Any]) -> LogSpec:
    """What the options say."""
    return LogSpec(
        log_dir=options["log_dir"] or None,
        redirects=options["redirects"],
        tee=options["tee"],
        shown_ranks=options["local_ranks_filter"],
        stdout_needles=options["duplicate_stdout_filters"],
        stderr_needles=options["duplicate_stderr_filters"],
    )
