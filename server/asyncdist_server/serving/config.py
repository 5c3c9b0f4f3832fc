"""How a store daemon is to run: addresses, token, limits, patience."""

from __future__ import annotations

import dataclasses
import math
import ssl
from pathlib import Path
from typing import Final

from asyncdist_server.journal.journal import MAX_JOURNALED_VALUE_BYTES, MEMORY, Durability
from asyncdist_server.serving.busy_poll import MAX_BUSY_POLL_US
from asyncdist_server.serving.sockets import connections_within, descriptor_limit, is_loopback
from asyncdist_server.torch.namespaces import TORCH_MEMORY_PERCENT
from asyncdist_server.wire.auth import HANDSHAKE_TIMEOUT_S, check_token, read_tokens
from asyncdist_server.wire.messages import FRAME_SLACK_BYTES, MAX_KEY_BYTES, Limits
from asyncdist_server.wire.tls import server_context

DEFAULT_PORT: Final = 29500
"""The port torchrun's users expect a rendezvous on."""
BACKLOG: Final = 4096
"""Connections the kernel accepts for us: thousands of ranks may start in the same instant."""
MAX_HALF_OPEN: Final = 4096
"""Connections that have not proven themselves yet; as many as the backlog, so that a starting job is never refused. One
more takes the place of the oldest from the address that has most."""
STALL_TIMEOUT_S: Final = 30.0
"""A client that has much to read and reads none of it for so long is cut off."""
DRAIN_TIMEOUT_S: Final = 2.0
"""How long a stopping daemon waits for its last replies to be read."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long a connection that the daemon ends stays half open, so that its last message is not lost to a reset."""

TORCH_LINGER_S: Final = 0.0
"""How long the keys of torch clients outlive the last of them. None at all, so that the next job finds none of them."""


