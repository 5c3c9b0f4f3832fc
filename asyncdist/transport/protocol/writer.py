"""What an output queue writes with: the functions a shell hands over, and runs of buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["Arm", "Buffer", "Writer", "nothing", "refuse", "rest_of"]

Buffer: TypeAlias = bytes | memoryview

Writer: TypeAlias = Callable[[Sequence[Buffer]], int]
"""Non-blocking gather write: takes buffers, returns how many bytes the OS accepted (0 when it would block).

It must not raise for a broken connection: it notes the error, returns 0, and fails the core from the loop.
"""

Arm: TypeAlias = Callable[[], None]
"""Called when output is left over: `flush()` must be called once the socket is writable. May be called repeatedly."""


def rest_of(buffers: list[Buffer], sent: int) -> tuple[list[Buffer], int]:
    """What is left of `buffers` after `sent` bytes, and what is left of `sent` after `buffers`."""
    rest: list[Buffer] = []
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[sent:])
            sent = 0
    return rest, sent


def refuse(buffers: Sequence[Buffer]) -> int:
    """A writer before its connection is open, and after its end."""
    return 0


def nothing() -> None:
    """The same for `Arm`."""
