"""TLS around the store's bytes, without I/O: contexts from files, and one side of one connection.

    stream = TLSStream(context, server_side=False, server_hostname="node0")
    write(stream.start())                   # a server has nothing to say first
    plain = stream.receive(data); write(stream.take_records())
    write(stream.encrypt(plain))            # once stream.established
    write(stream.close())                   # the end is part of what is authenticated

What fails raises `ssl.SSLError`; `take_records` then gives the alert that tells the other side why. The token is proven
inside, as without TLS: TLS proves who the daemon is and hides what is said, the token proves who may come in.
"""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path
from typing import Final

MAX_TLS_HANDSHAKE_BYTES: Final = 64 * 1024
"""Most bytes of one side's TLS handshake. A chain of three certificates with large keys takes 10 KiB."""
CHUNK_BYTES: Final = 16 * 1024
"""What is encrypted or decrypted in one step: a record. OpenSSL's buffers never shrink, so they must not grow."""


class TLSStream:
    """One side of one TLS connection. See the module's docstring."""

    __slots__ = ("_handshake_bytes", "_incoming", "_object", "_outgoing", "ended", "established")

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, server_hostname: str | None = None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._handshake_bytes = 0
        self.established = False
        """Whether the handshake is done, as far as this side can tell."""
        self.ended = False
        """Whether the other side has said that nothing follows."""

    def start(self) -> bytes:
        """Return a client's first bytes."""
        self._shake_hands()
        return self._outgoing.read()

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take the other side's next bytes and return what they hold in the clear, maybe nothing."""
        view = memoryview(data)
        pieces: list[bytes] = []
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._incoming.write(chunk)
            if not self.established:
                self._handshake_bytes += len(chunk)
                self._shake_hands()
                if not self.established and self._handshake_bytes > MAX_TLS_HANDSHAKE_BYTES:
                    raise ssl.SSLError(f"a TLS handshake of more than {MAX_TLS_HANDSHAKE_BYTES} bytes")
            if self.established and not self.ended:
                self._decrypt(pieces)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def encrypt(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return `data` as records, after those that `take_records` has not given yet."""
        pieces = []
        with memoryview(data) as view, view.cast("B") as octets:
            position = 0
            while position < len(octets):
                position += self._object.write(octets[position : position + CHUNK_BYTES])
                pieces.append(self._outgoing.read())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def take_records(self) -> bytes:
        """Return what TLS itself has to say: handshake messages, alerts, new keys."""
        return self._outgoing.read()

    def close(self) -> bytes:
        """Return what tells the other side that nothing follows; nothing if the handshake was not completed."""
        if self.established:
            with contextlib.suppress(ssl.SSLError):  # it would like to hear the same from the other side
                self._object.unwrap()
        return self._outgoing.read()

    def _shake_hands(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._object.do_handshake()
            self.established = True

    def _decrypt(self, pieces: list[bytes]) -> None:
        try:
            while piece := self._object.read(CHUNK_BYTES):
                pieces.append(piece)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True


def server_context(cert_file: Path | str, key_file: Path | str | None, ca_file: Path | str | None) -> ssl.SSLContext:
    """Return the context of a daemon: its certificate chain, the key (None: in the same file), the clients' CA.

    With a CA every client must have a certificate of it. TLS 1.2 at least. Raises `ValueError` naming the file that
    cannot be read or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    context.num_tickets = 0  # no client resumes: connections live for the length of a job
    _load_chain(context, cert_file, key_file)
    if ca_file is not None:
        _load_authorities(context, ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    ca_file: Path | str | None, cert_file: Path | str | None, key_file: Path | str | None
) -> ssl.SSLContext:
    """Return the context of a client: who signs daemons (None: whom the system trusts), its own certificate if any.

    The host name is checked. TLS 1.2 at least. Raises `ValueError` naming the file that cannot be read or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    if ca_file is None:
        context.load_default_certs()
    else:
        _load_authorities(context, ca_file)
    if cert_file is not None:
        _load_chain(context, cert_file, key_file)
    return context


def describe_failure(error: ssl.SSLError) -> str:
    """Return what went wrong in words: OpenSSL's own, without its addresses of source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other side is refused: {error.verify_message}"
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else str(error.args[-1] if error.args else error)


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


def _load_chain(context: ssl.SSLContext, cert_file: Path | str, key_file: Path | str | None) -> None:
    for file in (cert_file, key_file):
        if file is not None:
            _check_readable(file)

    def refuse_password() -> str:
        raise ValueError(f"{key_file or cert_file}: the key is encrypted, and nobody is there to type a password")

    try:
        context.load_cert_chain(cert_file, key_file, refuse_password)
    except ssl.SSLError as error:
        files = cert_file if key_file is None else f"{cert_file} and {key_file}"
        raise ValueError(f"{files}: no certificate and its key in PEM ({describe_failure(error)})") from error


def _load_authorities(context: ssl.SSLContext, ca_file: Path | str) -> None:
    _check_readable(ca_file)
    try:
        context.load_verify_locations(ca_file)
    except ssl.SSLError as error:
        raise ValueError(f"{ca_file}: no certificates in PEM ({describe_failure(error)})") from error


def _check_readable(file: Path | str) -> None:
    """Raise with the file's name: OpenSSL's own error lacks it."""
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
