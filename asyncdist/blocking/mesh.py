"""DeviceMesh for ordinary threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist.api import groups
from asyncdist.api.mesh import DeviceMesh as InnerMesh
from asyncdist.api.mesh import arrange
from asyncdist.blocking.group import ProcessGroup, get_default_group
from asyncdist.blocking.lifting import issued
from asyncdist.concurrency.deadline import INHERIT, Timeout

__all__ = ["DeviceMesh", "init_device_mesh"]


class DeviceMesh(InnerMesh):
    """See `asyncdist.DeviceMesh`: its groups wait."""

    _new_group = staticmethod(issued(groups.new_group))

    def _parent(self, group: Any) -> Any:
        return get_default_group() if group is None else group


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, str] | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout = INHERIT,
) -> DeviceMesh:
    """See `asyncdist.init_device_mesh`."""
    parent = get_default_group() if group is None else group
    mesh = arrange(parent.ranks, mesh_shape)
    return DeviceMesh(
        device_type,
        mesh,
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        group=parent,  # type: ignore[arg-type] # resolved by `_parent`
        timeout=timeout,
    )
