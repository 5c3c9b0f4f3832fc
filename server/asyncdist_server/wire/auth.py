"""Tokens, the keys derived from them, and the handshake that proves a token in both directions.

One token is one trust domain: a process that has it may do everything. It is never sent. Each use derives a key of its
own (HKDF-SHA256, RFC 5869), so that a key leaked from one use opens no other. After the handshake the connection is
authenticated, not encrypted.

Handshake of a store connection; every message begins with an 8-byte header (magic, version, kind, detail):

    client -> server  HELLO      detail = 1 if the client has a token, 2 if it also takes a server that has none;
                                 32-byte nonce, length of context (u16), context
    server -> client  CHALLENGE  detail = 1 if the server has a token; 32-byte nonce, 32-byte proof of role "server"
    client -> server  PROOF      32-byte proof of role "client"
    server -> client  ACCEPTED
    either  ->        REFUSAL    detail = why; the connection is closed

A proof is HMAC-SHA256 over the role and the transcript: the whole HELLO (so version, token flag, client nonce and
context, which holds job and rank) and the server's nonce. The roles differ, so a proof cannot be sent back as one's
own. Without a token (meant for loopback only) the same messages flow, under the key of an empty token and with both
flags 0: the flags make a client with a token meeting a server without one, or the reverse, an error that both sides
can name. A client that was given no token has its user's, for servers that ask for one: it says 2, and uses the empty
token with a server whose flag is 0.

The end of a client's nonce is a proof of role "hint" over its random beginning. A server whose token is being changed
knows by it that a client has the former one; to all others it is as random as the rest. Without it the server takes
its newest, as it has to prove itself first.

Peer connections between ranks have their own messages and use `proof` and `verify_proof`.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import math
import secrets
import string
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncdist_server.wire.messages import MAX_NAMESPACE_BYTES

HANDSHAKE_VERSION: Final = 1
MAGIC: Final = b"\xadDST"
"""Not ASCII, not 0: neither HTTP nor torch's store clients begin like this."""
TLS_HANDSHAKE_BYTE: Final = 0x16
"""The first byte of a TLS client, and of a TLS server that goes on with it."""
TLS_ALERT_BYTE: Final = 0x15
"""The first byte of a TLS server that refuses what it was sent, plain text for example."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
"""How long a connection may stay unauthenticated."""
MAX_HANDSHAKE_BYTES: Final = 1024
"""Most bytes taken from a side that has not proven itself."""
MAX_CONTEXT_BYTES: Final = 512
"""Longest context in a HELLO: a namespace, a rank, and room for what later versions add."""
MIN_TOKEN_CHARACTERS: Final = 22
"""128 bits in urlsafe base64; anything shorter could be searched offline, for which to ask a server once is enough."""
MIN_TOKEN_BITS: Final = 100
"""What `_strength_bits` must give: a random token of 22 characters has it, one that repeats itself has not."""
TOKEN_BYTES: Final = 32
NONCE_BYTES: Final = 32
HINT_BYTES: Final = 8
"""The part of a client's nonce that says which token it has; the other 24 bytes are random."""
PROOF_BYTES: Final = 32

MAX_SHOWN_ANSWER_BYTES: Final = 80
"""What a message shows of the answer of a server that is no store."""

STORE_PURPOSE: Final = "store"

_ALPHABETS: Final = (
    string.digits,
    "0123456789abcdef",
    "0123456789ABCDEF",
    string.ascii_lowercase,
    string.ascii_uppercase,
    string.ascii_lowercase + string.digits,
    string.ascii_letters + string.digits + "-_",
)

_HEADER: Final = struct.Struct(">4sHBB")
_LENGTH: Final = struct.Struct(">H")
_HELLO_FIXED_BYTES: Final = _HEADER.size + NONCE_BYTES + _LENGTH.size


class _Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    ACCEPTED = 4
    REFUSAL = 5


class _Flag(enum.IntEnum):
    """What the detail of a HELLO or a CHALLENGE says of the sender's token."""

    NONE = 0
    TOKEN = 1
    EITHER = 2  # of a client only


