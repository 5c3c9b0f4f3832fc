"""What the mesh and the progress of the mpi backend call of mpi4py, between ranks of one process.

Messages are kept in the order of sending, and match receives in the order of posting. As in an MPI, a short one is sent
at once, and a long one once its receive has it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np

__all__ = ["FakeMpi"]

EAGER_BYTES: Final = 4096


class Status:
    def __init__(self) -> None:
        self.source = -1
        self.nbytes = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, datatype: object) -> int:
        return self.nbytes


class Send:
    def __init__(self, source: int, data: bytes) -> None:
        self.source = source
        self.data = data
        self.taken = False

    def Test(self, status: Status | None = None) -> bool:
        return self.taken or len(self.data) <= EAGER_BYTES


class Receive:
    def __init__(self, comm: FakeComm, room: Any) -> None:
        self.comm = comm
        self.room = room
        self.message: Send | None = None
        self.cancelled = False

    def Start(self) -> None:
        self.message = None
        self.comm.posted.append(self)
        self.comm.match()

    def Test(self, status: Status | None = None) -> bool:
        if self.message is None:
            return False
        if status is not None:
            status.source, status.nbytes = self.message.source, len(self.message.data)
        return True

    def Cancel(self) -> None:
        self.cancelled = True
        if self in self.comm.posted:
            self.comm.posted.remove(self)

    def Wait(self) -> None:
        assert self.cancelled or self.message is not None

    def Free(self) -> None:
        assert self not in self.comm.posted


class FakeHost:
    """All ranks of a host: each has one of its own."""

    def Get_size(self) -> int:
        return 1

    def Free(self) -> None:
        pass


class FakeComm:
    def __init__(self, mpi: FakeMpi, rank: int) -> None:
        self.mpi = mpi
        self.rank = rank
        self.posted: deque[Receive] = deque()
        self.arrived: deque[Send] = deque()

    def Recv_init(self, room: list[Any], source: int, tag: int) -> Receive:
        assert source == self.mpi.ANY_SOURCE
        return Receive(self, room[0])

    def Split_type(self, kind: str) -> FakeHost:
        return FakeHost()

    def Isend(self, data: list[Any], target: int, tag: int) -> Send:
        send = Send(self.rank, bytes(data[0]))
        other = self.mpi.comms[target]
        other.arrived.append(send)
        other.match()
        return send

    def match(self) -> None:
        while self.posted and self.arrived:
            receive, message = self.posted.popleft(), self.arrived.popleft()
            receive.room[: len(message.data)] = np.frombuffer(message.data, np.uint8)
            receive.message = message
            message.taken = True


class Request:
    @staticmethod
    def Testall(requests: list[Any], statuses: object = None) -> bool:
        return all(request.Test() for request in requests)


class FakeMpi:
    """Stands for the module `mpi4py.MPI`; `comms` are the communicators of all ranks."""

    ANY_SOURCE = -1
    COMM_TYPE_SHARED = "shared"
    BYTE = "byte"
    Exception = RuntimeError
    Request = Request
    Status = Status

    def __init__(self, size: int) -> None:
        self.comms = [FakeComm(self, rank) for rank in range(size)]
