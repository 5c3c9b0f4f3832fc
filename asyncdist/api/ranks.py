"""Which rank of a group `src=` and `dst=` (global ranks), or `group_src=` and `group_dst=` (group ranks), mean."""

from __future__ import annotations

from asyncdist.group.methods.issuer import check_rank
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup

__all__ = ["peer_of", "required_peer", "root_of"]


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
    group: ProcessGroup,
    operation: str,
    tag: int,
    rank: int | None,
    group_rank: int | None,
    name: str,
    default: int | None = None,
) -> int:
    """Return the group rank of a collective's root; the other ranks hear of a wrong one.

    Where neither is given it is `default`, or else ValueError.
    """
    try:
        if default is not None and rank is None and group_rank is None:
            return default
        return group._group_rank[required_peer(group, rank, group_rank, name)]
    except (TypeError, ValueError) as error:
        group.refuse(operation, check_tag(tag), error)
        raise
