"""A fake GPU of which one call fails, or one piece of work: each in turn, and what must not be left of any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

from asyncdist.errors import DistBackendError
from asyncdist.testing.fake_cuda import FakeRuntime
from asyncdist.testing.fake_memory import FakeMemory, FakePinned
from asyncdist.testing.fake_nccl import FakeCommunicator, FakeNccl
from asyncdist.testing.fake_queues import FakeEvent, FakeStream

ERROR: Final = "cudaErrorInjected"

FAILING: Final = {
    FakeRuntime: "device_id memory_size new_stream new_event current_stream copy reduce pinned allocate ipc_handle "
    "ipc_open prepare_reduce",
    FakeEvent: "record",
    FakeStream: "wait_event",
    FakeNccl: "unique_id open version",
    FakeCommunicator: "all_reduce broadcast",
}
"""Calls that fail before they have done anything."""

FAILING_AFTER: Final = {
    FakeRuntime: "ipc_close",
    FakeEvent: "close",
    FakeStream: "close synchronize",
    FakeMemory: "close",
    FakePinned: "close",
    FakeCommunicator: "abort destroy",
}
"""Calls that do what they should, and then report what has failed before, as CUDA's may."""


class Faults:
    """Counts the calls of the driver, lets one of them fail, and knows what was made and not given back.

    Work on the GPU fails where an event behind it is asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.recordings = 0
        self.injected = ""
        """What has failed."""
        self._lock = threading.RLock()
        self._which = 0
        self._failing: Any = None
        self._made: list[Any] = []
        self._opened = 0
        for kinds, after in ((FAILING, False), (FAILING_AFTER, True)):
            for kind, names in kinds.items():
                for name in names.split():
                    monkeypatch.setattr(kind, name, self._counted(kind, name, after=after))
        for name in ("done", "synchronize"):
            monkeypatch.setattr(FakeEvent, name, self._asked(getattr(FakeEvent, name)))

    def begin(self, which: int) -> None:
        """From now on count, and let call `which` fail; 0: none, negative: the work before that recorded event."""
        with self._lock:
            self.calls = self.recordings = self._opened = 0
            self.injected = ""
            self._which = which
            self._failing = None
            self._made.clear()

    def left(self) -> list[str]:
        """What was made and not given back."""
        with self._lock:
            left = [type(made).__name__ for made in self._made if not _is_closed(made)]
            return left + ["opened memory"] * self._opened

    def _counted(self, kind: type, name: str, *, after: bool) -> Callable[..., Any]:
        original = getattr(kind, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                fails = False
                if name != "close" or not _is_closed(arguments[0]):  # closing twice does nothing
                    self.calls += 1
                    fails = self.calls == self._which
                if name == "ipc_close":  # also if its owner, who has lost this rank, was faster to free it
                    self._opened -= 1
                if fails:
                    self.injected = f"call {self.calls}, {kind.__name__}.{name}"
            if fails and not after:
                raise DistBackendError(ERROR)
            result = original(*arguments, **options)
            with self._lock:
                self._remember(name, arguments[0], result)
            if fails:
                raise DistBackendError(ERROR)
            return result

        return call

    def _remember(self, name: str, of: Any, result: Any) -> None:
        if name in ("new_stream", "new_event", "pinned", "allocate", "open"):
            self._made.append(result)
        elif name == "close" and isinstance(of, FakeMemory | FakePinned):
            of.was_closed = True  # type: ignore[union-attr]
        elif name == "ipc_open":
            self._opened += 1
        elif name == "record":
            self.recordings += 1
            if self.recordings == -self._which:
                self._failing = of.recording
                self.injected = f"work before recording {self.recordings}"

    def _asked(self, original: Callable[[FakeEvent], Any]) -> Callable[[FakeEvent], Any]:
        def ask(event: FakeEvent) -> Any:
            result = original(event)
            if event.recording is self._failing:
                raise DistBackendError(ERROR)
            return result

        return ask


def _is_closed(made: Any) -> bool:
    if isinstance(made, FakeEvent):
        return made._closed
    if isinstance(made, FakeStream):
        return made.queue.closed
    if isinstance(made, FakeCommunicator):
        return made.state != "open"
    return getattr(made, "was_closed", False)
