"""`asyncdist token`: a new shared secret."""

from __future__ import annotations

import click

from asyncdist_server.wire.auth import new_token

__all__ = ["token_command"]


@click.command("token", short_help="Print a new token for ASYNCDIST_TOKEN.")
def token_command() -> None:
    """Print a new token: 256 random bits, for ASYNCDIST_TOKEN or a file named by ASYNCDIST_TOKEN_FILE."""
    click.echo(new_token())
