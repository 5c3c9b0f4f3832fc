"""fake_cuda, FakeRuntime: CUDA without a device, for tests of code that uses GPU arrays.

    with fake_cuda(devices=2) as cuda:
        x = cuda.runtime.array(np.ones(4, np.float32), device=1)
        await dist.all_reduce(x)
        x.get()

The fake keeps CUDA's rules. It raises where CUDA corrupts, crashes or hangs: use of freed memory, events of another
device, handles of one's own process. `fake_queues.Scheduler` says when queued work runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.arrays.reduction import finish, kernel, prepare, validate
from asyncdist.cuda.interface import MAX_SOURCES, Event, Memory, Pinned, Runtime, Stream
from asyncdist.cuda.provider import Provider, override
from asyncdist.errors import DistBackendError
from asyncdist.testing.fake_memory import (
    Block,
    FakeArray,
    FakeMemory,
    FakePinned,
    MemoryMap,
    free_with,
    make_handle,
    read_handle,
)
from asyncdist.testing.fake_nccl import FakeNccl
from asyncdist.testing.fake_queues import Delay, FakeEvent, FakeStream, Gate, Mode, Queue, Scheduler, Span, Step

FIRST_HANDLE: Final = 0x1000
DEFAULT_STREAMS: Final = (0, 1, 2)
"""Handles of streams."""

MEMORY_BYTES: Final = 16 << 30
"""Nominal memory of every device: a share of it is small. No allocation is refused for want of memory."""


class FakeRuntime(Runtime):
    """`devices` devices in host memory.

    `mode` is "inline", "threads" or "manual" (see `asyncdist.testing.fake_queues`). With `folder`, all processes that
    name that folder share the devices. The folder must be empty at first, the mode is "threads", and a process cannot
    open its own IPC handles, as in CUDA. Without a folder all ranks can live in one process.
    """

    def __init__(self, devices: int = 1, *, mode: Mode = "inline", folder: Path | None = None) -> None:
        self.name = "fake"
        self.folder = folder
        self.scheduler = Scheduler("threads" if folder is not None else mode)
        self.memory = MemoryMap(folder)
        self._devices = devices
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._garbage: deque[Block] = deque()
        self._next_handle = FIRST_HANDLE
        self._queues: dict[tuple[int, int], Queue] = {}
        for device in range(devices):
            default = self._add_queue(0, device)
            self._queues.update({(handle, device): default for handle in DEFAULT_STREAMS})

    # What tests use.

    @property
    def failure(self) -> str:
        """The first failure of queued work; empty if nothing failed."""
        return self.scheduler.failure

    def array(self, values: Any, device: int = 0) -> FakeArray:
        """A new array on `device` with the values of a numpy array."""
        source = np.asarray(values)
        made = self.empty(source.shape, source.dtype, device)
        made._array[...] = source
        return made

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32, device: int = 0) -> FakeArray:
        """A new array on `device`, freed when the array and its views are garbage."""
        self._check_device(device)
        wanted = np.empty(shape, dtype)
        block = self._allocate(wanted.nbytes, device)
        array = FakeArray(self, block.octets.view(wanted.dtype).reshape(wanted.shape), device, None)
        free_with(array, self._garbage.append, block)
        return array

    def step(self) -> bool:
        """In mode "manual": run one step that is ready; False if there is none."""
        return self.scheduler.step()

    def run_all(self) -> int:
        """In mode "manual": run all steps that are or become ready; return how many."""
        count = 0
        while self.scheduler.step():
            count += 1
        return count

    def hold(self, stream: Stream) -> Gate:
        """Queue work that ends when the returned gate's `open()` is called."""
        gate = Gate(self.scheduler)
        self.scheduler.submit(self._queue(stream), gate)
        return gate

    def compute(self, seconds: float, stream: Stream) -> None:
        """Queue work that takes so long; in modes "inline" and "manual" it takes no time."""
        inline = self.scheduler.mode != "threads"
        self.scheduler.submit(self._queue(stream), Step() if inline else Delay(seconds))

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current stream of this thread and its device, as `with stream:` does in cupy."""
        current = self._current()
        before = current.get(stream.device)
        current[stream.device] = self._queue(stream)
        try:
            yield
        finally:
            if before is None:
                del current[stream.device]
            else:
                current[stream.device] = before

    def queue(self, device: int, body: Callable[[], None], spans: Sequence[Span]) -> None:
        """Queue `body` on the current stream of `device`; `spans` are the memory that `body` touches."""
        stream = self.current_stream(device)
        self._submit(stream, spans, body)

    def close(self) -> None:
        """End the thread and forget what is queued."""
        self.scheduler.close()
        with self._lock:
            for block in self.memory.blocks():
                self.memory.free(block)

    # What Runtime asks for.

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def set_device(self, device: int) -> None:
        self._check_device(device)
        self._thread.device = device

    def device_id(self, device: int) -> str:
        self._check_device(device)
        return f"GPU-fake-{device}"

    def pointer_device(self, pointer: int) -> int | None:
        with self._lock:
            return self.memory.device_of(pointer)

    def new_stream(self, device: int) -> Stream:
        self._check_device(device)
        with self._lock:
            self._next_handle += 1
            handle = self._next_handle
        queue = self._add_queue(handle, device)
        return FakeStream(self.scheduler, queue, owned=True)

    def current_stream(self, device: int) -> Stream:
        self._check_device(device)
        queue = self._current().get(device) or self._queues[0, device]
        return FakeStream(self.scheduler, queue, owned=False)

    def external_stream(self, handle: int, device: int) -> Stream:
        queue = self._queues.get((handle, device))
        if queue is None:
            raise DistBackendError(f"invalid resource handle: no stream {handle:#x} on device {device}")
        return FakeStream(self.scheduler, queue, owned=False)

    def new_event(self, device: int) -> Event:
        self._check_device(device)
        return FakeEvent(self.scheduler, device)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            view = self.memory.view

            def body() -> None:
                with self._lock:
                    destination, origin = view(target, nbytes), view(source, nbytes)
                np.copyto(destination, origin)

            self._submit(stream, [(target, nbytes), (source, nbytes)], body)

    def fill(self, pointer: int, nbytes: int, byte: int, stream: Stream) -> None:
        if nbytes:
            self._submit(stream, [(pointer, nbytes)], lambda: self.view(pointer, nbytes).fill(byte))

    def pinned(self, nbytes: int) -> Pinned:
        return FakePinned(self._allocate(nbytes, None), self._release)

    def allocate(self, nbytes: int, device: int) -> Memory:
        self._check_device(device)
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        return FakeMemory(self._allocate(nbytes, device), self._release)

    def memory_size(self, device: int) -> int:
        self._check_device(device)
        return MEMORY_BYTES

    def memory_range(self, pointer: int) -> tuple[int, int]:
        block = self._device_block(pointer)
        return block.pointer, block.nbytes

    def ipc_handle(self, pointer: int) -> bytes:
        block = self._device_block(pointer)
        if block.opened:
            raise DistBackendError("invalid argument: only its own process gives out handles of memory")
        return make_handle(block.key, block.nbytes)

    def ipc_open(self, handle: bytes, device: int) -> int:
        key, nbytes = read_handle(handle)
        with self._lock:
            self._collect()
            block = self.memory.by_key(key)
            if block is None:
                if self.folder is None:
                    raise DistBackendError("invalid argument: the memory of this handle was freed")
                block = self.memory.open(key, nbytes, device)
            elif self.folder is not None:
                raise DistBackendError("invalid device context: a process cannot open its own handle")
        return block.pointer

    def ipc_close(self, pointer: int) -> None:
        block = self._device_block(pointer)
        with self._lock:
            if block.opened:
                block.opened -= 1
                if not block.opened:
                    self._release(block)

    def reduce(
        self, op: ReduceOp, dtype: np.dtype[Any], target: int, sources: Sequence[int], count: int, stream: Stream
    ) -> None:
        if isinstance(op, PremulSum):
            raise TypeError("scale first: factors may differ between ranks")
        validate(op, dtype)
        if not 1 <= len(sources) <= MAX_SOURCES:
            raise ValueError(f"1 to {MAX_SOURCES} sources, not {len(sources)}")
        nbytes = count * dtype.itemsize
        function = kernel(op, dtype)

        def body() -> None:
            operands = [self.view(source, nbytes).view(dtype) for source in sources]
            result = operands[0].copy()
            for operand in operands[1:]:
                function(result, operand, result)
            finish(op, result, len(sources))
            np.copyto(self.view(target, nbytes), result.view(np.uint8))

        if count:
            self._submit(stream, [(pointer, nbytes) for pointer in (target, *sources)], body)

    def scale(
        self, dtype: np.dtype[Any], target: int, source: int, factor: float | complex, count: int, stream: Stream
    ) -> None:
        op = PremulSum(factor)
        validate(op, dtype)
        nbytes = count * dtype.itemsize

        def body() -> None:
            result = self.view(source, nbytes).view(dtype).copy()
            prepare(op, result)
            np.copyto(self.view(target, nbytes), result.view(np.uint8))

        if count:
            self._submit(stream, [(target, nbytes), (source, nbytes)], body)

    # Shared with the fake NCCL.

    def view(self, pointer: int, nbytes: int) -> Array:
        """The bytes at `pointer`. Raises DistBackendError if they were freed."""
        with self._lock:
            self._collect()
            return self.memory.view(pointer, nbytes)

    def submit(self, stream: Stream, step: Step) -> None:
        """Queue a step. Its memory must be there now, as later."""
        for pointer, nbytes in step.spans:
            self.view(pointer, nbytes)
        self.scheduler.submit(self._queue(stream), step)

    def _submit(self, stream: Stream, spans: Sequence[Span], body: Callable[[], None]) -> None:
        self.submit(stream, Step(spans, body))

    def _release(self, block: Block) -> None:
        """Free a block that nothing queued uses."""
        with self.scheduler.changed:
            busy = self.scheduler.in_use((block.pointer, block.nbytes))
        if busy:
            raise DistBackendError("memory was closed while work that uses it is queued (CUDA would wait for it)")
        with self._lock:
            self.memory.free(block)

    def _collect(self) -> None:
        while self._garbage:
            self.memory.free(self._garbage.popleft())

    def _allocate(self, nbytes: int, device: int | None) -> Block:
        self.scheduler.check()
        with self._lock:
            self._collect()
            return self.memory.allocate(nbytes, device)

    def _device_block(self, pointer: int) -> Block:
        with self._lock:
            self._collect()
            block = self.memory.find(pointer)
        if block is None or block.device is None:
            raise DistBackendError(f"invalid argument: {pointer:#x} is no device memory")
        return block

    def _add_queue(self, handle: int, device: int) -> Queue:
        queue = self._queues[handle, device] = Queue(handle, device)
        self.scheduler.add(queue)
        return queue

    def _queue(self, stream: Stream) -> Queue:
        if not isinstance(stream, FakeStream):
            raise TypeError(f"expected a stream of the fake runtime, got {stream!r}")
        return stream.queue

    def _current(self) -> dict[int, Queue]:
        current: dict[int, Queue] | None = getattr(self._thread, "streams", None)
        if current is None:
            current = self._thread.streams = {}
        return current

    def _check_device(self, device: int) -> None:
        if not 0 <= device < self._devices:
            raise DistBackendError(f"invalid device ordinal: {device} of {self._devices}")


@dataclass(frozen=True, slots=True)
class FakeCuda:
    """The fakes of `fake_cuda`; `nccl` is None where the test has no NCCL."""

    runtime: FakeRuntime
    nccl: FakeNccl | None


@contextmanager
def fake_cuda(
    devices: int = 1,
    *,
    mode: Mode = "inline",
    folder: Path | str | None = None,
    nccl: bool = True,
    strict: bool = False,
    multi_rank_gpu: bool = False,
    native_premul_sum: bool = False,
) -> Iterator[FakeCuda]:
    """Give this process `devices` fake devices, and a fake NCCL if `nccl`, until the block ends.

    `mode`: "inline" runs queued work at once and suits virtual time. "threads" runs it in a thread, takes time, and
    lets `Nccl.open` wait for all ranks. "manual" runs it when the test says so. Processes that name the same `folder`,
    which is empty at first, share devices, IPC handles and communicators; then the mode is "threads".
    """
    runtime = FakeRuntime(devices, mode=mode, folder=Path(folder) if folder is not None else None)
    library = FakeNccl(runtime, strict=strict, multi_rank_gpu=multi_rank_gpu, native_premul_sum=native_premul_sum)
    fake = FakeCuda(runtime, library if nccl else None)
    reason = "" if nccl else "the test has no NCCL"
    try:
        with override(Provider(runtime, fake.nccl, reason)):
            yield fake
    finally:
        library.close()
        runtime.close()
