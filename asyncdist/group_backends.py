"""GroupBackends: what carries out the operations of one group."""

from __future__ import annotations

from asyncdist.backend.aio import AioBackend
from asyncdist.backend.base import Backend, GroupBackend
from asyncdist.world import World

__all__ = ["make_host_backend"]


def make_host_backend(world: World, group_id: int, ranks: tuple[int, ...], name: Backend) -> GroupBackend:
    """The backend `name` for the host arrays of a group that this rank is a member of."""
    rank = ranks.index(world.rank)
    factory = name.factory
    if factory is not None:
        return factory(world.mesh, group_id, ranks, rank)
    return AioBackend(
        world.mesh,
        group_id,
        ranks,
        rank,
        loop=world.loop,
        pool=world.pool,
        tuning=world.tuning.of_group(ranks),
        lanes=world.options.get("lanes") is True,
    )
