"""DeviceMesh: the ranks of a group as a grid, with a group along each of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncdist.api.groups import new_group
from asyncdist.arrays.host import Array
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.concurrency.integers import as_int, as_ints
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.process_group import ProcessGroup

Axes: TypeAlias = tuple[int, ...]
"""The axes of the whole grid that one dimension of a mesh runs along, the slowest first; several where it is flat."""


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, str] | None = None,
    group: Group = None,
    timeout: Timeout = INHERIT,
) -> DeviceMesh:
    """Arrange the ranks of `group`, in their order, as a grid of `mesh_shape`; the last dimension runs fastest.

    As `DeviceMesh`, which takes any arrangement. Raises ValueError for a shape that the group does not fill as well.
    """
    parent = resolve(group)
    mesh = arrange(parent.ranks, mesh_shape)
    return DeviceMesh(
        device_type,
        mesh,
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        group=parent,
        timeout=timeout,
    )


def arrange(ranks: Sequence[int], mesh_shape: Sequence[int]) -> Array:
    """`ranks` as a grid. Raises ValueError for a shape that they do not fill."""
    shape = as_ints(mesh_shape, "mesh_shape must hold sizes (ints)")
    if not shape or min(shape) < 1 or math.prod(shape) != len(ranks):
        raise ValueError(f"mesh_shape={tuple(shape)} is not filled by the {len(ranks)} ranks of the group")
    return np.array(ranks).reshape(shape)


class DeviceMesh:
    """Ranks as a grid: torch's DeviceMesh. Made by all ranks of `group` at once, like `new_group`; nothing is sent.

    `mesh` (nested lists or an array of ints, any number of dimensions) has every (global) rank of `group` once.
    `mesh_dim_names` name its dimensions. Each rank has one group along each dimension: `get_group`. Groups that hold
    one kind of array hold the other as well, so `device_type` ("cpu" or "cuda") is only kept. The groups end with
    their world; `timeout` is that of their collectives, by default the parent's, and so is the backend, unless
    `backend_override` names another one for a dimension (by its number or name).

    `mesh["tp"]` and `mesh["dp", "tp"]` are meshes of those dimensions, which share the groups: this rank's slice of the
    grid. Raises ValueError for ranks that are missing, repeated or not in the group, and for names that are repeated or
    too few; TypeError for ranks that are no ints and names that are no strings.
    """

    _new_group = staticmethod(new_group)

    def __init__(
        self,
        device_type: str,
        mesh: npt.ArrayLike,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, str] | None = None,
        group: Group = None,
        timeout: Timeout = INHERIT,
    ) -> None:
        parent = self._parent(group)
        grid = np.array(mesh)
        if grid.dtype.kind != "i" or not grid.ndim:
            raise TypeError(f"mesh must be nested lists of ranks (ints), not {mesh!r}")
        if sorted(grid.flat) != sorted(parent.ranks):
            raise ValueError(f"mesh must have each rank of group {parent.name} once: {list(parent.ranks)}")
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        if names is not None:
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"mesh_dim_names must be strings, not {names!r}")
            if len(names) != grid.ndim or len(set(names)) != grid.ndim:
                raise ValueError(f"mesh_dim_names={names} must be {grid.ndim} different names, one for each dimension")
        self.device_type = device_type
        self.mesh_dim_names = names
        self._axes: tuple[Axes, ...] = tuple((axis,) for axis in range(grid.ndim))
        self._whole = _Grid(
            grid, parent, partial(self._new_group, timeout=timeout), dict(zip(names or (), self._axes, strict=False))
        )
        backends = {self._dimension(which): name for which, name in (backend_override or {}).items()}
        for axes in self._axes:
            self._whole.make(axes, backends.get(axes))

    def _parent(self, group: Any) -> ProcessGroup:
        return resolve(group)

    @property
    def mesh(self) -> Array:
        """The global ranks of this mesh, as an array of its shape."""
        whole, mine = self._whole.grid, self._whole.coordinate
        ours = [axis for axes in self._axes for axis in axes]
        others = tuple(slice(None) if axis in ours else mine[axis] for axis in range(whole.ndim))
        left = sorted(ours)
        grid = whole[others].transpose([left.index(axis) for axis in ours])
        return grid.reshape([self._whole.length(axes) for axes in self._axes])

    @property
    def shape(self) -> tuple[int, ...]:
        """How many ranks there are along each dimension."""
        return tuple(map(self._whole.length, self._axes))

    @property
    def ndim(self) -> int:
        """How many dimensions there are."""
        return len(self._axes)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """How many ranks there are along one dimension, or in all."""
        return math.prod(self.shape) if mesh_dim is None else self._whole.length(self._dimension(mesh_dim))

    def get_rank(self) -> int:
        """This process's global rank."""
        return self._whole.rank

    def get_coordinate(self) -> list[int]:
        """Where this rank is, along each dimension."""
        return [self.get_local_rank(dimension) for dimension in range(self.ndim)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Where this rank is along a dimension, which only meshes of one dimension need not name."""
        return self._whole.place(self._dimension(mesh_dim))

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's group along a dimension, which only meshes of one dimension need not name.

        Raises KeyError for a name and IndexError for a number that is none, ValueError where one must be given.
        """
        return self._whole.groups[self._dimension(mesh_dim)]

    def get_all_groups(self) -> list[ProcessGroup]:
        """This rank's group along each dimension."""
        return [self.get_group(dimension) for dimension in range(self.ndim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        names = (names,) if isinstance(names, str) else tuple(names)
        axes = tuple(self._dimension(name) for name in names)
        if not names or len(set(sum(axes, ()))) != len(sum(axes, ())):
            raise ValueError(f"a slice of a mesh names each of its dimensions once, not {names}")
        return self._view(names, axes)

    def flatten(self, mesh_dim_name: str) -> DeviceMesh:
        """Return the mesh of one dimension that runs along all of this one's, the last one fastest.

        Its group is made now, so all ranks of the whole mesh call it alike. Afterwards every mesh of these ranks knows
        the name. Raises ValueError for a name that is taken.
        """
        axes = sum(self._axes, ())
        if self._whole.names.setdefault(mesh_dim_name, axes) != axes:
            raise ValueError(f"a dimension of this mesh is called {mesh_dim_name!r} already")
        self._whole.make(axes)
        return self._view((mesh_dim_name,), (axes,))

    def __repr__(self) -> str:
        names = self.mesh_dim_names or tuple(map(str, range(self.ndim)))
        dimensions = ", ".join(f"{name}={length}" for name, length in zip(names, self.shape, strict=True))
        return f"<DeviceMesh {dimensions}, rank {self.get_rank()} at {self.get_coordinate()}>"

    def _view(self, names: tuple[str, ...], axes: tuple[Axes, ...]) -> DeviceMesh:
        view = object.__new__(type(self))
        view.device_type, view.mesh_dim_names, view._axes, view._whole = self.device_type, names, axes, self._whole
        return view

    def _dimension(self, given: int | str | None) -> Axes:
        if isinstance(given, str):
            axes = self._whole.names.get(given)
            if axes is None:
                raise KeyError(f"no dimension of this mesh is called {given!r}, but {list(self._whole.names)} are")
            return axes
        if given is None:
            if self.ndim > 1:
                raise ValueError(f"which dimension? This mesh has {self.ndim}: {self!r}")
            given = 0
        number = as_int(given, "a dimension of a mesh is a name or a number")
        if not -self.ndim <= number < self.ndim:
            raise IndexError(f"dimension {number} of a mesh that has {self.ndim}")
        return self._axes[number]


class _Grid:
    """The grid that a mesh and all its slices are parts of, and this rank's groups along its axes."""

    def __init__(
        self, grid: Array, parent: ProcessGroup, new_group: Callable[..., Any], names: dict[str, Axes]
    ) -> None:
        self.grid = grid
        self.names = names
        self.rank = parent.ranks[parent.rank]
        self.coordinate = [int(place) for place in np.argwhere(grid == self.rank)[0]]
        self.groups: dict[Axes, ProcessGroup] = {}
        self._parent = parent
        self._new_group = new_group

    def length(self, axes: Axes) -> int:
        return math.prod(self.grid.shape[axis] for axis in axes)

    def place(self, axes: Axes) -> int:
        """Where this rank is along `axes`."""
        place = 0
        for axis in axes:
            place = place * self.grid.shape[axis] + self.coordinate[axis]
        return place

    def make(self, axes: Axes, backend: str | None = None) -> None:
        """Make the groups along `axes`, unless they are made."""
        if axes in self.groups:
            return
        name = next((name for name, named in self.names.items() if named == axes), None)
        others = [axis for axis in range(self.grid.ndim) if axis not in axes]
        lines = self.grid.transpose([*others, *axes]).reshape(-1, self.length(axes)).tolist()
        for line in lines:
            group = self._new_group(line, backend=backend, group_desc=name, sort_ranks=False, group=self._parent)
            if self.rank in line:
                self.groups[axes] = group
