"""The paths by name, which of them a group takes, and which take several GPUs of a rank."""

from __future__ import annotations

from typing import Final

import msgpack

from asyncdist.cuda import Provider
from asyncdist.errors import DistBackendError, RemoteProtocolError
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.gpu.nccl.path import NcclPath
from asyncdist.gpu.path import DevicePath, Member, have_own_devices
from asyncdist.gpu.staged.path import StagedPath

__all__ = ["PATHS", "choose_path", "member_of", "several_gpus_refusal"]

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


def choose_path(members: tuple[Member, ...], ranks: tuple[int, ...]) -> str:
    """The name of the path that these ranks take. Raises DistBackendError where they ask for different ones."""
    wishes = {member.wish: rank for member, rank in zip(members, ranks, strict=True)}
    if len(wishes) > 1:
        asked = ", ".join(f"rank {rank} {wish or 'the best'}" for wish, rank in wishes.items())
        raise DistBackendError(f"ranks ask for different paths for GPU arrays: {asked}")
    wish = members[0].wish
    if wish:
        if wish == "nccl" and not all(member.nccl for member in members):
            without = [rank for member, rank in zip(members, ranks, strict=True) if not member.nccl]
            raise DistBackendError(f"path nccl was asked for, but rank {', '.join(map(str, without))} has no NCCL")
        return wish
    if have_own_devices(members):
        return "nccl" if all(member.nccl for member in members) else "staged"
    one_host = len({member.host for member in members}) == 1
    return "ipc" if one_host and all(len(member.device_ids) == 1 for member in members) else "staged"


def member_of(rank: int, message: bytes) -> Member:
    """What `rank` says of itself. Raises RemoteProtocolError for what cannot be understood."""
    try:
        host, ids, version, wish, bound = msgpack.unpackb(message)
        if not (isinstance(host, str) and isinstance(version, int) and wish in ("", *PATHS)):
            raise ValueError("unexpected types")
        return Member(host, tuple(map(str, ids)), version, wish, bound is True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"rank {rank} says of its GPU what cannot be understood: {error}") from error
