"""What the checks of CUDA and NCCL use: numbers onto a device and back, and one thread per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.arrays.reduction import finish, kernel
from asyncdist.cuda.interface import Communicator, Memory, Nccl, Runtime, Stream

__all__ = ["download", "equal", "every_dtype", "on_ranks", "operands", "reduced", "upload"]

PATIENCE_S: Final = 120.0
"""Far more than any check takes; ranks that are still at it have hung."""

T = TypeVar("T")


def upload(runtime: Runtime, values: Array, device: int, *, pad: int = 0) -> Memory:
    """A block on `device` that begins with `pad` bytes, then the values."""
    memory = runtime.allocate(max(pad + values.nbytes, 1), device)
    write(runtime, values, memory.pointer + pad, device)
    return memory


def write(runtime: Runtime, values: Array, pointer: int, device: int) -> None:
    """Copy `values` to `pointer` and wait."""
    with runtime.new_stream(device) as stream, runtime.pinned(values.nbytes) as pinned:
        pinned.array[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        runtime.copy(pointer, pinned.pointer, values.nbytes, stream)
        stream.synchronize()


def download(runtime: Runtime, pointer: int, count: int, dtype: np.dtype[Any], stream: Stream) -> Array:
    """What is at `pointer` once `stream` has come here."""
    nbytes = count * dtype.itemsize
    with runtime.pinned(nbytes) as pinned:
        runtime.copy(pinned.pointer, pointer, nbytes, stream)
        stream.synchronize()
        return pinned.array.copy().view(dtype)


def every_dtype() -> list[np.dtype[Any]]:
    """All that can be reduced on a device; ml_dtypes' among them if it is installed."""
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    dtypes = [np.dtype(name) for name in names.split()]
    try:
        import ml_dtypes
    except ImportError:
        return dtypes
    return [*dtypes, *(np.dtype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))]


def operands(dtype: np.dtype[Any], count: int, number: int, *, special: bool = True) -> list[Array]:
    """`number` arrays of numbers of every size that `dtype` has, infinities and NaN among them if `special`."""
    random = np.random.default_rng(count + number)
    arrays = []
    for _ in range(number):
        if dtype == np.bool_:
            array = random.integers(0, 2, count).astype(np.bool_)
        elif special and dtype.kind != "c":
            array = np.frombuffer(random.bytes(count * dtype.itemsize), dtype)
        elif dtype.kind == "c":
            array = (random.normal(size=count) + 1j * random.normal(size=count)).astype(dtype)
        else:
            array = random.integers(1, 5, count).astype(dtype)
        arrays.append(array)
    return arrays


def equal(one: Array, other: Array) -> bool:
    """Bit by bit, but any NaN equals any; complex numbers nearly, since numpy fuses their products where it can."""
    if one.dtype.kind in "biu":
        return bool(np.array_equal(one, other))
    if one.dtype.kind == "c":
        return bool(np.allclose(one, other, rtol=0.0, atol=64 * np.finfo(one.dtype).eps))
    with np.errstate(all="ignore"):
        same = one.astype(np.complex128) == other.astype(np.complex128)
        return bool(np.all(same | (np.isnan(one.astype(np.complex128)) & np.isnan(other.astype(np.complex128)))))


def on_ranks(runtime: Runtime, nccl: Nccl, main: Callable[[Communicator, Stream], T]) -> list[T]:
    """Run `main(communicator, stream)` on as many ranks as there are devices, two at most, each in its own thread."""
    ranks = min(2, runtime.device_count())
    unique_id = nccl.unique_id()
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            communicator = nccl.open(ranks, unique_id, rank, rank)
            with runtime.new_stream(rank) as stream:
                try:
                    results[rank] = main(communicator, stream)
                    stream.synchronize()
                except BaseException:
                    communicator.abort()  # or the others wait forever
                    raise
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    return results


def reduced(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """What the CPU makes of `arrays`, one after the other."""
    result = arrays[0].copy()
    for array in arrays[1:]:
        kernel(op, result.dtype)(result, array, result)
    finish(op, result, len(arrays))
    return result


def same(results: Sequence[Array], expected: Array) -> None:
    """Every rank must have got what was expected."""
    for rank, result in enumerate(results):
        assert equal(result, expected), f"rank {rank}: {result} is not {expected}"
