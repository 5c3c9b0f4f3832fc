"""Keys for people. A key is any bytes; a command line, a terminal and a message have text.

What is UTF-8 and visible stands for itself, a backslash is written twice, and any other byte is `\\xHH`: so nothing
moves a terminal's cursor or begins a line, and what was shown can be given back.
"""

from __future__ import annotations

import re
from typing import Final

SHOWN_HEAD_BYTES: Final = 80
SHOWN_TAIL_BYTES: Final = 40
"""What a message shows of a long key, whose owner may be a stranger: how it begins, and what it may differ in."""
_ESCAPE: Final = re.compile(rb"\\(x[0-9a-fA-F]{2}|\\)?")


def escaped(key: bytes) -> str:
    """Return all of `key` as text."""
    text = key.decode(errors="surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        each if each.isprintable() and each != "\\" else "\\\\" if each == "\\" else _as_bytes(each) for each in text
    )


def _as_bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


def unescaped(text: str) -> bytes:
    """Return the key that `escaped` shows as `text`. Raises ValueError for a backslash that begins no escape."""
    return _ESCAPE.sub(_byte, text.encode(errors="surrogateescape"))


def _byte(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        raise ValueError(r"in a key \xHH is a byte and \\ a backslash; a single backslash is neither")
    return b"\\" if found[1] == b"\\" else bytes.fromhex(found[1][1:].decode())


def shown(key: bytes | str) -> str:
    """Return `key` for a message: all of a short one, beginning and end of a long one."""
    if isinstance(key, str):
        key = key.encode(errors="surrogateescape")
    if len(key) <= SHOWN_HEAD_BYTES + SHOWN_TAIL_BYTES:
        return escaped(key)
    return f"{escaped(key[:SHOWN_HEAD_BYTES])}...{escaped(key[-SHOWN_TAIL_BYTES:])} ({len(key)} bytes)"
