"""The store that a command talks to: the options that say which, and a connection."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from asyncdist.errors import DistError
from asyncdist.launch.config import Endpoint, parse_endpoint
from asyncdist.store import TCPStore, TLSConfig
from asyncdist.store.credentials import load_tls
from asyncdist_server.wire.auth import load_token, read_token_file

DEFAULT_TIMEOUT_S: Final = 10.0
"""A user waits at the keyboard."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """The store that the commands talk to, as it was given: what is missing is asked for when it is needed."""

    where: str | None
    namespace: str
    token_file: Path | None
    tls_options: dict[str, str]
    timeout_s: float

    @property
    def is_given(self) -> bool:
        """Whether options or environment say which store."""
        return bool(self.where or any(os.environ.get(name) for name in ("ASYNCDIST_STORE", "MASTER_ADDR")))

    def run_in(self, namespace: str, work: Callable[[TCPStore], Awaitable[T]]) -> T:
        """`run` for the keys of that job."""
        return dataclasses.replace(self, namespace=namespace).run(work)

    def _find(self) -> tuple[Endpoint, str | None, TLSConfig | None]:
        try:
            endpoint = parse_endpoint(self.where or _from_environment())
            token = read_token_file(self.token_file) if self.token_file else load_token(os.environ)
            return endpoint, token, load_tls({**os.environ, **self.tls_options})
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from error

    def run(self, work: Callable[[TCPStore], Awaitable[T]], kind: type[TCPStore] = TCPStore) -> T:
        """Connect, do `work` and close; failures end the command with their message."""
        endpoint, token, tls = self._find()

        async def main() -> T:
            async with kind(
                endpoint.host, endpoint.port, token=token, tls=tls, namespace=self.namespace, timeout=self.timeout_s
            ) as store:
                return await work(store)

        try:
            return asyncio.run(main())
        except (DistError, ValueError) as error:
            raise click.ClickException(str(error)) from error


def store_options(command: Callable[..., T], timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[..., T]:
    """Give a command these options, and call it with a `Target` as its first argument."""

    @functools.wraps(command)
    def with_target(
        *arguments: Any,
        where: str | None,
        namespace: str,
        token_file: Path | None,
        timeout: float,
        tls_ca: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_server_name: str | None,
        **options: Any,
    ) -> T:
        texts = {"CA": tls_ca, "CERT": tls_cert, "KEY": tls_key, "SERVER_NAME": tls_server_name}
        given = {f"ASYNCDIST_TLS_{name}": text for name, text in texts.items() if text}
        namespace = namespace or os.environ.get("ASYNCDIST_JOB_ID", "")
        return command(Target(where, namespace, token_file, given, timeout), *arguments, **options)

    limit = click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        default=timeout_s,
        show_default=True,
        help="Seconds that a command may take, connecting included.",
    )
    for option in (limit, *reversed(_OPTIONS)):
        with_target = option(with_target)
    return with_target


_OPTIONS: Final = (
    click.option(
        "--store", "where", metavar="HOST:PORT", help="The daemon; else ASYNCDIST_STORE, else MASTER_ADDR:MASTER_PORT."
    ),
    click.option("--namespace", default="", help="The job whose keys are meant; else ASYNCDIST_JOB_ID."),
    click.option(
        "--token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the daemon's token; else ASYNCDIST_TOKEN, else the file ASYNCDIST_TOKEN_FILE.",
    ),
    click.option(
        "--tls-ca",
        help="TLS: file with the CA certificates that daemons are signed with, or `system`; else ASYNCDIST_TLS_CA.",
    ),
    click.option("--tls-cert", help="TLS: certificate of this client; else ASYNCDIST_TLS_CERT."),
    click.option("--tls-key", help="TLS: its key; else ASYNCDIST_TLS_KEY."),
    click.option("--tls-server-name", help="TLS: name in the daemon's certificate; else ASYNCDIST_TLS_SERVER_NAME."),
)


def _from_environment() -> str:
    environment = os.environ
    if environment.get("ASYNCDIST_STORE"):
        return environment["ASYNCDIST_STORE"]
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        host = environment["MASTER_ADDR"].strip("[]")
        return f"{f'[{host}]' if ':' in host else host}:{environment['MASTER_PORT']}"
    raise ValueError("which store? give --store HOST:PORT, or set ASYNCDIST_STORE, or MASTER_ADDR and MASTER_PORT")