class Refusal(enum.IntEnum):
    """Why a handshake failed, as sent in a REFUSAL."""

    MALFORMED = 1
    VERSION = 2
    TOKEN_REQUIRED = 3
    NO_TOKEN = 4
    WRONG_TOKEN = 5
    TIMEOUT = 6
    TOO_MANY_CONNECTIONS = 7
    NOT_A_STORE = 8  # never sent: the other side does not speak this protocol at all
    TLS_REQUIRED = 9
    NO_TLS = 10


_REASONS: Final[Mapping[Refusal, str]] = {
    Refusal.MALFORMED: "a handshake message breaks the protocol",
    Refusal.VERSION: "client and server speak different versions of the handshake",
    Refusal.TOKEN_REQUIRED: "the server requires a token and the client has none; set ASYNCDIST_TOKEN or "
    "ASYNCDIST_TOKEN_FILE to the token that the server was started with",
    Refusal.NO_TOKEN: "the client has a token and the server was started without one; start the server with the same "
    "ASYNCDIST_TOKEN, or unset it on the client",
    Refusal.WRONG_TOKEN: "the tokens of client and server differ; both read ASYNCDIST_TOKEN or ASYNCDIST_TOKEN_FILE",
    Refusal.TIMEOUT: "the handshake was not completed in time",
    Refusal.TOO_MANY_CONNECTIONS: "the server has reached its limit of connections",
    Refusal.NOT_A_STORE: "the other side does not speak asyncdist's store protocol",
    Refusal.TLS_REQUIRED: "the server requires TLS and the client came without; set ASYNCDIST_TLS_CA to the file with "
    "the certificate of the authority that signed the server's, or give tls=",
    Refusal.NO_TLS: "the client came with TLS and the server has none; start the server with --tls-cert and --tls-key, "
    "or unset ASYNCDIST_TLS_CA on the client",
}


class AuthenticationError(Exception):
    """The handshake failed; close the connection after sending `farewell`, which tells the other side why.

    `refusal` says what happened, and `by_peer` is true if the other side said so. `reason` says it to people who are to
    be told more than that.
    """

    def __init__(self, refusal: Refusal, *, by_peer: bool = False, detail: str = "", reason: str = "") -> None:
        super().__init__((reason or _REASONS[refusal]) + (f" ({detail})" if detail else ""))
        self.refusal = refusal
        self.by_peer = by_peer
        silent = by_peer or refusal is Refusal.NOT_A_STORE
        self.farewell = b"" if silent else refusal_message(refusal)


def new_token() -> str:
    """Return a new token: 256 random bits as urlsafe text."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def check_token(token: str) -> str:
    """Return `token`; raises `ValueError` if it is too short or too regular. The message never shows the token."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"the token has {len(token)} characters, at least {MIN_TOKEN_CHARACTERS} are needed for 128 bits; "
            "`asyncdist token` makes a good one"
        )
    if _strength_bits(token) < MIN_TOKEN_BITS:
        raise ValueError(
            "the token repeats itself or has few different characters, so it could be guessed; `asyncdist token` makes "
            "a good one"
        )
    return token


def _strength_bits(token: str) -> float:
    """Return what a random token is worth that has as many different runs of three characters, of such an alphabet."""
    runs = {token[start : start + 3] for start in range(len(token) - 2)}
    alphabet = next((letters for letters in _ALPHABETS if set(token) <= set(letters)), _ALPHABETS[-1])
    return (len(runs) + 2) * math.log2(len(alphabet))


def derive_key(token: str | None, purpose: str, context: bytes = b"") -> bytes:
    """Return the 32-byte key of `token` for one purpose ("store", "peer", ...) and context (a run's id, ...).

    HKDF-SHA256. None gives the key of "no authentication", which everybody can compute.
    """
    extracted = hmac.digest(b"asyncdist key derivation v1", (token or "").encode(), hashlib.sha256)
    # One block of HKDF-Expand, as the key is just as long as the hash.
    return hmac.digest(extracted, _joined(purpose.encode(), context) + b"\x01", hashlib.sha256)


def derive_token(token: str, purpose: str, context: bytes = b"") -> str:
    """Return a token that `token` implies but that does not reveal it: what a launcher hands to a run's workers."""
    return base64.urlsafe_b64encode(derive_key(token, purpose, context)).rstrip(b"=").decode()


def proof(key: bytes, role: str, *transcript: bytes) -> bytes:
    """Return the proof that `role` knows `key`: 32 bytes over the parts of `transcript`, each with its length."""
    return hmac.digest(key, _joined(role.encode(), *transcript), hashlib.sha256)


