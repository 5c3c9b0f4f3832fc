"""A client of the store's engine, whose clock the test turns; and how much work something is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages as m


class User:
    """A client of the engine; `late` are the replies that did not come at once."""

    def __init__(self, engine: StoreEngine, name: bytes, namespace: str = "job") -> None:
        self.engine = engine
        self.client_id = name.ljust(16, b"-")
        self.namespace = namespace
        self.last_id = 0
        self.now = 0.0
        self.connect()

    def connect(self) -> None:
        self.late: list[Any] = []
        self.client = self.engine.open(self.namespace, self.late.append, client_id=self.client_id, now=self.now)

    def reply(self, operation: int, *arguments: Any) -> Any:
        self.last_id += 1
        return self.engine.request(self.client, (self.last_id, operation, *arguments), self.now)

    def ask(self, operation: int, *arguments: Any) -> Any:
        reply = self.reply(operation, *arguments)
        assert reply[:2] == (self.last_id, m.OK), reply
        return reply[2]

    def code(self, operation: int, *arguments: Any) -> int:
        reply = self.reply(operation, *arguments)
        assert reply is not None
        code: int = reply[1]
        return code

    def take(self) -> list[Any]:
        taken, self.late[:] = list(self.late), []
        return taken

    def lose(self) -> None:
        self.engine.close(self.client, self.now)

    def leave(self) -> None:
        self.ask(m.GOODBYE)
        self.lose()


def pass_time(users: list[User], seconds: float) -> None:
    for user in users:
        user.now += seconds
    users[0].engine.expire(users[0].now)


def calls_during(run: Callable[[], object]) -> int:
    """How many functions written in Python are called while `run` runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
