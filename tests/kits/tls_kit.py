"""Certificates for tests, made by the openssl command: an authority, servers and clients, good ones and others."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from asyncdist.store import TLSConfig

OPENSSL = shutil.which("openssl")
WHY_NOT = "needs the openssl command to make certificates"


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority in a directory; its keys are elliptic, so that a hundred certificates take seconds."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.cert = folder / f"{name}.pem"
        self.key = folder / f"{name}.key"
        self._made = 0
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", "-x509", *curve, "-keyout", self.key, "-out", self.cert, "-subj", f"/CN=test {name}")

    def issue(self, name: str, alternatives: str = "", *, days: int = 2) -> Identity:
        """Make a certificate for `alternatives` (`DNS:host,IP:10.0.0.1`); with negative `days` it has expired."""
        identity = Identity(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", *curve, "-keyout", identity.key, "-out", request, "-subj", f"/CN={name}")
        extensions.write_text(f"subjectAltName={alternatives}\n" if alternatives else "")
        self._made += 1
        signer = ("-CA", self.cert, "-CAkey", self.key, "-set_serial", str(self._made))
        _openssl("x509", "-req", "-in", request, *signer, "-days", str(days), "-extfile", extensions,
                 "-out", identity.cert)  # fmt: skip
        return identity


@dataclass(frozen=True)
class Certificates:
    """What the tests of one session share."""

    ca: Path
    other_ca: Path
    server: Identity
    """For localhost, 127.0.0.1 and ::1."""
    other_host: Identity
    expired: Identity
    client: Identity
    other_client: Identity
    """Of the other authority."""

    def client_config(self, **changes: object) -> TLSConfig:
        """What a client without a certificate needs."""
        return TLSConfig(**{"ca_file": self.ca, **changes})  # type: ignore[arg-type]

    @property
    def mutual(self) -> TLSConfig:
        """What a client needs that must have a certificate."""
        return self.client_config(cert_file=self.client.cert, key_file=self.client.key)


def make_certificates(folder: Path) -> Certificates:
    """Make them all; about a second."""
    authority, other = Authority(folder), Authority(folder, "other-ca")
    here = "DNS:localhost,IP:127.0.0.1,IP:::1"
    return Certificates(
        authority.cert,
        other.cert,
        authority.issue("server", here),
        authority.issue("other-host", "DNS:node0.example"),
        authority.issue("expired", here, days=-1),
        authority.issue("client"),
        other.issue("other-client"),
    )


def _openssl(*arguments: object) -> None:
    assert OPENSSL is not None
    done = subprocess.run([OPENSSL, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
