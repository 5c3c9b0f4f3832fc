"""Arrays and kernels on a device for benchmarks and tests: cupy's, or the fake's where a test asks for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from asyncdist import cuda
from asyncdist.testing import FakeRuntime, fake_cuda

FAKE_VARIABLE: Final = "ASYNCDIST_TEST_FAKE_CUDA"
"""How many fake devices to use; unset or empty for real ones."""

FOLDER_VARIABLE: Final = "ASYNCDIST_TEST_FAKE_FOLDER"
"""The folder through which several processes share the fake devices."""

SPIN: Final = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


class NoGpuError(RuntimeError):
    """There is no GPU here; says why."""


class Gpu:
    """The device `device` of whichever library is there."""

    def __init__(self, provider: cuda.Provider, device: int) -> None:
        self.provider = provider
        self.runtime = provider.runtime
        self.device = device
        self.fake = isinstance(provider.runtime, FakeRuntime)

    def array(self, values: Any, device: int | None = None) -> Any:
        where = self.device if device is None else device
        if isinstance(self.runtime, FakeRuntime):
            return self.runtime.array(values, where)
        import cupy

        with cupy.cuda.Device(where):
            return cupy.asarray(values)

    def full(self, count: int, value: float, dtype: Any = np.float32) -> Any:
        """`count` times `value`."""
        return self.array(np.full(count, value, dtype))

    def spin(self, seconds: float) -> None:
        """Queue a kernel that takes so long, on one multiprocessor, on the current stream."""
        if isinstance(self.runtime, FakeRuntime):
            self.runtime.compute(seconds, self.runtime.current_stream(self.device))
            return
        import cupy

        with cupy.cuda.Device(self.device):
            cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.uint64(seconds * 1e9),))

    def synchronize(self) -> None:
        self.runtime.current_stream(self.device).synchronize()

    def copy_bandwidth(self, nbytes: int, samples: int) -> float:
        """Bytes per second of a copy within the device, counted once (read and write together are twice as much)."""
        runtime = self.runtime
        with (
            runtime.allocate(nbytes, self.device) as one,
            runtime.allocate(nbytes, self.device) as two,
            runtime.new_stream(self.device) as stream,
        ):
            times = []
            for _ in range(samples + 1):
                start = time.perf_counter()
                runtime.copy(two.pointer, one.pointer, nbytes, stream)
                stream.synchronize()
                times.append(time.perf_counter() - start)
        return nbytes / sorted(times[1:])[samples // 2]


@contextmanager
def open_gpu(device: int | None = None) -> Iterator[Gpu]:
    """This process's device: LOCAL_RANK modulo how many there are. Raises NoGpuError that says why there is none."""
    count = os.environ.get(FAKE_VARIABLE)
    if count:
        shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        folder = os.environ.get(FOLDER_VARIABLE)
        with fake_cuda(int(count), mode="threads", folder=folder or None, multi_rank_gpu=shared) as fake:
            yield Gpu(cuda.Provider(fake.runtime, fake.nccl), _own_device(device, int(count)))
            assert not fake.runtime.failure, fake.runtime.failure
        return
    provider = cuda.find()
    if provider is None:
        raise NoGpuError(cuda.reason())
    yield Gpu(provider, _own_device(device, provider.runtime.device_count()))


def _own_device(device: int | None, count: int) -> int:
    return device if device is not None else int(os.environ.get("LOCAL_RANK", "0")) % count
