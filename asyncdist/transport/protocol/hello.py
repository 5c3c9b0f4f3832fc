"""The bytes before the frames: two strangers prove that they belong to the same world. Sans-I/O.

The listener speaks first, so that its nonce is known when the dialer proves itself and the listener's decision can be
taken about an authenticated peer, one and a half round trips after the connection stands:

    listener -> dialer   GREETING  magic 8 | version u16 | 0 u16 | nonce 32
    dialer -> listener   HELLO     magic 8 | version u16 | transport u8 | path u8 | rank u32 | peer rank u32
                                   | world id 16 | nonce 32 | proof 32
    listener -> dialer   ACK       magic 8 | version u16 | verdict u8 | 0 u8 | proof 32
    dialer -> listener   CONFIRM   one byte; frames may follow at once

All integers are little-endian. A proof is HMAC-SHA256 over the sender's role, the verdict (ACK), the protocol version,
the world id, both ranks, transport, path and both nonces, under a key derived from the world's secret and id: it cannot
be replayed, reflected, or moved to another world, pair, direction or verdict. The listener sends no frame before
CONFIRM: a dialer that gave up before it read the ACK has opened nothing, so its hanging up is no lost peer.

Every message has a fixed size and is read to the byte, so a side never buffers more than `HELLO_BYTES` of a stranger's.
"""

from __future__ import annotations

import enum
import os
import struct
from dataclasses import dataclass
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist_server.wire.auth import proof, verify_proof

PROTOCOL_VERSION: Final = 1
WORLD_ID_BYTES: Final = 16
NONCE_BYTES: Final = 32
"""Nonces never repeat by chance, and carry as much entropy as the proofs."""
PROOF_BYTES: Final = 32
STREAM_TRANSPORT: Final = 0
"""Frames travel on this very byte stream."""
SHARED_MEMORY_TRANSPORT: Final = 1
"""Frames travel through shared memory; this stream passes descriptors, and takes the frames if one side refuses."""
STRIPED_TRANSPORT: Final = 2
"""Frames travel on this byte stream and on others: it is the first path of a pair."""
PATH_TRANSPORT: Final = 3
"""This byte stream is one more path of a pair that is connected already."""
TRANSPORTS_KNOWN: Final = (STREAM_TRANSPORT, SHARED_MEMORY_TRANSPORT, STRIPED_TRANSPORT, PATH_TRANSPORT)
MAX_RANK: Final = 2**32 - 1

_MAGIC: Final = b"\x8fADPEER\n"
_CONFIRM: Final = b"\x06"
_PREFIX: Final = struct.Struct("<8sHBB")
_PREFIX_BYTES: Final = _PREFIX.size
_RANKS: Final = struct.Struct("<II")
HELLO_BYTES: Final = _PREFIX_BYTES + _RANKS.size + WORLD_ID_BYTES + NONCE_BYTES + PROOF_BYTES
"""The longest message here: 100 bytes, well under the 1 KiB a stranger may make anyone hold."""
ACK_BYTES: Final = _PREFIX_BYTES + PROOF_BYTES


class Verdict(enum.IntEnum):
    """The listener's answer. Those before `WRONG_WORLD` are proven; the rest are for peers that have proven nothing."""

    OK = 0
    CROSSED = 1
    """Another connection of this pair is kept, or preferred for the moment."""
    LEAVING = 2
    """The listener's rank is leaving the world."""
    LOST = 3
    """The listener's rank has already declared the dialer lost."""
    WRONG_WORLD = 16
    WRONG_RANK = 17
    WRONG_PROOF = 18
    WRONG_TRANSPORT = 19


