"""init_process_group and destroy_process_group for ordinary threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from asyncdist import init as initialize
from asyncdist.blocking.group import ProcessGroup
from asyncdist.blocking.refuse_loop import refuse_loop
from asyncdist.blocking.session import current_session, open_session
from asyncdist.blocking.stores import Store, inner_store
from asyncdist.group.non_member import NonMember

__all__ = ["destroy_process_group", "get_default_group", "init_process_group", "is_initialized"]

P = ParamSpec("P")


def _joining(function: Callable[P, Any]) -> Callable[P, ProcessGroup]:
    def init_process_group(*args: P.args, **kwargs: P.kwargs) -> ProcessGroup:
        """Join a world; arguments and errors are those of `asyncdist.init_process_group`. Ctrl-C gives up.

        The group returned is the default group; `with init_process_group() as group:` leaves it at the end. Everything
        is done by the process's communication thread, which is started if it does not run yet.
        """
        refuse_loop("init_process_group")
        if "progress" in kwargs:
            raise TypeError("progress= is for asyncdist.init_process_group: here a thread does it in any case")
        store = next((value for value in (*args, *kwargs.values()) if isinstance(value, Store)), None)
        if "store" in kwargs:
            kwargs["store"] = inner_store(kwargs["store"])
        opening = function(*map(inner_store, args), **kwargs)

        async def join() -> Any:
            return await opening

        group: ProcessGroup = open_session(str(kwargs.get("group_name") or "default"), join, ProcessGroup)
        group._session.store = store
        return group

    init_process_group.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    init_process_group.__qualname__ = "init_process_group"
    return init_process_group


init_process_group = _joining(initialize.init_process_group)


def destroy_process_group(group: ProcessGroup | NonMember | None = None) -> None:
    """Close `group`; without one, the default group and with it all groups of its world.

    Waits for everything under way, except where waiting for it was interrupted (Ctrl-C): then the group is aborted.
    Raises the first failure nobody asked about, and ValueError where there is no group.
    """
    refuse_loop("destroy_process_group")
    if not isinstance(group, NonMember):
        (get_default_group() if group is None else group).close()


def get_default_group() -> ProcessGroup:
    """The group that calls without `group=` act on. Raises ValueError if there is none."""
    session = current_session()
    if session is None:
        raise ValueError("the default process group has not been initialized: call init_process_group() first")
    return ProcessGroup(session.inner, session)


def is_initialized() -> bool:
    """Whether there is a default group."""
    try:
        return current_session() is not None
    except ValueError:
        return False
