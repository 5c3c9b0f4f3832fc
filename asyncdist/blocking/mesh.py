"""DeviceMesh for ordinary threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.api import groups
from asyncdist.api.mesh import DeviceMesh as InnerMesh
from asyncdist.api.mesh import arrange
from asyncdist.blocking.group import ProcessGroup, get_default_group
from asyncdist.blocking.lifting import issued


class DeviceMesh(InnerMesh):
    """See `asyncdist.DeviceMesh`: its groups wait."""

    _new_group = staticmethod(issued(groups.new_group))

    def _parent(self, group: Any) -> Any:
        return get_default_group() if group is None else group


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, group: ProcessGroup | None = None, **options: Any
) -> DeviceMesh:
    """Arrange the ranks of a group as a grid; the options are those of `asyncdist.init_device_mesh`."""
    parent: Any = get_default_group() if group is None else group  # resolved by `_parent`
    return DeviceMesh(device_type, arrange(parent.ranks, mesh_shape), group=parent, **options)
