"""fake_cuda: a fake provider for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncdist.cuda.provider import Provider, override
from asyncdist.testing.fake_cuda import FakeRuntime
from asyncdist.testing.fake_nccl import FakeNccl
from asyncdist.testing.fake_queues import Mode

__all__ = ["FakeCuda", "fake_cuda"]


@dataclass(frozen=True, slots=True)
class FakeCuda:
    """What `fake_cuda` gives; `nccl` is None if it was told that there is none."""

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

    `mode`: "inline" runs queued work at once and suits virtual time; "threads" runs it in a thread, takes time and lets
    `Nccl.open` wait for all ranks; "manual" lets the test say when. Processes that name the same `folder`, an empty
    one at first, share devices, IPC handles and communicators; then the mode is "threads".
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
