"""`asyncdist-server`: the command line of the daemon. Every option also reads ASYNCDIST_SERVER_<OPTION>."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, Final

import click

from asyncdist_server.journal import journal_thread
from asyncdist_server.journal.journal import JournalError, parse_durability
from asyncdist_server.logs import FORMATS, LEVELS, EventLog, LogFormat, configure
from asyncdist_server.ops.backups import backup, restore, verify
from asyncdist_server.ops.service import run_until_signalled
from asyncdist_server.serving.busy_poll import DEFAULT_BUSY_POLL_US
from asyncdist_server.serving.config import (
    DEFAULT_PORT,
    DRAIN_TIMEOUT_S,
    STALL_TIMEOUT_S,
    TORCH_LINGER_S,
    ConfigError,
    ServerConfig,
    limits_for,
)
from asyncdist_server.serving.sockets import open_standard_descriptors, raise_descriptor_limit
from asyncdist_server.serving.threaded import new_event_loop
from asyncdist_server.serving.user_token import default_token
from asyncdist_server.torch.namespaces import TORCH_MEMORY_PERCENT
from asyncdist_server.wire import auth
from asyncdist_server.wire.messages import (
    MAX_CONNECTIONS,
    MAX_IN_FLIGHT,
    MAX_KEY_BYTES,
    MAX_MEMORY_BYTES,
    MAX_VALUE_BYTES,
    MAX_WAITERS,
)

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)
_LIMITS: Final = ("value_bytes", "key_bytes", "memory_bytes", "connections", "waiters", "in_flight")
"""The options that begin with `max_`, without that."""
_SETTINGS: Final = {
    "torch_port": "torch_ports",
    "torch_linger": "torch_linger_s",
    "stall_timeout": "stall_timeout_s",
    "handshake_timeout": "handshake_timeout_s",
    "drain_timeout": "drain_timeout_s",
    "busy_poll": "busy_poll_us",
}
"""The options that `ServerConfig` has under another name."""


@click.group(
    invoke_without_command=True,
    context_settings={
        "auto_envvar_prefix": "ASYNCDIST_SERVER",
        "show_default": True,
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(package_name="asyncdist", prog_name="asyncdist-server")
@click.option("--host", default="127.0.0.1", help="Address to listen on; any but loopback needs a token.")
@click.option("--port", default=DEFAULT_PORT, type=click.IntRange(0, 65535), help="Port; 0 picks a free one.")
@click.option("--http-host", default="127.0.0.1", help="Address of the HTTP port.")
@click.option(
    "--http-port",
    default=None,
    type=click.IntRange(0, 65535),
    help="Port for /readyz and /metrics; none unless given, 0 is free.",
)
@click.option(
    "--token-file",
    default=None,
    type=_FILE,
    help="File with the token, else ASYNCDIST_TOKEN, else the file ASYNCDIST_TOKEN_FILE, else on loopback a token of "
    "this user's, which is made and kept in the runtime directory.",
)
@click.option("--insecure-no-auth", is_flag=True, help="Serve without a token.")
@click.option("--tls-cert", default=None, type=_FILE, help="Certificate chain in PEM: clients must use TLS.")
@click.option("--tls-key", default=None, type=_FILE, help="Its key, unless that is in the same file.")
@click.option("--tls-ca", default=None, type=_FILE, help="Clients must have a certificate of this authority.")
@click.option(
    "--durability",
    default="memory",
    help="What an answer means: memory, durable (the change is on disk), or relaxed:<ms> (it will be that soon).",
)
@click.option("--data-dir", default=None, type=_DIRECTORY, help="Where the data is kept, unless in memory.")
@click.option("--torch", is_flag=True, help="Serve torch.distributed's TCPStore clients on the same port.")
@click.option(
    "--torch-port",
    multiple=True,
    type=click.IntRange(0, 65535),
    help="One more port for torch clients, with keys of its own; may be given several times.",
)
@click.option(
    "--torch-linger", default=TORCH_LINGER_S, help="Seconds for which torch clients' keys outlive the last client."
)
@click.option(
    "--torch-insecure-no-auth", is_flag=True, help="Serve torch clients beyond loopback: they cannot prove a token."
)
@click.option(
    "--torch-memory-percent",
    default=TORCH_MEMORY_PERCENT,
    type=click.IntRange(1, 100),
    help="What torch clients may take of --max-memory-bytes.",
)
@click.option("--max-key-bytes", default=MAX_KEY_BYTES, help="Longest key.")
@click.option("--max-value-bytes", default=MAX_VALUE_BYTES, help="Longest value; frames may be 1 MiB longer.")
@click.option(
    "--max-memory-bytes", default=MAX_MEMORY_BYTES, help="Keys, values, queues and blocked requests together."
)
@click.option("--max-connections", default=MAX_CONNECTIONS, help="Connections at a time.")
@click.option("--max-waiters", default=MAX_WAITERS, help="Blocked requests of all clients.")
@click.option("--max-in-flight", default=MAX_IN_FLIGHT, help="Unacknowledged requests of one client.")
@click.option(
    "--stall-timeout", default=STALL_TIMEOUT_S, help="Seconds after which a client that reads nothing is cut off."
)
@click.option("--handshake-timeout", default=5.0, help="Seconds in which a client must prove itself.")
@click.option("--drain-timeout", default=DRAIN_TIMEOUT_S, help="Seconds a stopping daemon waits for its last readers.")
@click.option(
    "--busy-poll",
    default=DEFAULT_BUSY_POLL_US,
    help="Microseconds the daemon looks for the next request after an answer before it sleeps; 0: never.",
)
@click.option("--log-format", default="text", type=click.Choice(FORMATS), help="How log lines on stderr look.")
@click.option("--log-level", default="info", type=click.Choice(LEVELS), help="Least important lines to write.")
def main(token_file: Path | None, log_format: LogFormat, log_level: str, **options: Any) -> None:
    """Serve a store: the rendezvous of distributed jobs. Stops on SIGTERM or SIGINT.

    Every option can also be given as ASYNCDIST_SERVER_<OPTION>, in capitals and with underscores.
    """
    open_standard_descriptors()
    if click.get_current_context().invoked_subcommand is not None:
        return
    configure(log_format, log_level)
    _warn_of_unknown_variables()
    try:
        config = _config(token_file, **options)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    raise_descriptor_limit()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run_until_signalled(config))
    except (ConfigError, JournalError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _config(token_file: Path | None, **options: Any) -> ServerConfig:
    """Return the configuration that the options say. Raises OSError and ValueError."""
    token = auth.read_token_file(token_file) if token_file else auth.load_token(os.environ)
    token_file = token_file or auth.token_file(os.environ)
    former = auth.read_tokens(token_file)[1] if token_file else None
    if token is None and not options["insecure_no_auth"]:
        token = default_token(options["host"])
    limits = {name: options.pop(f"max_{name}") for name in _LIMITS}
    settings = {_SETTINGS.get(name, name): value for name, value in options.items()}
    settings["durability"] = parse_durability(settings["durability"])
    return ServerConfig(
        token=token, former_token=former, token_file=token_file, limits=limits_for(**limits), **settings
    )


for command in (backup, restore, verify):
    main.add_command(command)


def _warn_of_unknown_variables() -> None:
    """A misspelt variable would leave an option at its default without a word."""
    prefix = "ASYNCDIST_SERVER_"
    commands = tuple(f"{prefix}{name.upper()}_" for name in main.commands)
    known = {f"{prefix}{(parameter.name or '').upper()}" for parameter in main.params} | {
        journal_thread.FAILPOINT_VARIABLE
    }
    events = EventLog(logging.getLogger("asyncdist_server"))
    for name in sorted(os.environ):
        if name.startswith(prefix) and name not in known and not name.startswith(commands):
            events.warning("unknown_variable", variable=name, reason="no option has this name: see --help")
