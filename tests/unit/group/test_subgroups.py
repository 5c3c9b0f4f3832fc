"""Groups of some ranks: numbering, separation, losses."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import SimulatedWorld, run_world


def test_options_without_effect_warn_at_the_line_that_gives_them() -> None:
    """Once for each such line, as Python shows warnings."""

    async def main(group: Group) -> None:
        makers = {
            "new_group": lambda options: dist.new_group(pg_options=options),
            "new_subgroups": lambda options: dist.new_subgroups(1, pg_options=options),
            "new_subgroups_by_enumeration": lambda options: dist.new_subgroups_by_enumeration(
                [[0], [1]], pg_options=options
            ),
            "split_group": lambda options: dist.split_group(None, [[0], [1]], pg_options=options),
            "shrink_group": lambda options: dist.shrink_group([1 - group.rank], pg_options=options),
            "init_process_group": lambda options: dist.init_process_group(
                "aio", "tcp://127.0.0.1:1", rank=0, world_size=1, pg_options=options
            ),
        }
        for name, make in makers.items():
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("default")
                make(None)
                assert not told
                for _ in range(2):
                    make(object())
            (warning,) = told
            assert str(warning.message).startswith(f"{name}: pg_options= is an option of torch's backends and has no")
            assert warning.filename == __file__

    run_world(2, main)


def test_subgroups_number_their_ranks_and_keep_apart() -> None:
    async def main(group: Group) -> None:
        evens = dist.new_group([2, 0, 4])
        odds = dist.new_group([1, 3])
        reverse = dist.new_group([4, 2, 0], sort_ranks=False)
        mine = evens if group.rank % 2 == 0 else odds
        x = np.array([group.rank])
        await dist.all_reduce(x, group=mine)
        assert x[0] == (6 if group.rank % 2 == 0 else 4)
        if group.rank % 2 == 0:
            assert isinstance(odds, dist.NonMember)
            assert dist.get_rank(odds) == dist.get_world_size(odds) == -1
            for refused in (odds.all_reduce, lambda y: dist.all_reduce(y, group=odds)):
                with pytest.raises(ValueError, match=r"this group \(ranks 1, 3\): only members, whose group.rank"):
                    refused(x)
            assert dist.get_process_group_ranks(reverse) == [4, 2, 0]
            assert dist.get_group_rank(reverse, 2) == 1
            assert dist.get_global_rank(reverse, 0) == 4
            with pytest.raises(ValueError, match="src=1 is not in group"):
                dist.recv(x, src=1, group=evens)
            y = np.array([float(group.rank)])
            await dist.broadcast(y, src=4, group=reverse)
            assert y[0] == 4
            if group.rank == 2:
                await dist.isend(np.array([7]), 4, group=evens)
            if group.rank == 4:
                assert await dist.recv(x, src=2, group=evens) == 2
                await evens.isend(x, 0)
            if group.rank == 0:
                assert await evens.recv(x) == 2
        async with mine if isinstance(mine, Group) else odds as entered:
            assert entered is mine

    run_world(5, main)


def test_a_lost_rank_ends_only_the_groups_it_belongs_to() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        await group.barrier()
        if group.rank == 3:
            world.kill(3)
            return
        with pytest.raises(dist.PeerLostError):
            await group.barrier()
        if group.rank == 2:
            assert isinstance(high, Group)
            with pytest.raises(dist.DistError):
                await high.barrier()
        else:
            assert isinstance(low, Group)
            await low.barrier()

    run_world(4, main, pass_world=True)
