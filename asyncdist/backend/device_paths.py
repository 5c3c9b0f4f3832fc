"""The paths by name."""

from __future__ import annotations

from typing import Final

from asyncdist.backend.cuda_ipc import CudaIpcPath
from asyncdist.backend.device_path import DevicePath
from asyncdist.backend.nccl import NcclPath
from asyncdist.backend.staged import StagedPath

__all__ = ["PATHS"]

PATHS: Final[dict[str, type[DevicePath]]] = {path.name: path for path in (NcclPath, CudaIpcPath, StagedPath)}
