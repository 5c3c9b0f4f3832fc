"""The paths by name, and which of them take several GPUs of a rank."""

from __future__ import annotations

from typing import Final

from asyncdist.backend.device.ipc.path import CudaIpcPath
from asyncdist.backend.device.nccl.path import NcclPath
from asyncdist.backend.device.path import DevicePath
from asyncdist.backend.device.staged.path import StagedPath
from asyncdist.cuda import Provider

__all__ = ["PATHS", "several_gpus_refusal"]

PATHS: Final[dict[str, type[DevicePath]]] = {path.name: path for path in (NcclPath, CudaIpcPath, StagedPath)}

_WHY: Final = {
    CudaIpcPath.name: "ranks share a GPU",
    StagedPath.name: "some rank has no NCCL, or ranks of several hosts share GPUs",
}
"""Why the ranks took a path that none of them asked for."""


def several_gpus_refusal(collective: str, path: str, wish: str, variable: str, provider: Provider) -> str:
    """Why `path` cannot carry out a multi-device form, for a TypeError; empty if it can.

    `wish` is the path that this rank asks for, `variable` that of ASYNCDIST_CUDA_PATH; each empty for the best.
    """
    if path == NcclPath.name:
        return ""
    if variable:
        why = "ASYNCDIST_CUDA_PATH asks for it"
    elif provider.nccl is None:  # where the default backend is cuda:aio
        why = f"NCCL is missing here: {provider.nccl_reason or 'not installed'}"
    else:
        why = "its backend says cuda:aio" if wish else _WHY[path]
    return f"{collective}_multigpu with arrays on several GPUs needs path nccl, but this group takes {path}: {why}"
