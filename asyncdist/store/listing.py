"""A listing of keys, which come in several answers where they are many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncdist.errors import ClosedError, DistError

__all__ = ["Listing"]


class Listing(asyncio.Future[list[str]]):
    """Asks for one part after the other. `ask` issues the request for the keys from a first one on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[bytes], asyncio.Future[Any]]) -> None:
        super().__init__(loop=loop)
        self._ask = ask
        self._keys: list[str] = []
        self._part = self._next(b"")

    def _next(self, start: bytes) -> asyncio.Future[Any]:
        part = self._ask(start)
        part.add_done_callback(self._took)
        return part

    def _took(self, part: asyncio.Future[Any]) -> None:
        if part.cancelled():
            super().cancel()
            return
        error = part.exception()
        if self.done():
            return
        if error is None:
            start, keys = part.result()
            self._keys += keys
            if start is None:
                self.set_result(self._keys)
                return
            try:
                self._part = self._next(start)
            except DistError as refused:
                error = refused
        if error is not None:
            self.set_exception(error)
            if isinstance(error, ClosedError):
                self.exception()  # the one that closed the store knows

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the waiting and withdraw the request under way."""
        if not super().cancel(msg):
            return False
        self._part.cancel()
        return True
