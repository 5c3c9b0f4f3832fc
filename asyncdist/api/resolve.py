"""Which group a call acts on, and which group rank a global rank means."""

from __future__ import annotations

from typing import TypeAlias

from asyncdist.group import default_group as context
from asyncdist.group.methods.issuer import check_rank
from asyncdist.group.non_member import NonMember
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup

__all__ = ["Group", "peer_of", "required_peer", "resolve", "root_of"]

Group: TypeAlias = ProcessGroup | NonMember | None


def resolve(group: Group) -> ProcessGroup:
    """Return the group a call acts on. Raises ValueError where there is none, TypeError for anything else."""
    if group is None:
        return context.default_group()
    if isinstance(group, NonMember):
        group.refuse()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, not {type(group).__name__}")
    return group


def peer_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int | None:
    """Return the group rank meant by a global rank or a group rank; None if neither is given."""
    if group_rank is not None:
        if rank is not None:
            raise ValueError(f"give {name}= (global rank) or group_{name}= (rank in the group), not both")
        return check_rank(group_rank, group.size, f"group_{name}")
    return None if rank is None else group.group_rank_of(rank, name)


def required_peer(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """As `peer_of`, where one of the two must be given."""
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
    """As `required_peer`, for the root of a collective: the other ranks hear of a wrong one."""
    try:
        if default is not None and rank is None and group_rank is None:
            return default
        return required_peer(group, rank, group_rank, name)
    except (TypeError, ValueError) as error:
        group.refuse(operation, check_tag(tag), error)
        raise
