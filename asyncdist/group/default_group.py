"""The group that a call acts on (`group=` or the default group), and the rank that `src=` or `group_src=` means.

The default group is the current context's: every rank of a simulated world has its own. Where the context has no open
group, it is the only world open on the running event loop, so that request handlers find the group that their server's
start-up opened.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextvars import ContextVar
from typing import TypeAlias

from asyncdist.group.methods.issuer import check_rank
from asyncdist.group.non_member import NonMember
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup

Group: TypeAlias = ProcessGroup | NonMember | None
"""What functions of the API take as `group=`; None is the default group."""

_current: ContextVar[ProcessGroup | None] = ContextVar("asyncdist_group", default=None)
# A group refers to its loop, so strong references here would keep both for ever. While it is open, its sockets, which
# the loop watches, keep it alive.
_open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakSet[ProcessGroup]] = weakref.WeakKeyDictionary()
_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, str] = weakref.WeakKeyDictionary()
"""The name of the thread that each of these loops runs in."""


def resolve(group: Group) -> ProcessGroup:
    """Return the group a call acts on. Raises ValueError where there is none, TypeError for anything else."""
    if group is None:
        group = _current.get()
        return default_group() if group is None or group._core.closed else group
    if isinstance(group, NonMember):
        group.refuse()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, not {type(group).__name__}")
    return group


def register_world(group: ProcessGroup) -> None:
    """Make `group` the default of the current context, and known to its event loop."""
    loop = asyncio.get_running_loop()
    _open.setdefault(loop, weakref.WeakSet()).add(group)
    _threads[loop] = threading.current_thread().name
    _current.set(group)


def _worlds_here() -> list[ProcessGroup]:
    """World groups open on the running event loop; none without one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return []
    alive = [group for group in _open.get(loop, ()) if not group._core.closed]
    return sorted(alive, key=lambda group: group.name)


def current_world() -> ProcessGroup | None:
    """The context's own world group, if it is open."""
    group = _current.get()
    return None if group is None or group._core.closed else group


def has_default_group() -> bool:
    """Whether a call without `group=` would find one."""
    return current_world() is not None or len(_worlds_here()) == 1


def default_group() -> ProcessGroup:
    """Return the default group.

    Raises ValueError if there is none, or several to choose from; RuntimeError if it was made on another event loop.
    """
    group = _current.get()
    if group is not None and not group._core.closed:
        return group
    alive = _worlds_here()
    if len(alive) == 1:
        return alive[0]
    if alive:
        names = ", ".join(world.name for world in alive)
        raise ValueError(f"several worlds are open on this event loop ({names}) and this context has none: pass group=")
    for loop, worlds in list(_open.items()):
        for world in list(worlds):
            if not world._core.closed:
                raise RuntimeError(
                    f"group {world.name}: called from another event loop than the group was made on, or from a thread "
                    f"without one. It was made in thread {_threads[loop]!r}: call it there, as "
                    "asyncio.run_coroutine_threadsafe() does, or use asyncdist.blocking, which any thread may call"
                )
    raise ValueError(
        "the default process group has not been initialized: call init_process_group() first, "
        "and in asyncio code await it" + (" (this context's group is closed)" if group is not None else "")
    )


def peer_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int | None:
    """Return the global rank that is meant; None if neither is given."""
    if rank is None:
        return None if group_rank is None else group.ranks[check_rank(group_rank, group.size, f"group_{name}")]
    if group_rank is not None:
        raise ValueError(f"give {name}= (global rank) or group_{name}= (rank in the group), not both")
    if type(rank) is int and rank in group._group_rank:  # without a detour: messages count nanoseconds
        return rank
    return group.ranks[group.group_rank_of(rank, name)]


def required_peer(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """As `peer_of`, where one of the two must be given."""
    if type(rank) is int and group_rank is None and rank in group._group_rank:
        return rank
    peer = peer_of(group, rank, group_rank, name)
    if peer is None:
        raise ValueError(f"give {name}= (global rank) or group_{name}= (rank in the group)")
    return peer


def root_of(
    group: Group,
    operation: str,
    tag: int,
    rank: int | None,
    group_rank: int | None,
    name: str,
    default: int | None = None,
) -> tuple[ProcessGroup, int]:
    """Return the group that a rooted collective acts on, and the root's rank in it.

    Without `rank` and `group_rank` the root is `default`; without `default` that is a ValueError. The other ranks hear
    of a root that is wrong.
    """
    found = resolve(group)
    try:
        if default is not None and rank is None and group_rank is None:
            return found, default
        return found, found._group_rank[required_peer(found, rank, group_rank, name)]
    except (TypeError, ValueError) as error:
        found.refuse(operation, check_tag(tag), error)
        raise
