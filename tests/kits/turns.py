"""A loop whose turns a test takes one by one."""

from __future__ import annotations

from collections.abc import Callable


class Loop:
    """Keeps what is to be called in its next turn."""

    def __init__(self) -> None:
        self.soon: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        self.soon.append((callback, arguments))

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for callback, arguments in due:
            callback(*arguments)
