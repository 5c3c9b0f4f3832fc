"""Options of `asyncdist run` that say where the workers' output goes, as torchrun has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from asyncdist.cli.parsed_by import parsed_by
from asyncdist.launch.log_spec import LogSpec, parse_local_ranks, parse_needles, parse_streams

__all__ = ["output_options", "to_log_spec"]

Command = Callable[..., Any]


def output_options(command: Command) -> Command:
    """Give a command the options; `to_log_spec` reads them."""
    for option in reversed(
        (
            click.option(
                "--log-dir",
                metavar="DIR",
                help="Where each run has a folder, with one for each attempt and in it one for each local rank.",
            ),
            click.option(
                "-r",
                "--redirects",
                callback=parsed_by(parse_streams),
                metavar="STREAMS",
                default="0",
                help="What goes to files only: 1 stdout, 2 stderr, 3 both, or by local rank, as in 0:3,1:2.",
            ),
            click.option(
                "-t",
                "--tee",
                callback=parsed_by(parse_streams),
                metavar="STREAMS",
                default="0",
                help="What goes to files and to the terminal, likewise.",
            ),
            click.option(
                "--local-ranks-filter",
                callback=parsed_by(parse_local_ranks),
                metavar="RANKS",
                default="",
                help="Local ranks whose output may go to the terminal, as in 0,2; by default all.",
            ),
            click.option(
                "--duplicate-stdout-filters",
                callback=parsed_by(parse_needles),
                metavar="TEXTS",
                default="",
                help="Lines of teed stdout with one of these texts (a,b) are also collected in one file.",
            ),
            click.option(
                "--duplicate-stderr-filters",
                callback=parsed_by(parse_needles),
                metavar="TEXTS",
                default="",
                help="... and of teed stderr.",
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
