"""DeviceMesh: the groups along its dimensions, its slices, and what it refuses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from group_kit import Group
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncdist as dist
from asyncdist.testing import run_world


async def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """What an operation of the group sees, in the order of the group."""
    seen = np.empty(group.size, np.int64)
    await group.all_gather_into_tensor(seen, np.array([dist.get_rank()]))
    return seen.tolist()


def test_each_rank_has_a_group_along_each_dimension() -> None:
    async def main(group: Group) -> Any:
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert mesh.shape == (2, 3)
        assert mesh.ndim == 2
        assert mesh.size() == 6
        assert mesh.size("tp") == 3
        assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mesh.get_coordinate() == [group.rank // 3, group.rank % 3]
        assert (mesh.get_local_rank("tp"), mesh.get_rank()) == (group.rank % 3, group.rank)
        assert [await ranks_of(one) for one in mesh.get_all_groups()] == [
            await ranks_of(mesh.get_group("dp")),
            await ranks_of(mesh.get_group(-1)),
        ]
        assert mesh["tp"].get_group() is mesh.get_group(1)
        return await ranks_of(mesh["dp"].get_group()), await ranks_of(mesh["tp"].get_group()), repr(mesh)

    results = run_world(6, main)
    assert [result[:2] for result in results] == [
        ([column, column + 3], [3 * row, 3 * row + 1, 3 * row + 2]) for row in range(2) for column in range(3)
    ]
    assert results[4][2] == "<DeviceMesh dp=2, tp=3, rank 4 at [1, 1]>"


def test_slices_of_three_dimensions_are_transposed_and_flattened() -> None:
    async def main(group: Group) -> Any:
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        part = mesh["tp", "pp"]
        flat = part.flatten("tp_pp")
        assert flat.flatten("tp_pp").get_group() is flat.get_group()
        assert mesh["tp_pp"].get_group() is flat.get_group()
        assert mesh["tp_pp", "dp"].shape == (4, 2)
        assert flat.get_local_rank() == flat.get_group().rank
        assert mesh["tp_pp", "dp"].mesh[tuple(mesh["tp_pp", "dp"].get_coordinate())] == group.rank
        return part.mesh.tolist(), await ranks_of(flat.get_group())

    for rank, (part, flat) in enumerate(run_world(8, main)):
        dp = rank // 2 % 2
        assert part == [[2 * dp, 4 + 2 * dp], [2 * dp + 1, 5 + 2 * dp]]
        assert flat == [rank for row in part for rank in row]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda shape: math.prod(shape) <= 8), st.randoms())
def test_any_arrangement(shape: list[int], random: Any) -> None:
    """The group along some dimensions has the ranks that differ in their places along these alone, in that order."""
    grid = np.array(random.sample(range(math.prod(shape)), math.prod(shape))).reshape(shape)

    async def main(group: Group) -> None:
        names = [f"d{number}" for number in range(len(shape))]
        mesh = dist.DeviceMesh("cpu", grid, mesh_dim_names=names)
        here = np.argwhere(grid == group.rank)[0]
        for count in range(1, len(shape) + 1):
            for chosen in itertools.permutations(range(len(shape)), count):
                part = mesh[tuple(names[one] for one in chosen)]
                expected = np.empty(part.shape, int)
                for place in itertools.product(*map(range, part.shape)):
                    index = here.copy()
                    index[list(chosen)] = place
                    expected[place] = grid[tuple(index)]
                assert (part.mesh == expected).all()
                assert (
                    await ranks_of(part.flatten("-".join(part.mesh_dim_names)).get_group()) == expected.ravel().tolist()
                )

    run_world(grid.size, main)


def test_a_dimension_may_have_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(ranks: list[int], **options: Any) -> Any:
        made.append((ranks, options["backend"]))
        return dist.new_group(ranks, **options)

    monkeypatch.setattr(dist.DeviceMesh, "_new_group", staticmethod(noted))

    async def main(group: Group) -> None:
        dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), backend_override={0: "aio", "b": "cpu:aio"})
        for override, kind in [({"c": "aio"}, KeyError), ({2: "aio"}, IndexError), ({0: "x"}, ValueError)]:
            with pytest.raises(kind):
                dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), backend_override=override)

    run_world(2, main)
    assert made[:3] == [([0, 1], "aio"), ([0], "cpu:aio"), ([1], "cpu:aio")]


def test_a_mesh_of_some_ranks() -> None:
    async def main(group: Group) -> Any:
        some = dist.new_group([1, 2, 3, 4])
        if group.rank not in (1, 2, 3, 4):
            return None
        return await ranks_of(dist.init_device_mesh("cpu", [2, 2], group=some).get_group(0))

    assert run_world(6, main) == [None, [1, 3], [2, 4], [1, 3], [2, 4], None]


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: dist.init_device_mesh("cpu", (2, 2)), ValueError, r"mesh_shape=\(2, 2\) is not filled by the 2 ranks"),
        (lambda: dist.init_device_mesh("cpu", ()), ValueError, "is not filled"),
        (lambda: dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a",)), ValueError, "must be 2 different names"),
        (lambda: dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "a")), ValueError, "2 different names"),
        (lambda: dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=(1, 2)), TypeError, "must be strings"),
        (lambda: dist.DeviceMesh("cpu", [0, 0]), ValueError, "must have each rank of group .* once"),
        (lambda: dist.DeviceMesh("cpu", [0.0, 1.0]), TypeError, "nested lists of ranks"),
        (lambda: dist.init_device_mesh("cpu", (2, 1)).get_group(), ValueError, "which dimension"),
        (lambda: dist.init_device_mesh("cpu", (2, 1)).get_group(2), IndexError, "dimension 2 of a mesh that has 2"),
        (lambda: dist.init_device_mesh("cpu", (2,), mesh_dim_names=["a"])["b"], KeyError, "is called 'b', but"),
        (
            lambda: dist.init_device_mesh("cpu", (2,), mesh_dim_names=["a"])["a", "a"],
            ValueError,
            "each of its dimensions",
        ),
        (
            lambda: dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=["a", "b"]).flatten("a"),
            ValueError,
            "called 'a' already",
        ),
    ],
)
def test_what_is_refused(make: Any, kind: type[Exception], said: str) -> None:
    async def main(group: Group) -> None:
        with pytest.raises(kind, match=said):
            make()

    run_world(2, main)
