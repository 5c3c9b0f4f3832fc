"""What asyncdist needs of CUDA and NCCL: a small interface, the real libraries through cupy, and how they are found."""

from __future__ import annotations

from asyncdist.cuda.interface import Communicator, Event, Memory, Nccl, Pinned, Runtime, Stream
from asyncdist.cuda.provider import Provider, find, override, reason, visible

__all__ = [
    "Communicator",
    "Event",
    "Memory",
    "Nccl",
    "Pinned",
    "Provider",
    "Runtime",
    "Stream",
    "find",
    "override",
    "reason",
    "visible",
]