def verify_proof(key: bytes, claimed: bytes, role: str, *transcript: bytes) -> bool:
    """Return whether `claimed` is what `proof` gives, in a time that does not depend on where they differ."""
    return hmac.compare_digest(proof(key, role, *transcript), claimed)


def _client_nonce(key: bytes, random: bytes) -> bytes:
    return random + proof(key, "hint", random)[:HINT_BYTES]


def store_context(namespace: str, rank: int | None = None) -> bytes:
    """Return the context of a store client: its namespace (job) and rank, None for tools that have no rank.

    Raises `ValueError` for a namespace longer than `MAX_NAMESPACE_BYTES` in UTF-8, or a negative rank.
    """
    name = namespace.encode()
    if len(name) > MAX_NAMESPACE_BYTES:
        raise ValueError(f"the namespace has {len(name)} bytes, allowed are {MAX_NAMESPACE_BYTES}")
    if rank is not None and not 0 <= rank < 2**31:
        raise ValueError(f"rank must be in 0..2**31-1, not {rank}")
    return f"{'' if rank is None else rank}/".encode() + name


def parse_store_context(context: bytes) -> tuple[str, int | None]:
    """Return namespace and rank of `store_context`; raises `ValueError` for bytes it would not produce."""
    rank_text, slash, name = context.partition(b"/")
    if not slash or len(name) > MAX_NAMESPACE_BYTES or not (rank_text == b"" or rank_text.isdigit()):
        raise ValueError("not the context of a store client")
    rank = int(rank_text) if 0 < len(rank_text) <= 10 else None
    namespace = name.decode()  # UnicodeDecodeError is a ValueError
    if store_context(namespace, rank) != context:
        raise ValueError("not the context of a store client")
    return namespace, rank


def refusal_message(refusal: Refusal) -> bytes:
    """Return the message that tells the other side why its connection is closed."""
    return _HEADER.pack(MAGIC, HANDSHAKE_VERSION, _Kind.REFUSAL, refusal)


def http_answer(said: bytes | bytearray) -> str:
    """Return what an HTTP server says at the beginning of `said`, for people; empty if it is no such server."""
    if not said.startswith(b"HTTP/"):
        return ""
    line = bytes(said).splitlines()[0][:MAX_SHOWN_ANSWER_BYTES].decode("ascii", "replace")
    return f"an HTTP server answered: {''.join(filter(str.isprintable, line))}"


class _Handshake:
    """What both sides share: the key, a bounded buffer, and reading headers."""

    def __init__(self, token: str | None, purpose: str) -> None:
        self.token = token
        self._key = derive_key(token, purpose)
        self._buffer = bytearray()
        self.done = False

    @property
    def leftover(self) -> bytes:
        """Bytes that followed the handshake in what was received; meaningful once `done`."""
        return bytes(self._buffer)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
            raise self._stranger(self._buffer[0])
        if len(self._buffer) > MAX_HANDSHAKE_BYTES:
            raise AuthenticationError(Refusal.MALFORMED, detail=f"more than {MAX_HANDSHAKE_BYTES} bytes")

    def _stranger(self, first_byte: int) -> AuthenticationError:
        """Say what the other side is that begins with such a byte."""
        return AuthenticationError(Refusal.NOT_A_STORE)

    def _header(self, expected: _Kind, most: int = 0) -> int | None:
        """Return the detail, at most `most`, of the header at the buffer's start, None while it is incomplete."""
        if len(self._buffer) < _HEADER.size:
            return None
        _, version, kind, detail = _HEADER.unpack_from(self._buffer)
        if kind == _Kind.REFUSAL:
            known = detail in Refusal.__members__.values()
            raise AuthenticationError(Refusal(detail) if known else Refusal.MALFORMED, by_peer=True)
        if version != HANDSHAKE_VERSION:
            raise AuthenticationError(
                Refusal.VERSION, detail=f"the other side speaks {version}, this one {HANDSHAKE_VERSION}"
            )
        if kind != expected:
            raise AuthenticationError(Refusal.MALFORMED, detail=f"message kind {kind} instead of {int(expected)}")
        if detail > most:
            raise AuthenticationError(Refusal.MALFORMED, detail=f"detail {detail} of message kind {kind}")
        return int(detail)


