"""Opening a world on the communication thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from asyncdist.errors import ClosedError
from asyncdist.group import default_group as context
from asyncdist.group.process_group import ProcessGroup
from asyncdist.threads.awaiting import run_there
from asyncdist.threads.group import ThreadedGroup
from asyncdist.threads.thread import CommunicationThread, acquire, release
from asyncdist.threads.work import Courier

__all__ = ["leave_at_exit", "open_there"]

FOREVER_S: Final = 1e9
"""When a timer is due that keeps a group alive for as long as its event loop, as sockets that it watches do others."""


async def open_there(open_world: Callable[[], Awaitable[ProcessGroup]]) -> ThreadedGroup:
    """Await `open_world()` in the communication thread; the group becomes the default of the caller's context.

    Raises what it raises. Cancelling leaves nothing open.
    """
    loop = asyncio.get_running_loop()
    _refuse_virtual_time(loop)
    thread = acquire()
    opened: list[ProcessGroup] = []

    async def there() -> None:
        opened.append(await open_world())

    try:
        await run_there(thread, there, Context())
    except BaseException:
        try:
            if opened:  # cancelled at the last moment
                await run_there(thread, lambda: give_up(opened[0], "joining was cancelled"), Context())
        finally:
            release(thread)
        raise
    leave_at_exit(thread, opened[0])
    group = ThreadedGroup(opened[0], Courier(thread, loop), threading.get_ident())
    group.hold(loop.call_later(FOREVER_S, group.where, ""), weakref.finalize(group, _leave_alone, thread, opened[0]))
    context.register_world(group)
    return group


def _refuse_virtual_time(loop: asyncio.AbstractEventLoop) -> None:
    """Raise ValueError if time is simulated on `loop`: a thread takes no virtual time."""
    if getattr(loop, "virtual_time", False):
        raise ValueError('progress="thread" needs real time: under virtual time there are no threads')


def _leave_alone(thread: CommunicationThread, group: ProcessGroup) -> None:
    """End `group`, whose event loop was closed before; called by the garbage collector, in any thread."""

    async def leave() -> None:
        await give_up(group, f"rank {group.world.rank}'s event loop ended before it was closed")

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()
            thread.at_exit.pop(group, None)
            release(thread)

    if thread.alive:
        with contextlib.suppress(ClosedError):
            thread.submit(lambda: thread.start_task(leave(), Context(), ended))


async def give_up(group: ProcessGroup, reason: str) -> None:
    """End `group` and all groups of its world without waiting for what is under way."""
    for inner in [group, *group._inner()]:
        inner.abort(reason)
    with contextlib.suppress(Exception):
        await group.close()


def leave_at_exit(thread: CommunicationThread, group: ProcessGroup) -> None:
    """Leave `group` at the end of a program that does not, as at the end of `async with group`."""

    async def leave(error: BaseException | None) -> None:
        await group.__aexit__(None if error is None else type(error), error, None)

    thread.at_exit[group] = leave
