"""Groups made of groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncdist.api.resolve import Group, resolve
from asyncdist.api.unused import warn_unused
from asyncdist.collectives.backend import parse_backend
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.concurrency.group_ids import spell_ranks
from asyncdist.concurrency.integers import as_ints
from asyncdist.cuda.provider import chosen_device
from asyncdist.group import WORLD
from asyncdist.group.non_member import NonMember
from asyncdist.group.process_group import ProcessGroup

__all__ = ["GroupMember", "new_group"]


class GroupMember:
    """What a group is compared with in scripts written for torch.distributed.

    `WORLD` is what `group=` takes for the default group. `NON_GROUP_MEMBER` equals every `NonMember`.
    """

    WORLD = WORLD
    NON_GROUP_MEMBER = NonMember("any group", -1)


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: Timeout = INHERIT,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
    *,
    group: Group = None,
) -> ProcessGroup | NonMember:
    """Make a group of `ranks` (global; None: all of the parent's) out of `group` or the default group.

    Local and immediate: nothing is sent. All ranks of the parent must call it in the same order, members or not, or the
    operations of its members raise CollectiveMismatchError. Who is no member gets a `NonMember`, whose operations
    raise. With `use_local_synchronization` only members call it; those of the same ranks in the same order,
    whatever other groups there are. The time-out is the parent's unless one is given. Group ranks follow global ranks,
    or, with `sort_ranks=False`, the order given. Raises ValueError for ranks that are empty, repeated or not in the
    parent, and for an unknown backend, TypeError for ranks that are no ints, ClosedError where the parent is closed.
    `device_id` is as in `init_process_group`; `pg_options` has no effect (UserWarning).
    """
    warn_unused(pg_options, "new_group")
    parent = resolve(group)
    parent.check_usable("new_group")
    chosen = list(parent.ranks) if ranks is None else as_ints(ranks, "ranks must be ints")
    if not chosen:
        raise ValueError("ranks must not be empty")
    for rank in chosen:
        if rank not in parent.ranks:
            raise ValueError(f"rank {rank} is not in group {parent.name}: its ranks are {spell_ranks(parent.ranks)}")
    if len(set(chosen)) != len(chosen):
        raise ValueError("ranks must not contain a rank twice")
    named = None if backend is None else parse_backend(backend)
    members = sorted(chosen) if sort_ranks else chosen
    timeout_s = timeout_seconds(timeout, parent.timeout_s)
    device = chosen_device(device_id)
    made = parent.make_subgroup(members, timeout_s, group_desc, named, members_only=use_local_synchronization)
    if made is None:
        return NonMember(group_desc or f"ranks {spell_ranks(members)}", parent.world.rank)
    made.bind_device(device)
    return made
