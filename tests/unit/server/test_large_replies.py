"""A large reply in pieces is, joined, the frame that it would be at once; and no piece is large."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist_server.engine.replies import PIECE_BYTES, LargeReply
from asyncdist_server.wire.messages import OK, Encoder, Names

SIZES = (0, 1, 31, 32, 255, 256, 65_535, 65_536, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES)
SMALL = [bytes([size % 256]) * size for size in SIZES[:6]]


@pytest.mark.parametrize(
    "value",
    [
        *[bytes(size) for size in SIZES],
        SMALL * 500,
        [bytes(size) for size in SIZES],
        [b"k%d" % number for number in range(70_000)],
        [bytes(PIECE_BYTES)] * 17,
        (7, [(number, 1, b"key", bytes(300 * number)) for number in range(300)]),
        (7, [(2**40, 1, b"key", bytes(3 * PIECE_BYTES)), (2**40 + 1, 2, b"key", b"")]),
        (1, 2, Names([b"node-%d" % number for number in range(70_000)]), 2**62),
        [5, [b"get", [b"k" * 8000] * 40, 12, "job", "näme" * 20_000, None, True]],
        list(range(40_000)),
    ],
    ids=lambda value: f"{type(value).__name__}-{len(value)}",
)
def test_it_is_the_same(value: Any) -> None:
    reply = (2**63 - 1, OK, value)
    encoder = Encoder()
    large = LargeReply(reply, encoder.pack)
    pieces = []
    while large.left:
        pieces.append(large.take())
    assert b"".join(pieces) == Encoder().replies([reply])
    if type(value) is bytes:
        assert max(map(len, pieces)) <= PIECE_BYTES + 64
        assert len(pieces) <= 1 + len(value) // PIECE_BYTES