_REASONS: Final = {
    Verdict.WRONG_WORLD: "it belongs to another world (another job, or an earlier run at this address)",
    Verdict.WRONG_RANK: "it does not have that rank, or not that many ranks",
    Verdict.WRONG_PROOF: "the tokens differ",
    Verdict.WRONG_TRANSPORT: "it does not know this kind of channel",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What this rank proves to its peers: made once per mesh."""

    world_id: bytes
    rank: int
    world_size: int
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.world_id) != WORLD_ID_BYTES:
            raise ValueError(f"world id must have {WORLD_ID_BYTES} bytes, got {len(self.world_id)}")
        if not 0 <= self.rank < self.world_size <= MAX_RANK:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")


class Hello:
    """One side of one hello. `feed` it exactly `wanted` bytes, send what it returns; `wanted` is 0 at the end.

    After a RemoteProtocolError, `refusal` is what is to be sent before the connection is closed.
    """

    def __init__(self, identity: Identity, wanted: int, transport: int, path: int = 0) -> None:
        self.transport = transport
        self.path = path
        self._identity = identity
        self._key = proof(identity.secret, "peer hello key", identity.world_id)
        self._nonce = os.urandom(NONCE_BYTES)
        self.peer_rank: int = -1
        self.refusal = b""
        self.wanted = wanted

    def opening(self) -> bytes:
        """Bytes to send as soon as the connection stands."""
        return b""

    def feed(self, data: bytes) -> bytes:
        """Take the next `wanted` bytes and return what to send; raises RemoteProtocolError."""
        raise NotImplementedError

    def _prefix_fields(self, data: bytes) -> tuple[int, int]:
        """Check magic and version; return the two bytes after them."""
        magic, version, first, second = _PREFIX.unpack_from(data)
        if magic != _MAGIC:
            raise RemoteProtocolError(f"not an asyncdist peer: it said {data[:_PREFIX_BYTES]!r}")
        if version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"the peer speaks transport protocol {version}, this side {PROTOCOL_VERSION}: "
                "all ranks need the same asyncdist release"
            )
        return first, second

    def _transcript(self, dialer: int, listener: int, nonces: bytes) -> tuple[bytes, ...]:
        prefix = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, self.transport, self.path)
        return prefix, self._identity.world_id, _RANKS.pack(dialer, listener), nonces


class DialerHello(Hello):
    """The side that connected. `verdict` is None until the ACK came; with OK the connection is open."""

    def __init__(self, identity: Identity, peer_rank: int, transport: int = STREAM_TRANSPORT, path: int = 0) -> None:
        super().__init__(identity, _PREFIX_BYTES, transport, path)
        self.peer_rank = peer_rank
        self._nonces = b""
        self.verdict: Verdict | None = None

    def feed(self, data: bytes) -> bytes:
        """Take GREETING (its first part alone, to recognise another version's), then ACK; raises RemoteProtocolError.

        The caller sends `confirm()` if it accepts an OK.
        """
        if self.wanted == _PREFIX_BYTES:
            self.refusal = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, 0, 0)  # lets the listener name the version it met
            self._prefix_fields(data)
            self.refusal = b""
            self.wanted = NONCE_BYTES
            return b""
        if self.wanted == NONCE_BYTES:
            self._nonces = data + self._nonce
            self.wanted = ACK_BYTES
            return self._hello()
        self._ack(data)
        self.wanted = 0
        return b""

    @staticmethod
    def confirm() -> bytes:
        """The byte that opens the connection, for the caller to send once the verdict is OK."""
        return _CONFIRM

    def _hello(self) -> bytes:
        rank, peer_rank = self._identity.rank, self.peer_rank
        transcript = self._transcript(rank, peer_rank, self._nonces)
        return b"".join(
            (
                _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, self.transport, self.path),
                _RANKS.pack(rank, peer_rank),
                self._identity.world_id,
                self._nonce,
                proof(self._key, "peer dialer", *transcript),
            )
        )

    def _ack(self, data: bytes) -> None:
        code, _reserved = self._prefix_fields(data)
        try:
            verdict = Verdict(code)
        except ValueError:
            raise RemoteProtocolError(f"rank {self.peer_rank} answered with unknown verdict {code}") from None
        if verdict >= Verdict.WRONG_WORLD:
            raise RemoteProtocolError(f"rank {self.peer_rank} refused the connection: {_REASONS[verdict]}")
        transcript = self._transcript(self._identity.rank, self.peer_rank, self._nonces)
        if not verify_proof(self._key, data[_PREFIX_BYTES:], f"peer listener {verdict.name}", *transcript):
            raise RemoteProtocolError(f"rank {self.peer_rank} could not prove that it holds this world's token")
        self.verdict = verdict


class ListenerHello(Hello):
    """The side that was connected to. Once `authenticated`, the caller decides with `answer`; `confirmed` = open."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity, _PREFIX_BYTES, STREAM_TRANSPORT)
        self._prefix = b""
        self._nonces = b""
        self._answered: Verdict | None = None
        self.authenticated = False
        self.confirmed = False

    def opening(self) -> bytes:
        """The greeting."""
        return _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, 0, 0) + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Take HELLO in two parts (so that another version's is recognised by its first bytes), then CONFIRM."""
        if not self._prefix:
            self.transport, self.path = self._prefix_fields(data)
            self._prefix = data
            self.wanted = HELLO_BYTES - _PREFIX_BYTES
        elif not self.authenticated:
            self._hello(data)
            self.wanted = len(_CONFIRM)
        else:
            if self._answered is not Verdict.OK or data != _CONFIRM:
                raise RemoteProtocolError(f"rank {self.peer_rank} sent {data!r} where only a confirmation may come")
            self.confirmed = True
            self.wanted = 0
        return b""

    def answer(self, verdict: Verdict) -> bytes:
        """The ACK with `verdict`, to be called once, after `authenticated`."""
        self._answered = verdict
        transcript = self._transcript(self.peer_rank, self._identity.rank, self._nonces)
        proven = proof(self._key, f"peer listener {verdict.name}", *transcript)
        return _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, verdict, 0) + proven

    def _hello(self, data: bytes) -> None:
        identity = self._identity
        rank, intended = _RANKS.unpack_from(data)
        world_at = _RANKS.size
        nonce_at = world_at + WORLD_ID_BYTES
        proof_at = nonce_at + NONCE_BYTES
        if data[world_at:nonce_at] != identity.world_id:
            self._refuse(Verdict.WRONG_WORLD, f"a peer that calls itself rank {rank} of another world connected")
        if intended != identity.rank or rank == identity.rank or rank >= identity.world_size:
            self._refuse(
                Verdict.WRONG_RANK,
                f"rank {rank} wants rank {intended}, but this is rank {identity.rank} of {identity.world_size}",
            )
        self._nonces = self._nonce + data[nonce_at:proof_at]
        transcript = self._transcript(rank, intended, self._nonces)
        if not verify_proof(self._key, data[proof_at:], "peer dialer", *transcript):
            self._refuse(Verdict.WRONG_PROOF, f"a peer that calls itself rank {rank} does not hold this world's token")
        if self.transport not in TRANSPORTS_KNOWN:
            self._refuse(Verdict.WRONG_TRANSPORT, f"rank {rank} asks for unknown channel {self.transport}")
        self.peer_rank = rank
        self.authenticated = True

    def _refuse(self, verdict: Verdict, reason: str) -> None:
        self.refusal = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, verdict, 0) + bytes(PROOF_BYTES)
        raise RemoteProtocolError(reason)