class ClientHandshake(_Handshake):
    """The client's side: send `start()`, then what each `receive` returns, until `done`.

    `context` is what the server shall know and what the proof covers, at most `MAX_CONTEXT_BYTES`. With `optional` a
    server that has no token is taken as well; `token` is then None.
    """

    def __init__(
        self, token: str | None, context: bytes, purpose: str = STORE_PURPOSE, *, optional: bool = False
    ) -> None:
        super().__init__(token, purpose)
        self._flag = _Flag.NONE if token is None else _Flag.EITHER if optional else _Flag.TOKEN
        if len(context) > MAX_CONTEXT_BYTES:
            raise ValueError(f"the context has {len(context)} bytes, allowed are {MAX_CONTEXT_BYTES}")
        header = _HEADER.pack(MAGIC, HANDSHAKE_VERSION, _Kind.HELLO, self._flag)
        nonce = _client_nonce(self._key, secrets.token_bytes(NONCE_BYTES - HINT_BYTES))
        self._hello = header + nonce + _LENGTH.pack(len(context)) + context
        self._no_key = derive_key(None, purpose)
        self._proven = False

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._hello

    def receive(self, data: bytes) -> bytes:
        """Take the server's next bytes and return what to send, maybe nothing.

        Raises `AuthenticationError`. Bytes behind the server's last message are in `leftover`.
        """
        self._take(data)
        if self._proven:
            return self._accepted()
        detail = self._header(_Kind.CHALLENGE, most=_Flag.TOKEN)
        if detail is None:
            return b""
        if self._flag == _Flag.EITHER and detail == _Flag.NONE:
            self.token, self._key = None, self._no_key
        elif bool(detail) != bool(self._flag):
            raise AuthenticationError(Refusal.NO_TOKEN if self._flag else Refusal.TOKEN_REQUIRED)
        end = _HEADER.size + NONCE_BYTES + PROOF_BYTES
        if len(self._buffer) < end:
            return b""
        nonce = bytes(self._buffer[_HEADER.size : _HEADER.size + NONCE_BYTES])
        claimed = bytes(self._buffer[_HEADER.size + NONCE_BYTES : end])
        if not verify_proof(self._key, claimed, "server", self._hello, nonce):
            raise AuthenticationError(Refusal.WRONG_TOKEN)
        del self._buffer[:end]
        self._proven = True
        answer = _HEADER.pack(MAGIC, HANDSHAKE_VERSION, _Kind.PROOF, 0)
        return answer + proof(self._key, "client", self._hello, nonce)

    def _stranger(self, first_byte: int) -> AuthenticationError:
        tls = first_byte in (TLS_HANDSHAKE_BYTE, TLS_ALERT_BYTE)  # our own servers say in words that they require it
        return AuthenticationError(Refusal.NOT_A_STORE, detail="it speaks TLS" if tls else http_answer(self._buffer))

    def _accepted(self) -> bytes:
        if self._header(_Kind.ACCEPTED) is not None:
            del self._buffer[: _HEADER.size]
            self.done = True
        return b""


