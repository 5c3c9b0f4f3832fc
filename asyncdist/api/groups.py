"""Groups made of a group, one or several at once, and the end of a group."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from asyncdist.collectives.backend import parse_backend
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.concurrency.integers import as_int, as_ints, spell_ranks
from asyncdist.cuda.provider import chosen_device
from asyncdist.group import WORLD
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.non_member import NonMember
from asyncdist.group.process_group import ProcessGroup


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


AnyGroup: TypeAlias = ProcessGroup | NonMember

SHRINK_ABORT: Final = 1
"""`shrink_group`'s flag: abort the old group first, and with it what is under way there."""


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout = INHERIT,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[AnyGroup, list[AnyGroup]]:
    """Divide `group` into groups of `group_size` neighboring ranks (by default LOCAL_WORLD_SIZE: one group per host).

    Returns the group of this rank and the list of all, where those it is no member of are `NonMember`s. To be called
    by all ranks of `group`, like `new_group`. Raises TypeError for a size that is no int, ValueError for one that does
    not divide the group's. `pg_options` is as in `new_group`.
    """
    warn_unused(pg_options, "new_subgroups")
    parent = resolve(group)
    if group_size is None:
        text = os.environ.get("LOCAL_WORLD_SIZE")
        if text is None:
            raise ValueError("give group_size=: LOCAL_WORLD_SIZE, its default, is not set")
        group_size = int(text)
    group_size = as_int(group_size, "group_size must be an int")
    if group_size <= 0 or parent.size % group_size:
        raise ValueError(f"group_size={group_size} does not divide group {parent.name}, which has {parent.size} ranks")
    ranks = parent.ranks
    parts = [ranks[start : start + group_size] for start in range(0, parent.size, group_size)]
    return _make(parent, parts, timeout, backend, group_desc, sort_ranks=False)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Iterable[Iterable[int]],
    timeout: Timeout = INHERIT,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    *,
    group: Group = None,
) -> tuple[AnyGroup, list[AnyGroup]]:
    """Make one group of each list of (global) ranks; no rank may be in two of them.

    Returns the group of this rank (a `NonMember` if it is in none, never None, which would mean the default group) and
    the list of all. To be called by all ranks of `group`, or of the default group, like `new_group`. Raises ValueError
    for an empty list, a rank in two lists, and what `new_group` refuses, TypeError for a rank that is no int; nothing
    is made then.
    """
    warn_unused(pg_options, "new_subgroups_by_enumeration")
    parent = resolve(group)
    parts = _parts(ranks_per_subgroup_list, "ranks_per_subgroup_list")
    for part in parts:
        for rank in part:
            parent.group_rank_of(rank)
    return _make(parent, parts, timeout, backend, group_desc, sort_ranks=True)