class ConfigError(ValueError):
    """The configuration makes no sense or is not safe; the message is meant for the person who starts the daemon."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one daemon. Port 0 picks a free port; `http_port` None means no HTTP.

    `token` is what clients must prove, None for nothing; instead of it they may prove `former_token`, if there is one.
    `token_file` is where these were read, if they may change there.

    `torch` lets clients of torch.distributed's TCPStore use the same port, each of `torch_ports` is one more port with
    keys of its own for them. They cannot prove a token: they are served on loopback, elsewhere only with
    `torch_insecure_no_auth`. Their keys are removed `torch_linger_s` after the last client has left. All of them
    together take at most `torch_memory_percent` of the memory that `limits` allow.

    With `tls_cert` (a chain in PEM; `tls_key` where the key is in a file of its own) all but torch's clients must use
    TLS, with `tls_ca` they need a certificate signed by it.

    With a `durability` other than memory, all but torch's keys are kept in `data_dir`, which one daemon has to itself.

    For `busy_poll_us` microseconds after an answer the loop looks for the next request instead of sleeping. A daemon
    that shares its process with something else should not.

    Raises `ConfigError` for a token that is too short, and for limits that do not fit together.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = dataclasses.field(default=None, repr=False)
    former_token: str | None = dataclasses.field(default=None, repr=False)
    token_file: Path | None = None
    insecure_no_auth: bool = False
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    stall_timeout_s: float = STALL_TIMEOUT_S
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    torch: bool = False
    torch_ports: tuple[int, ...] = ()
    torch_linger_s: float = TORCH_LINGER_S
    torch_memory_percent: int = TORCH_MEMORY_PERCENT
    torch_insecure_no_auth: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    durability: Durability = MEMORY
    data_dir: Path | str | None = None
    busy_poll_us: float = 0.0

    def __post_init__(self) -> None:
        torch_ports = [("torch port", port) for port in self.torch_ports]
        for name, port in (("port", self.port), ("HTTP port", self.http_port or 0), *torch_ports):
            if not 0 <= port <= 65535:
                raise ConfigError(f"the {name} must be in 0..65535, not {port}")
        self._check_times()
        for limit, value in zip(self.limits._fields, self.limits, strict=True):
            if value <= 0:
                raise ConfigError(f"the limit {limit} must be positive, not {value}")
        if self.limits.key_bytes > MAX_KEY_BYTES:
            raise ConfigError(f"keys may have at most {MAX_KEY_BYTES} bytes, not {self.limits.key_bytes}")
        if self.limits.frame_bytes < self.limits.value_bytes + FRAME_SLACK_BYTES:
            raise ConfigError(f"a frame must hold a value of the largest size and {FRAME_SLACK_BYTES} bytes more")
        if self.limits.frame_bytes >= 2**32:
            raise ConfigError("a frame's length is a 32-bit number: values may have at most 4 GiB less 1 MiB")
        for token in (self.token, self.former_token):
            if token is not None:
                try:
                    check_token(token)
                except ValueError as error:
                    raise ConfigError(str(error)) from None
        if self.tls_cert is None and (self.tls_key or self.tls_ca):
            raise ConfigError("TLS needs the daemon's own certificate: give --tls-cert")
        if self.tls_cert is not None and self.torch:
            raise ConfigError("torch clients have no TLS: give them a port of their own with --torch-port, not --torch")

        self._check_durability()

    def _check_times(self) -> None:
        if not 0 <= self.torch_linger_s < math.inf:
            raise ConfigError(f"the linger time of torch keys must be a number of seconds, not {self.torch_linger_s}")
        if not 1 <= self.torch_memory_percent <= 100:
            raise ConfigError(f"torch's part of the memory must be 1 to 100 percent, not {self.torch_memory_percent}")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"the drain time-out must be a number of seconds, not {self.drain_timeout_s}")
        for name, value in (("handshake", self.handshake_timeout_s), ("stall", self.stall_timeout_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"the {name} time-out must be a positive number of seconds, not {value}")
        if not 0 <= self.busy_poll_us <= MAX_BUSY_POLL_US:
            raise ConfigError(
                f"busy polling takes microseconds from 0 (never) to {MAX_BUSY_POLL_US:g}, not {self.busy_poll_us:g}"
            )

    def _check_durability(self) -> None:
        if self.durability.journaled and self.data_dir is None:
            raise ConfigError(f"with durability {self.durability.name} the data needs a place: give --data-dir")
        if not self.durability.journaled and self.data_dir is not None:
            raise ConfigError("with durability memory nothing is kept in a data directory: give --durability durable")
        if self.durability.journaled and self.limits.value_bytes > MAX_JOURNALED_VALUE_BYTES:
            raise ConfigError(f"values that are kept on disk may have at most {MAX_JOURNALED_VALUE_BYTES} bytes")

    def read_tokens(self) -> tuple[str | None, str | None]:
        """Return `token` and `former_token`, read anew if there is a file, or raise `ConfigError` naming it and why."""
        try:
            return read_tokens(self.token_file) if self.token_file is not None else (self.token, self.former_token)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None

    def tls_context(self) -> ssl.SSLContext | None:
        """Read the files for TLS, None without TLS; raises `ConfigError` naming the file that is wrong."""
        if self.tls_cert is None:
            return None
        try:
            return server_context(self.tls_cert, self.tls_key, self.tls_ca)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def within_descriptors(self) -> ServerConfig:
        """Return these settings with no more connections than this process may have descriptors for."""
        connections = connections_within(descriptor_limit(), self.limits.connections)
        return dataclasses.replace(self, limits=self.limits._replace(connections=connections))

    def require_token_for(self, addresses: list[str]) -> None:
        """Raise `ConfigError` if one of the numeric `addresses` can be reached from elsewhere and there is no token."""
        if self.token is not None or self.insecure_no_auth:
            return
        for address in addresses:
            if not is_loopback(address):
                raise ConfigError(
                    f"refusing to listen on {address} without a token: everybody who can reach it could read and "
                    "change the store; set ASYNCDIST_TOKEN (`asyncdist token` makes one), listen on 127.0.0.1, or give "
                    "--insecure-no-auth"
                )


def limits_for(value_bytes: int, **others: int) -> Limits:
    """Return limits with the given largest value and a frame just large enough for it."""
    return Limits(frame_bytes=value_bytes + FRAME_SLACK_BYTES, value_bytes=value_bytes)._replace(**others)
