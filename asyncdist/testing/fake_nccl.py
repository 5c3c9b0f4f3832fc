"""FakeNccl: NCCL without a device; communicators whose operations run on the streams of a `FakeRuntime`.

Like NCCL it hangs when ranks disagree or one is missing, and only an abort ends that. What went wrong is in
`violations`, so that a test can say more than that it timed out.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.arrays.reduction import finish, kernel, prepare
from asyncdist.cuda.interface import FLOAT8_CAPABILITY, Communicator, Nccl, Stream, refusal
from asyncdist.errors import DistBackendError
from asyncdist.testing.fake_meeting import LocalMeeting, Meeting, RemoteMeeting, serve
from asyncdist.testing.fake_queues import Span, Step

if TYPE_CHECKING:
    from asyncdist.testing.fake_cuda import FakeRuntime

UNIQUE_ID_BYTES: Final = 128

VERSION: Final = 23004


Op: TypeAlias = ReduceOp | PremulSum


class FakeNccl(Nccl):
    """NCCL on `runtime`, whose folder says whether ranks meet in this process or across processes.

    `strict` makes every violation an `async_error` of all ranks of the communicator, where NCCL would hang.
    `multi_rank_gpu` is NCCL_MULTI_RANK_GPU_ENABLE. In modes "inline" and "manual" `open` does not wait for other ranks,
    as they may live in the same thread. `capability` is the major compute
    capability of all devices.
    """

    def __init__(
        self,
        runtime: FakeRuntime,
        *,
        strict: bool = False,
        multi_rank_gpu: bool = False,
        native_premul_sum: bool = False,
    ) -> None:
        self.name = "fake NCCL"
        self.runtime = runtime
        self.capability = FLOAT8_CAPABILITY
        self.strict = strict
        self.blocking = runtime.scheduler.mode == "threads"
        self.native_premul_sum = native_premul_sum
        self.communicators: list[FakeCommunicator] = []
        self._multi_rank_gpu = multi_rank_gpu
        self._meetings: dict[bytes, Meeting] = {}
        self._servers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._thread = threading.local()

    @property
    def violations(self) -> list[str]:
        """All disagreements of ranks so far."""
        meetings = {id(communicator.meeting): communicator.meeting for communicator in self.communicators}
        return [text for meeting in meetings.values() for text in meeting.violations]

    def close(self) -> None:
        """Let no more ranks join. Communicators stay as they are."""
        while self._servers:
            self._servers.pop()()

    def version(self) -> int:
        return VERSION

    def unique_id(self) -> bytes:
        unique_id = secrets.token_bytes(UNIQUE_ID_BYTES)
        folder = self.runtime.folder
        if folder is not None:
            self._servers.append(serve(folder / _socket_name(unique_id), multi_rank_gpu=self._multi_rank_gpu))
        return unique_id

    def open(self, size: int, unique_id: bytes, rank: int, device: int) -> Communicator:
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise DistBackendError(f"a unique id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
        if not 0 <= rank < size:
            raise DistBackendError(f"ncclInvalidArgument: rank {rank} of {size}")
        device_id = self.runtime.device_id(device)
        meeting = self._meeting(size, unique_id)
        if meeting.size != size:
            raise DistBackendError(f"ncclInvalidArgument: {size} ranks here, {meeting.size} elsewhere")
        return self._join(meeting, rank, device, device_id)

    @contextmanager
    def group(self) -> Iterator[None]:
        depth = getattr(self._thread, "depth", 0)
        if not depth:
            self._thread.calls = []
        self._thread.depth = depth + 1
        try:
            yield
        finally:
            self._thread.depth = depth
            if not depth:
                self._launch(self._thread.calls)

    def refusal(self, dtype: np.dtype[Any], op: ReduceOp | PremulSum, device: int) -> str:
        return refusal(dtype, op, VERSION, self.capability)

    def issue(self, call: Call, stream: Stream) -> None:
        """Queue an operation; inside a group keep it until the group ends."""
        if getattr(self._thread, "depth", 0):
            self._thread.calls.append((call, stream))
        else:
            self._launch([(call, stream)])

    def _launch(self, calls: Sequence[tuple[Call, Stream]]) -> None:
        together: dict[tuple[int, int], tuple[Stream, list[Call]]] = {}
        for call, stream in calls:
            together.setdefault((stream.device, stream.handle), (stream, []))[1].append(call)
        for stream, members in together.values():
            self.runtime.submit(stream, Launch(members))

    def _meeting(self, size: int, unique_id: bytes) -> Meeting:
        changed = self.runtime.scheduler.stir
        if self.runtime.folder is not None:
            address = self.runtime.folder / _socket_name(unique_id)
            if not address.exists():
                raise DistBackendError("ncclSystemError: nobody listens where this unique id says")
            return RemoteMeeting(address, size, changed)
        with self._lock:
            return self._meetings.setdefault(
                unique_id, LocalMeeting(size, changed, multi_rank_gpu=self._multi_rank_gpu)
            )

    def _join(self, meeting: Meeting, rank: int, device: int, device_id: str) -> FakeCommunicator:
        communicator = FakeCommunicator(self, meeting, rank, device)
        self.communicators.append(communicator)
        meeting.join(rank, device_id)
        if self.blocking:
            self.runtime.scheduler.wait(lambda: meeting.complete or bool(meeting.failure), "opening a communicator")
        if meeting.failure:
            raise DistBackendError(meeting.failure)
        return communicator


class FakeCommunicator(Communicator):
    """See Communicator. `fail` is for tests."""

    def __init__(self, nccl: FakeNccl, meeting: Meeting, rank: int, device: int) -> None:
        self.nccl = nccl
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.device = device
        self.state = "open"
        self.pending = 0
        self._error = ""
        self._number = 0
        self._counts: dict[tuple[int, int, bool], int] = {}

    def fail(self, text: str) -> None:
        """Have `async_error` return `text` from now on."""
        self._error = text

    def all_reduce(self, source: int, target: int, count: int, dtype: np.dtype[Any], op: Op, stream: Stream) -> None:
        self._collective("all_reduce", source, target, count, count, dtype, stream, op=op)

    def reduce(
        self, source: int, target: int, count: int, dtype: np.dtype[Any], op: Op, root: int, stream: Stream
    ) -> None:
        where = target if self.rank == root else 0
        self._collective(f"reduce to {root}", source, where, count, count, dtype, stream, op=op)

    def broadcast(self, source: int, target: int, count: int, dtype: np.dtype[Any], root: int, stream: Stream) -> None:
        origin = source if self.rank == root else 0
        self._collective(f"broadcast from {root}", origin, target, count, count, dtype, stream, part=root)

    def all_gather(self, source: int, target: int, count: int, dtype: np.dtype[Any], stream: Stream) -> None:
        self._collective("all_gather", source, target, count, self.size * count, dtype, stream)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: np.dtype[Any], op: Op, stream: Stream
    ) -> None:
        self._collective(
            "reduce_scatter", source, target, self.size * count, count, dtype, stream, op=op, part=self.rank
        )

    def send(self, source: int, count: int, dtype: np.dtype[Any], peer: int, stream: Stream) -> None:
        self._pair(self.rank, peer, (source, count * dtype.itemsize), None, dtype, stream)

    def recv(self, target: int, count: int, dtype: np.dtype[Any], peer: int, stream: Stream) -> None:
        self._pair(peer, self.rank, None, (target, count * dtype.itemsize), dtype, stream)

    def async_error(self) -> str:
        if self.state != "open":
            return ""
        if self.nccl.strict and self.meeting.violations:
            return self.meeting.violations[0]
        return self._error or self.meeting.failure

    def abort(self) -> None:
        if self.state == "open":
            self.state = "aborted"
            self.meeting.leave()
            self.nccl.runtime.scheduler.stir()

    def destroy(self) -> None:
        self._check()
        if self.pending:
            raise DistBackendError(f"destroyed with {self.pending} operations in flight")
        self.state = "destroyed"
        self.meeting.leave()

    def _collective(
        self,
        name: str,
        source: int,
        target: int,
        count_in: int,
        count_out: int,
        dtype: np.dtype[Any],
        stream: Stream,
        *,
        op: Op | None = None,
        part: int | None = None,
    ) -> None:
        self._check()
        reason = self.nccl.refusal(dtype, op, self.device) if op is not None else ""
        if isinstance(op, PremulSum) and not self.nccl.native_premul_sum:
            reason = "ncclInvalidArgument: this NCCL has no PREMUL_SUM"
        if reason:
            raise DistBackendError(reason)
        said = "PREMUL_SUM" if isinstance(op, PremulSum) else op
        words = f"{name} {count_in} {dtype.name} {said}"
        call = Call(
            self,
            self.rank,
            self._next_slot(),
            tuple(range(self.size)),
            words,
            (source, count_in * dtype.itemsize) if source else None,
            (target, count_out * dtype.itemsize) if target else None,
            dtype,
            op,
            part,
        )
        self.pending += 1
        self.nccl.issue(call, stream)

    def _pair(
        self, source: int, peer: int, out: Span | None, into: Span | None, dtype: np.dtype[Any], stream: Stream
    ) -> None:
        self._check()
        other = peer if out is not None else source
        if not 0 <= other < self.size:
            raise DistBackendError(f"ncclInvalidArgument: peer {other} of {self.size}")
        key = (source, peer, out is None)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        span = out or into
        assert span is not None
        receiver = peer + self.size
        who = self.rank if out is not None else receiver
        words = f"{span[1]} bytes"
        call = Call(self, who, f"{source}>{peer} {number}", (source, receiver), words, out, into, dtype, None, source)
        self.pending += 1
        self.nccl.issue(call, stream)

    def _next_slot(self) -> str:
        self._number += 1
        return str(self._number)

    def _check(self) -> None:
        self.nccl.runtime.scheduler.check()
        if self.state != "open":
            raise DistBackendError(f"ncclInvalidArgument: the communicator was {self.state}")
        if self.meeting.failure:
            raise DistBackendError(self.meeting.failure)


def _socket_name(unique_id: bytes) -> str:
    return f"nccl-{unique_id[:8].hex()}"


@dataclass(slots=True)
class Call:
    """One operation of one rank."""

    communicator: FakeCommunicator
    who: int
    """The rank, as in `Meeting.bring`."""

    slot: str
    expected: tuple[int, ...]
    words: str
    source: Span | None
    target: Span | None
    dtype: np.dtype[Any]
    op: Op | None = None
    part: int | None = None
    """The rank whose part of the contributions, or of the result, is the output; None for all of it."""

    brought: bool = False
    results: dict[int, bytes] | None = None

    def ready(self) -> bool:
        """Bring this rank's part, the first time; then look whether all ranks have come."""
        communicator = self.communicator
        if communicator.state == "aborted":
            return True
        if not self.brought:
            self.brought = True
            communicator.meeting.bring(self.slot, self.who, self.expected, self.words, self._contribution())
            communicator.nccl.runtime.scheduler.news += 1
        if self.results is None:
            self.results = communicator.meeting.take(self.slot, self.who)
        return self.results is not None

    def _contribution(self) -> bytes:
        if self.source is None:
            return b""
        octets = self.communicator.nccl.runtime.view(*self.source).copy()
        if self.op is not None:
            prepare(self.op, octets.view(self.dtype))
        return octets.tobytes()

    def run(self) -> None:
        self.communicator.pending -= 1
        if self.results is None or self.target is None or self.communicator.state == "aborted":
            return
        pointer, nbytes = self.target
        if self.op is not None:
            octets = _reduced([self.results[rank] for rank in sorted(self.results)], self.dtype, self.op)
            start = self.part * nbytes if self.part is not None else 0
            octets = octets[start : start + nbytes]
        elif self.part is not None:
            octets = self.results[self.part]
        else:
            octets = b"".join(self.results[rank] for rank in sorted(self.results))
        self.communicator.nccl.runtime.view(pointer, nbytes)[:] = np.frombuffer(octets, np.uint8)


class Launch(Step):
    """Operations that run together."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__([span for call in calls for span in (call.source, call.target) if span is not None])
        self._calls = calls

    def ready(self) -> bool:
        return sum(call.ready() for call in self._calls) == len(self._calls)  # not all(): each must bring its part

    def run(self) -> None:
        for call in self._calls:
            call.run()


def _reduced(contributions: Sequence[bytes], dtype: np.dtype[Any], op: Op) -> bytes:
    operands = [np.frombuffer(contribution, np.uint8).view(dtype).copy() for contribution in contributions]
    function = kernel(op, dtype)
    for operand in operands[1:]:
        function(operands[0], operand, operands[0])
    finish(op, operands[0], len(operands))
    return operands[0].tobytes()