def split_group(
    parent_pg: Group = None,
    split_ranks: Iterable[Iterable[int]] | None = None,
    timeout: Timeout = INHERIT,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> AnyGroup:
    """Divide `parent_pg` as `split_ranks` says, lists of its group ranks, and return the group of this rank.

    A rank in none of the lists gets a `NonMember` (torch: None). To be called by all ranks of `parent_pg`. Raises
    ValueError for no or empty lists, a rank in two lists, or one that the parent does not have, TypeError for one that
    is no int; nothing is made then.
    """
    warn_unused(pg_options, "split_group")
    parent = resolve(parent_pg)
    parts = _parts(() if split_ranks is None else split_ranks, "split_ranks")
    for part in parts:
        _check_group_ranks(parent, part)
    members = [tuple(sorted(parent.ranks[rank] for rank in part)) for part in parts]
    return _make(parent, members, timeout, backend, group_desc, sort_ranks=True)[0]


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
    *,
    timeout: Timeout = INHERIT,
) -> ProcessGroup:
    """Make the group of the ranks that are left without `ranks_to_exclude` (group ranks), in the same order.

    Only the ranks that are left call it, all with the same `ranks_to_exclude`, also after ranks were lost and `group`
    was aborted. Nothing is sent. The old group stays as it is; with `SHRINK_ABORT` it is aborted, and what is under way
    on it. Shrinking the default group does not make another the default: pass `group=`, ranks in arguments stay global
    ranks.

    Raises TypeError for what is no list of ints, ValueError for ranks that are none, repeated, not in the group, or
    all of them, RuntimeError on a rank that excludes itself.
    """
    warn_unused(pg_options, "shrink_group")
    old = resolve(group)
    if not isinstance(ranks_to_exclude, list | tuple):
        raise TypeError(f"ranks_to_exclude must be a list of ranks, not {type(ranks_to_exclude).__name__}")
    if shrink_flags not in (0, SHRINK_ABORT):
        raise ValueError(f"shrink_flags must be 0 or SHRINK_ABORT ({SHRINK_ABORT}), got {shrink_flags!r}")
    excluded = _parts([ranks_to_exclude], "ranks_to_exclude")[0]
    _check_group_ranks(old, excluded)
    if len(excluded) == old.size:
        raise ValueError(f"nobody would be left of group {old.name}")
    if old.rank in excluded:
        raise RuntimeError(
            f"rank {old.rank} of group {old.name} excludes itself: only those who stay call shrink_group"
        )
    left = [rank for index, rank in enumerate(old.ranks) if index not in set(excluded)]
    made = new_group(left, timeout, group=old, use_local_synchronization=True, sort_ranks=False)
    assert isinstance(made, ProcessGroup), "a rank that is not excluded is a member"
    if shrink_flags == SHRINK_ABORT:
        old.abort(f"it was shrunk to {made.name}, without rank {', '.join(str(old.ranks[rank]) for rank in excluded)}")
    return made


async def destroy_process_group(group: Group = None) -> Any:
    """Close `group`; without one, the default group and with it all groups of its world. See `ProcessGroup.close`.

    Waits for everything under way, but for receives that nothing matched, which are withdrawn; then leaves, which peers
    can tell from being lost. Raises, once, the first failure of a Work that the program has not asked about; ValueError
    without a default group. A group that is closed, or of which this process is no member, stays as it is. Cancelling
    aborts what is under way, and lets the bounded end finish first.
    """
    if isinstance(group, NonMember):
        return
    await resolve(group).close()


def _parts(lists: Iterable[Iterable[int]], name: str) -> list[tuple[int, ...]]:
    """The lists of ranks, checked for what concerns them alone."""
    if not isinstance(lists, Iterable):
        raise TypeError(f"{name} must be a list of lists of ranks, not {type(lists).__name__}")
    parts = [tuple(as_ints(part, f"{name} must hold ranks (ints)")) for part in lists]
    if not parts or not all(parts):
        raise ValueError(f"{name} must not be empty, nor hold an empty list")
    seen: dict[int, tuple[int, ...]] = {}
    for part in parts:
        for rank in part:
            if rank in seen:
                raise ValueError(f"rank {rank} appears in both {list(seen[rank])} and {list(part)} of {name}")
        seen.update(dict.fromkeys(part, part))
        if len(set(part)) != len(part):
            raise ValueError(f"{name} must not hold a rank twice: {list(part)}")
    return parts


def _check_group_ranks(group: ProcessGroup, ranks: Sequence[int]) -> None:
    for rank in ranks:
        if not 0 <= rank < group.size:
            raise ValueError(f"rank {rank} is not a group rank of {group.name}: its ranks are 0 to {group.size - 1}")


def _make(
    parent: ProcessGroup,
    parts: Sequence[Sequence[int]],
    timeout: Timeout,
    backend: str | None,
    group_desc: str | None,
    *,
    sort_ranks: bool,
) -> tuple[AnyGroup, list[AnyGroup]]:
    groups = [
        new_group(part, timeout, backend, group=parent, group_desc=group_desc, sort_ranks=sort_ranks) for part in parts
    ]
    mine = [group for group in groups if isinstance(group, ProcessGroup)]
    return mine[0] if mine else groups[0], groups


def warn_unused(pg_options: Any, function: str) -> None:
    """Warn, at the line that calls `function`, of `pg_options` that are given to it."""
    if pg_options is not None:
        warnings.warn(
            f"{function}: pg_options= is an option of torch's backends and has no effect here; leave it out",
            UserWarning,
            stacklevel=3,
        )
