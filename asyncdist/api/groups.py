"""Groups made of groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncdist.api.resolve import Group, resolve
from asyncdist.backend.base import parse_backend
from asyncdist.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.group import ProcessGroup
from asyncdist.non_member import NonMember

__all__ = ["new_group"]


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: Timeout = INHERIT,
    backend: str | None = None,
    *,
    group: Group = None,
    group_desc: str | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember:
    """Make a group of `ranks` (global; None: all of the parent's) out of `group` or the default group.

    Local and immediate: nothing is sent. All ranks of the parent must call it in the same order, members or not; who
    is no member gets a `NonMember`, whose operations raise. The time-out is the parent's unless one is given. Group
    ranks follow global ranks, or, with `sort_ranks=False`, the order given. Raises ValueError for ranks that are
    empty, repeated or not in the parent.
    """
    parent = resolve(group)
    parent.check_usable("new_group")
    chosen = list(parent.ranks) if ranks is None else list(ranks)
    if not chosen:
        raise ValueError("ranks must not be empty")
    for rank in chosen:
        if not isinstance(rank, int):
            raise TypeError(f"ranks must be ints, not {type(rank).__name__}")
        if rank not in parent.ranks:
            raise ValueError(f"rank {rank} is not in group {parent.name}: its ranks are {_spell(parent.ranks)}")
    if len(set(chosen)) != len(chosen):
        raise ValueError("ranks must not contain a rank twice")
    named = None if backend is None else parse_backend(backend)["cpu"]
    members = sorted(chosen) if sort_ranks else chosen
    made = parent.make_subgroup(members, timeout_seconds(timeout, parent.timeout_s), group_desc, named)
    return NonMember(group_desc or f"ranks {_spell(members)}", parent.world.rank) if made is None else made


def _spell(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]}"
    return ", ".join(map(str, ranks))
