"""Token and TLS of a client: as the caller gives them, else as the environment says."""

from __future__ import annotations

import enum
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from asyncdist_server.wire.auth import load_token
from asyncdist_server.wire.tls import client_context

TLS_VARIABLES: Final = (
    "ASYNCDIST_TLS_CA",
    "ASYNCDIST_TLS_CERT",
    "ASYNCDIST_TLS_KEY",
    "ASYNCDIST_TLS_SERVER_NAME",
)
SYSTEM: Final = "system"
"""What ASYNCDIST_TLS_CA says for the authorities that the system trusts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """Files in PEM for TLS to a store daemon. They are read at every connection, so that renewed ones are found.

    Args:
        ca_file: the certificates of those who may have signed the daemon's; None for all the system trusts.
        cert_file: this client's own certificate chain, for a daemon that was started with `--tls-ca`.
        key_file: its key; None if that is in `cert_file`.
        server_hostname: the name that the daemon's certificate must be valid for; None for the host connected to. Where
            that is an address, the certificate needs the address among its alternative names (`IP:10.0.0.7`), or this
            names one that it has.
    """

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None
    server_hostname: str | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("TLSConfig: key_file is the key of a certificate; give cert_file too")

    def context(self) -> ssl.SSLContext:
        """Return the context of a client. Raises ValueError naming the file that cannot be read or does not fit."""
        return client_context(self.ca_file, self.cert_file, self.key_file)

    def server_files(self) -> tuple[Path | str, Path | str | None]:
        """Return certificate and key for a store hosted by one of those that use it; ValueError without."""
        if self.cert_file is None:
            raise ValueError(
                "TLS is asked for (ASYNCDIST_TLS_CA), and a store hosted here has no certificate: set "
                "ASYNCDIST_TLS_CERT and ASYNCDIST_TLS_KEY to one for this host, or let ASYNCDIST_STORE name a daemon"
            )
        return self.cert_file, self.key_file


def load_tls(environ: Mapping[str, str] = os.environ) -> TLSConfig | None:
    """Return what the variables in `TLS_VARIABLES` say, None without ASYNCDIST_TLS_CA.

    Empty variables count as unset. ASYNCDIST_TLS_CA=system stands for the authorities that the system trusts. Raises
    ValueError if other variables are set without ASYNCDIST_TLS_CA, since TLS would not be used.
    """
    authority, cert, key, name = (environ.get(variable) or None for variable in TLS_VARIABLES)
    if authority is None:
        if cert or key or name:
            raise ValueError(
                "TLS needs ASYNCDIST_TLS_CA: the file with the certificate of the authority that signed the store's, "
                f"or {SYSTEM!r} for those that the system trusts"
            )
        return None
    if key and not cert:
        raise ValueError("ASYNCDIST_TLS_KEY is the key of a certificate; set ASYNCDIST_TLS_CERT too")
    return TLSConfig(
        ca_file=None if authority == SYSTEM else authority, cert_file=cert, key_file=key, server_hostname=name
    )


class FromEnvironment(enum.Enum):
    """Type of `FROM_ENVIRONMENT`, the default that means "what the ASYNCDIST_ variables say"."""

    FROM_ENVIRONMENT = "from the environment"

    def __repr__(self) -> str:
        return "FROM_ENVIRONMENT"


FROM_ENVIRONMENT: Final = FromEnvironment.FROM_ENVIRONMENT
GivenToken: TypeAlias = str | FromEnvironment | None
GivenTLS: TypeAlias = TLSConfig | ssl.SSLContext | FromEnvironment | None


def credentials(
    token: GivenToken, tls: GivenTLS, environ: Mapping[str, str] = os.environ
) -> tuple[str | None, TLSConfig | ssl.SSLContext | None]:
    """Return token and TLS of a client; raises ValueError and OSError for variables that cannot be followed."""
    if token is FROM_ENVIRONMENT:
        token = load_token(environ)
    if tls is FROM_ENVIRONMENT:
        tls = load_tls(environ)
    return token, tls
