"""Event loops: `run` at the edge of a program, and what a forked child does with the loop and files of its parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import math
import os
import select
import selectors
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any, Final, Protocol, TypeVar

from asyncdist.concurrency.trace import shorten_if_uncaught

T = TypeVar("T")

_TERMINATED: Final = 128 + signal.SIGTERM

_NO_ASYNC_OP: Final = """\
In asyncdist operations take no async_op: all begin at the call and return a Work, as in work = dist.all_reduce(x), to
be awaited at once or later. In asyncdist.blocking they take it as torch's do."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop factory where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class Place:
    """Where a loop runs: the thread that runs it, or may act as if it ran; 0 while none does."""

    __slots__ = ("errands", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.errands: list[Callable[[], object]] = []
        """Of a lendable loop: what the thread that runs it for all others does before it runs it again."""


def place_of(loop: asyncio.AbstractEventLoop | None) -> Place:
    """The place of `loop`: this thread, unless the loop is `lendable`."""
    place: Place | None = getattr(loop, "place", None)
    return Place(get_ident()) if place is None else place


def lendable(called: Callable[[], object]) -> Any:
    """Return a new loop that threads run in turn; who does sets its `place`.

    Code may act as if it were called back by the loop while it is `lent`. `called()` is called after each
    `call_soon_threadsafe`, but not after `wake`, which does the same.
    """
    loop = _lendable_class()()
    loop.called = called
    loop.call_soon(called)
    queues = [each for each in gc.get_referents(loop, vars(loop)) if type(each) is deque and len(each) == 1]
    loop.ready = queues[0] if len(queues) == 1 else None  # no loop says otherwise whether calls are left over
    return loop


@lru_cache(maxsize=1)
def _lendable_class() -> Any:
    sample = loop_factory()()
    sample.close()
    kind: Any = type(sample)

    class LendableLoop(kind):  # type: ignore[misc]
        lent = False
        called: Callable[[], object]
        ready: deque[Any] | None

        def __init__(self) -> None:
            super().__init__()
            self.place = Place(0)
            self.wake = super().call_soon_threadsafe

        def is_running(self) -> bool:
            return self.lent or bool(super().is_running())

        def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> Any:
            handle = self.wake(callback, *arguments, context=context)
            self.called()
            return handle

    return LendableLoop


def forget_closed(loop: asyncio.AbstractEventLoop, descriptors: Iterable[int]) -> None:
    """In a forked child, make the loop that this thread ran forget `descriptors`, which are closed already.

    The child may go on to run this loop. In its next turn uvloop would ask the kernel to watch the closed descriptors.
    The kernel refuses, and uvloop aborts the process.
    """
    for descriptor in descriptors:
        for remove in (loop.remove_writer, loop.remove_reader):
            with contextlib.suppress(OSError, RuntimeError):  # asyncio asks the kernel first; or the loop is closed
                remove(descriptor)
    _watch_apart(loop)


def _watch_apart(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop of a forked child an epoll set of its own, a copy of its parent's.

    With a shared set the child would get events of its parent's new descriptors, at which uvloop aborts. And a child
    that closes its loop would remove the descriptor that wakes the parent.
    """
    if _fork_libuv(loop):
        return
    shared = _epoll_set(loop)
    if shared < 0:
        return
    with select.epoll() as own:
        for line in Path(f"/proc/self/fdinfo/{shared}").read_text("ascii").splitlines():
            if line.startswith("tfd:"):  # proc(5): tfd: 4 events: 19 data: ...
                _, descriptor, _, events, *_ = line.split()
                with contextlib.suppress(OSError):  # closed here
                    own.register(int(descriptor), int(events, 16))
        os.dup2(own.fileno(), shared, inheritable=False)


def prepare_fork(loop: asyncio.AbstractEventLoop) -> None:
    """Load the function that `forget_closed` needs now: in a forked child the linker's lock may be held for ever."""
    uvloop = _uvloop_of(loop)
    if uvloop is not None:
        _uv_function(uvloop.__file__, "uv_loop_fork")


def _fork_libuv(loop: asyncio.AbstractEventLoop) -> bool:
    """Call libuv's `uv_loop_fork`, which replaces all that the loop shares with the parent's; False if that fails.

    Shared are the epoll set and io_uring's queue. If parent and child both use the queue, either aborts. uvloop itself
    does not tell libuv of forks.
    """
    uvloop = _uvloop_of(loop)
    fork = None if uvloop is None or loop.is_closed() else _uv_function(uvloop.__file__, "uv_loop_fork")
    return fork is not None and fork(uvloop.libuv_get_loop_t_ptr(loop)) == 0


def _uvloop_of(loop: asyncio.AbstractEventLoop) -> Any:
    """uvloop's module if `loop` is a uvloop loop, else None."""
    module = sys.modules.get("uvloop.loop")
    return module if module is not None and isinstance(loop, module.Loop) else None


@lru_cache(maxsize=2)
def _uv_function(file: str, name: str) -> Callable[[object], int] | None:
    """A function of libuv, which takes the result of `libuv_get_loop_t_ptr`; None if uvloop does not export it."""
    try:
        function = getattr(ctypes.CDLL(file), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    return lambda capsule: int(function(address_of(capsule, name_of(capsule))))


def watched(loop: Any) -> int:
    """The descriptor that becomes readable when a lendable loop has something to do; -1 if there is none."""
    uvloop = _uvloop_of(loop)
    known = uvloop is None or _uv_function(uvloop.__file__, "uv_backend_timeout") is not None
    return _epoll_set(loop) if known and loop.ready is not None else -1


def due_ms(loop: Any) -> int:
    """After how long at most a loop that is `watched` is to be run, whatever becomes readable; -1 for never."""
    if loop.ready:
        return 0
    uvloop = _uvloop_of(loop)
    if uvloop is not None:
        after = _uv_function(uvloop.__file__, "uv_backend_timeout")
        return 0 if after is None else after(uvloop.libuv_get_loop_t_ptr(loop))
    return max(0, math.ceil((loop._scheduled[0].when() - loop.time()) * 1000)) if loop._scheduled else -1


def _epoll_set(loop: asyncio.AbstractEventLoop) -> int:
    """The descriptor by which an open loop asks the kernel what is ready; -1 if it is no epoll set, or unknown."""
    if loop.is_closed() or not hasattr(select, "epoll"):
        return -1
    uvloops: Callable[[], int] | None = getattr(loop, "_get_backend_id", None)
    if uvloops is not None:
        return uvloops()
    selector = getattr(loop, "_selector", None)
    return selector.fileno() if isinstance(selector, selectors.EpollSelector) else -1


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run `main` on a fresh event loop (uvloop where installed) and return its result.

    The first SIGTERM cancels `main`, so that groups are left in order and `finally` blocks run; SystemExit(143) is
    raised then. A second SIGTERM ends the process at once. Ctrl-C works as in `asyncio.run`. Raises RuntimeError within
    a running event loop, and TypeError for what cannot be awaited. Where a launcher started this process, an error that
    only says that another rank ended is printed in two lines, should it end the process.
    """
    if not inspect.isawaitable(main):
        raise TypeError(f"asyncdist.run() takes a coroutine, as in run(main()), not {main!r}")
    if _is_running():
        main.close()
        raise RuntimeError("asyncdist.run() cannot be called from a running event loop: await the coroutine there")
    terminated = False

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            loop.remove_signal_handler(signal.SIGTERM)
            task.cancel("SIGTERM")

        # Outside the main thread signals are its owner's business.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            loop.add_signal_handler(signal.SIGTERM, terminate)
        return await main

    with asyncio.Runner(debug=debug, loop_factory=loop_factory()) as runner:
        try:
            return runner.run(supervised())
        except asyncio.CancelledError:
            if terminated:
                raise SystemExit(_TERMINATED) from None
            raise
        except TypeError as error:  # here, as to take it only to refuse it would cost every call time
            if "unexpected keyword argument 'async_op'" in str(error):
                error.add_note(_NO_ASYNC_OP)
            raise
        except Exception as error:
            shorten_if_uncaught(error)
            raise


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Forkable(Protocol):
    """An object whose descriptors a forked child must close, so that two processes never share a stream."""

    def close_after_fork(self) -> None:
        """Close this process's descriptors, touching neither event loop nor peer; later use raises ClosedError."""


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()
_registered = False


def close_in_forked_child(resource: Forkable) -> None:
    """Call `resource.close_after_fork()` in every child forked from now on, as long as `resource` lives."""
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_close_all)
        _registered = True
    _open.add(resource)


def _close_all() -> None:
    for resource in list(_open):
        resource.close_after_fork()
    _open.clear()