class ServerHandshake(_Handshake):
    """The server's side: send what each `receive` returns, until `done`; then `context` is the client's, proven.

    A client may prove the token `former` instead.
    """

    def __init__(self, token: str | None, former: str | None = None, purpose: str = STORE_PURPOSE) -> None:
        super().__init__(token, purpose)
        self._former = None if former is None else derive_key(former, purpose)
        self._hello = b""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.context = b""

    @property
    def unanswered(self) -> bool:
        """Whether the client was given this side's proof and has not given its own."""
        return bool(self._hello) and not self.done

    def receive(self, data: bytes) -> bytes:
        """Take the client's next bytes and return what to send, maybe nothing.

        Raises `AuthenticationError`. Bytes behind the client's last message are in `leftover`.
        """
        self._take(data)
        answer = b""
        if not self._hello:
            answer = self._challenge()
        if self._hello and not self.done:
            answer += self._verdict()
        return answer

    def _stranger(self, first_byte: int) -> AuthenticationError:
        tls = first_byte == TLS_HANDSHAKE_BYTE
        return AuthenticationError(Refusal.NO_TLS) if tls else super()._stranger(first_byte)

    def _challenge(self) -> bytes:
        detail = self._header(_Kind.HELLO, most=_Flag.EITHER)
        if detail is None:
            return b""
        has_token = self.token is not None
        if detail != _Flag.EITHER and bool(detail) != has_token:
            raise AuthenticationError(Refusal.TOKEN_REQUIRED if has_token else Refusal.NO_TOKEN)
        if len(self._buffer) < _HELLO_FIXED_BYTES:
            return b""
        (context_bytes,) = _LENGTH.unpack_from(self._buffer, _HELLO_FIXED_BYTES - _LENGTH.size)
        if context_bytes > MAX_CONTEXT_BYTES:
            raise AuthenticationError(Refusal.MALFORMED, detail=f"a context of {context_bytes} bytes")
        end = _HELLO_FIXED_BYTES + context_bytes
        if len(self._buffer) < end:
            return b""
        self._hello = bytes(self._buffer[:end])
        del self._buffer[:end]
        nonce = self._hello[_HEADER.size : _HEADER.size + NONCE_BYTES]
        if self._former and hmac.compare_digest(nonce, _client_nonce(self._former, nonce[:-HINT_BYTES])):
            self._key = self._former
        header = _HEADER.pack(MAGIC, HANDSHAKE_VERSION, _Kind.CHALLENGE, has_token)
        return header + self._nonce + proof(self._key, "server", self._hello, self._nonce)

    def _verdict(self) -> bytes:
        if self._header(_Kind.PROOF) is None or len(self._buffer) < _HEADER.size + PROOF_BYTES:
            return b""
        claimed = bytes(self._buffer[_HEADER.size : _HEADER.size + PROOF_BYTES])
        if not verify_proof(self._key, claimed, "client", self._hello, self._nonce):
            raise AuthenticationError(Refusal.WRONG_TOKEN)
        del self._buffer[: _HEADER.size + PROOF_BYTES]
        self.context = self._hello[_HELLO_FIXED_BYTES:]
        self.done = True
        return _HEADER.pack(MAGIC, HANDSHAKE_VERSION, _Kind.ACCEPTED, 0)


def _joined(*parts: bytes) -> bytes:
    """Return the parts, each with its length before it, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


MAX_TOKEN_FILE_BYTES: Final = 4096
"""A token file longer than this is some other file."""


def load_token(environ: Mapping[str, str]) -> str | None:
    """Return the token of ASYNCDIST_TOKEN, else of the file ASYNCDIST_TOKEN_FILE, else None.

    An empty variable counts as unset; white space around a token is removed. Raises `ValueError` for a token that is
    too short and for a file that cannot hold one, `OSError` for a file that cannot be read.
    """
    token = environ.get("ASYNCDIST_TOKEN")
    if token:
        return check_token(token.strip())
    path = token_file(environ)
    try:
        return read_token_file(path) if path else None
    except OSError as error:
        raise OSError(error.errno, f"ASYNCDIST_TOKEN_FILE: {error.strerror}", str(path)) from None


def token_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `load_token` reads, None if it reads none."""
    path = environ.get("ASYNCDIST_TOKEN_FILE")
    return Path(path) if path and not environ.get("ASYNCDIST_TOKEN") else None


def read_token_file(path: Path) -> str:
    """Return the token, or the newer one of two, in the file at `path`; raises as `load_token` does."""
    return read_tokens(path)[0]


def read_tokens(path: Path) -> tuple[str, str | None]:
    """Return the tokens in the lines of the file at `path`, the former one, if any, behind; raises as `load_token`."""
    with path.open("rb") as file:
        content = file.read(MAX_TOKEN_FILE_BYTES + 1)
    try:
        return parse_tokens(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_tokens(content: bytes) -> tuple[str, str | None]:
    """Return the tokens in what a file holds, the former one, if any, behind; ValueError says what is wrong with it."""
    if len(content) > MAX_TOKEN_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_TOKEN_FILE_BYTES} bytes and is no token file")
    try:
        token, *former = map(check_token, content.decode("ascii").split() or [""])
    except UnicodeDecodeError:
        raise ValueError("it holds other than ASCII text and is no token file") from None
    if len(former) > 1:
        raise ValueError(f"it has {1 + len(former)} tokens, a new one and the one before it are all that count")
    return token, former[0] if former else None
