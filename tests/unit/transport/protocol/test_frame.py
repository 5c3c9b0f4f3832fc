"""The layout of the wire, byte by byte: two versions that disagree on any of it cannot talk."""

from __future__ import annotations

from asyncdist.transport.protocol.frame import (
    HEADER,
    HEADER_BYTES,
    Key,
    Kind,
    describe_key,
    key_prefix,
    key_suffix,
    pack_fragment,
    pack_header,
    pack_key,
    unpack_key,
)

KEY = pack_key(0x0102030405060708, 0x11121314, 0x21222324, 0x31323334, 1)


def test_key_layout() -> None:
    assert bytes.fromhex("0807060504030201 14131211 24232221 34333231 01 000000") == KEY
    assert unpack_key(KEY) == Key(0x0102030405060708, 0x11121314, 0x21222324, 0x31323334, 1)
    assert key_prefix(0x0102030405060708, 0x11121314, 0x21222324) + key_suffix(0x31323334, 1) == KEY


def test_key_in_words() -> None:
    assert describe_key(pack_key(255, 2, 3, 4, 1)) == "collective group=0xff tag=2 sequence=3 slot=4"
    assert describe_key(pack_key(255, 2, 0, 0, 0)).startswith("point-to-point")


def test_header_layout() -> None:
    header = pack_header(
        Kind.DATA, flags=2, meta_bytes=0x0304, fingerprint=0x05060708, key=KEY, length=9, credit=10, message_id=11
    )
    assert len(header) == HEADER_BYTES == 48
    assert header == bytes.fromhex("01 02 0403 08070605") + KEY + bytes.fromhex("0900000000000000 0a000000 0b000000")
    assert HEADER.unpack(header) == (1, 2, 0x0304, 0x05060708, KEY, 9, 10, 11)


def test_fragment_layout() -> None:
    header = pack_fragment(11, 0x0102, 9, fingerprint=7, flags=4)
    assert header == pack_header(
        Kind.FRAGMENT, flags=4, fingerprint=7, key=bytes([2, 1]) + bytes(22), length=9, message_id=11
    )
