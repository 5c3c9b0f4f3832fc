"""ChunkStream: an asynchronous stream as an ordinary iterator."""

from __future__ import annotations

import contextlib
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from asyncdist.blocking.refuse_loop import refuse_loop
from asyncdist.errors import ClosedError

if TYPE_CHECKING:
    from asyncdist.blocking.session import Session

__all__ = ["ChunkStream"]


class ChunkStream:
    """A collective under way, to be iterated over once: `for chunk in stream`. See `asyncdist.ChunkStream`.

    `work` is the operation's `Work`. Ctrl-C ends only the waiting for a chunk: none is lost.
    """

    def __init__(self, session: Session, inner: Any) -> None:
        """Called in the communication thread."""
        self._session = session
        self._inner = inner
        self._arrived: deque[Any] = deque()
        if hasattr(inner, "work"):
            self.work = session.adopt(inner.work)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next chunk; raises what ended the operation."""
        if not self._arrived:
            refuse_loop("ChunkStream")
            try:
                self._session.complete(self._next, (), {})
            except StopAsyncIteration:
                raise StopIteration from None
        return self._arrived.popleft()

    async def _next(self) -> None:
        self._arrived.append(self._session.adopt(await anext(self._inner)))

    def close(self) -> None:
        """Take no more chunks: the rest comes in the background, until `work` is done."""
        refuse_loop("ChunkStream.close")
        self._arrived.clear()
        if hasattr(self._inner, "aclose"):
            with contextlib.suppress(ClosedError):  # its world was closed before, and with it the stream
                self._session.complete(self._inner.aclose, (), {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
