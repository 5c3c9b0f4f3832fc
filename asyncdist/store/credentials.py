"""What a client proves itself with, and how it knows its daemon: as given, else as the environment says."""

from __future__ import annotations

import enum
import os
import ssl
from collections.abc import Mapping
from typing import Final, TypeAlias

from asyncdist.store.tls_config import TLSConfig, load_tls
from asyncdist_server.wire.auth import load_token

__all__ = ["FROM_ENVIRONMENT", "FromEnvironment", "GivenTLS", "GivenToken", "credentials"]


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
