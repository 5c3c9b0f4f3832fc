"""Device memory of the fake CUDA: host memory that knows which device it belongs to and when it was freed."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from asyncdist.arrays.host import Array
from asyncdist.cuda.interface import Memory, Pinned, Resource
from asyncdist.errors import DistBackendError

if TYPE_CHECKING:
    from asyncdist.testing.fake_cuda import FakeRuntime

ALIGNMENT: Final = 256
"""Device allocations begin at multiples of this, as cudaMalloc's."""

FREED_BLOCKS: Final = 256
"""Freed blocks that are remembered and not reused, so that use of them is noticed."""

FREED_BYTES: Final = 256 << 20
"""Most bytes of all remembered blocks together: they are memory of this machine."""

HANDLE_BYTES: Final = 64
"""Length of CUDA's IPC handles."""

POISON: Final = 0xDB
"""Freed memory is filled with it."""

POISON_BYTES: Final = 1 << 20
"""Bytes of a freed block that are filled. More takes time, and touches pages that were never used."""


@dataclass(slots=True)
class Block:
    """One allocation; `octets` is its memory, `key` names it to other processes if it lies in a file."""

    pointer: int
    nbytes: int
    device: int | None
    octets: Array
    key: str = ""
    file: Path | None = None
    opened: int = 0
    freed: bool = field(default=False)


class MemoryMap:
    """Every allocation of one fake runtime, by address."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._bases: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._freed: deque[Block] = deque()
        self._freed_bytes = 0
        self._number = 0

    def allocate(self, nbytes: int, device: int | None) -> Block:
        """A new block. Device memory lies in a file of the folder, if there is a folder."""
        self._number += 1
        if self._folder is not None and device is not None:
            key = f"{os.getpid():x}-{self._number:x}"
            file = self._folder / f"block-{key}"
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(descriptor, max(nbytes, 1))
            return self._add(_mapped(descriptor, nbytes), nbytes, device, key, file)
        space = np.empty(nbytes + ALIGNMENT, np.uint8)
        offset = -space.ctypes.data % ALIGNMENT
        return self._add(space[offset : offset + nbytes], nbytes, device, f"own-{self._number:x}", None)

    def open(self, key: str, nbytes: int, device: int) -> Block:
        """Map another process's block, or find it if it is mapped already."""
        for block in self._blocks.values():
            if block.key == key and block.device == device and block.opened:
                block.opened += 1
                return block
        assert self._folder is not None
        try:
            descriptor = os.open(self._folder / f"block-{key}", os.O_RDWR)
        except OSError as error:
            raise DistBackendError(f"invalid argument: the memory of this handle was freed ({error})") from None
        block = self._add(_mapped(descriptor, nbytes), nbytes, device, key, None)
        block.opened = 1
        return block

    def free(self, block: Block) -> None:
        """Give a block up. Its memory is kept for a while, so that late use is an error and no crash."""
        if block.freed:
            return
        block.freed = True
        del self._blocks[block.pointer]
        self._bases.remove(block.pointer)
        if block.file is not None:
            block.file.unlink(missing_ok=True)
        if not block.opened:
            block.octets[:POISON_BYTES] = POISON
        self._freed.append(block)
        self._freed_bytes += block.nbytes
        while len(self._freed) > 1 and (len(self._freed) > FREED_BLOCKS or self._freed_bytes > FREED_BYTES):
            self._freed_bytes -= self._freed.popleft().nbytes

    def blocks(self) -> list[Block]:
        """All blocks that are not freed."""
        return list(self._blocks.values())

    def find(self, pointer: int) -> Block | None:
        """The block that `pointer` points into; None for host memory that was not allocated here."""
        place = bisect.bisect_right(self._bases, pointer) - 1
        if place >= 0:
            block = self._blocks[self._bases[place]]
            if pointer < block.pointer + max(block.nbytes, 1):
                return block
        return None

    def by_key(self, key: str) -> Block | None:
        """The block of this process with that key."""
        return next((block for block in self._blocks.values() if block.key == key and not block.opened), None)

    def view(self, pointer: int, nbytes: int) -> Array:
        """The bytes at `pointer`, of a device or of the host. Raises DistBackendError if they were freed."""
        if not nbytes:
            return np.empty(0, np.uint8)
        block = self.find(pointer)
        if block is not None:
            start = pointer - block.pointer
            if start + nbytes > block.nbytes:
                raise DistBackendError(f"illegal memory access: {nbytes} bytes at {start} of a block of {block.nbytes}")
            return block.octets[start : start + nbytes]
        for freed in self._freed:
            if pointer < freed.pointer + freed.nbytes and freed.pointer < pointer + nbytes:
                raise DistBackendError("illegal memory access: the memory was freed while work that uses it was queued")
        if not pointer:
            raise DistBackendError("illegal memory access: null pointer")
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))

    def device_of(self, pointer: int) -> int | None:
        """The device of the block at `pointer`; None for host memory."""
        block = self.find(pointer)
        return block.device if block is not None else None

    def _add(self, octets: Array, nbytes: int, device: int | None, key: str, file: Path | None) -> Block:
        pointer = octets.ctypes.data
        if any(old.pointer == pointer for old in self._freed):
            self._freed = deque(old for old in self._freed if old.pointer != pointer)
            self._freed_bytes = sum(old.nbytes for old in self._freed)
        block = Block(pointer, nbytes, device, octets, key, file)
        bisect.insort(self._bases, pointer)
        self._blocks[pointer] = block
        return block


def _mapped(descriptor: int, nbytes: int) -> Array:
    try:
        return np.frombuffer(mmap.mmap(descriptor, max(nbytes, 1)), np.uint8)[:nbytes]
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Pointer:
    """As cupy's ndarray.data."""

    ptr: int


@dataclass(frozen=True, slots=True)
class _Device:
    """As cupy's ndarray.device."""

    id: int


@dataclass(frozen=True, slots=True)
class _Flags:
    """As cupy's ndarray.flags."""

    c_contiguous: bool


class FakeArray(NDArrayOperatorsMixin):
    """An array on a fake device, with the attributes of a cupy array that asyncdist and most tests need.

    `get` waits for the current stream and returns a numpy copy. `set` queues a copy on that stream. Slices are views.
    numpy's functions and operators take it, as they take cupy's: they wait for the current stream, and results are
    queued there.
    """

    def __init__(self, runtime: FakeRuntime, array: Array, device: int, base: FakeArray | None) -> None:
        self._runtime = runtime
        self._array = array
        self._base = base  # keeps the block
        self.device = _Device(device)
        self.dtype: np.dtype[Any] = array.dtype
        self.shape = array.shape
        self.strides = array.strides
        self.ndim = array.ndim
        self.size = array.size
        self.itemsize = array.itemsize
        self.nbytes = array.nbytes
        self.data = _Pointer(array.ctypes.data)
        self.flags = _Flags(array.flags.c_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. The stream is the current one, as in cupy."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": self._runtime.current_stream(self.device.id).handle or 1,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """CUDA, which device."""
        return 2, self.device.id

    def __dlpack__(self, **options: object) -> object:
        """Not offered: any library could dereference a real capsule."""
        raise BufferError("fake arrays have no DLPack capsule; use __cuda_array_interface__")

    def __getitem__(self, key: Any) -> FakeArray:
        found = self._array[_host(key)]
        if np.shares_memory(found, self._array) or not found.size:
            return FakeArray(self._runtime, found, self.device.id, self)
        return self._runtime.array(_host(self)[_host(key)], self.device.id)

    def __setitem__(self, key: Any, value: Any) -> None:
        whole = self.get()
        whole[_host(key)] = _host(value)
        self.set(whole)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        return self._result(getattr(ufunc, method)(*_host(inputs), **options), out and out[0])

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        if function is np.copyto:
            target, source, *casting = inputs
            if not np.can_cast(source.dtype, target.dtype, *casting):
                raise TypeError(f"{source.dtype} is not cast to {target.dtype}")
            return target.set(_host(source))
        return self._result(function(*_host(inputs), **_host(options)), None)

    def _result(self, values: Any, out: FakeArray | None) -> Any:
        if out is None:
            return self._runtime.array(values, self.device.id) if isinstance(values, np.ndarray) else values
        out.set(values)
        return out

    def astype(self, dtype: Any) -> FakeArray:
        return self._runtime.array(self.get().astype(dtype), self.device.id)

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray(self._runtime, self._array.view(dtype), self.device.id, self)

    def __len__(self) -> int:
        return len(self._array)

    def reshape(self, *shape: Any) -> FakeArray:
        view = self._array.reshape(*shape)
        if not np.shares_memory(view, self._array) and self.size:
            raise ValueError("fake arrays reshape only where no copy is needed")
        return FakeArray(self._runtime, view, self.device.id, self)

    def get(self) -> Array:
        """A copy on the host, once the current stream has come here."""
        self._runtime.current_stream(self.device.id).synchronize()
        return self._array.copy()

    def set(self, values: Any) -> None:
        """Queue a copy of `values`, a host array or scalar, into this array on the current stream."""
        source = np.broadcast_to(np.asarray(values, self.dtype), self.shape).copy()
        self._runtime.queue(
            self.device.id, lambda: np.copyto(self._array, source), [(self.data.ptr, self.nbytes)] if self.size else []
        )

    def __repr__(self) -> str:
        return f"FakeArray({self.dtype.name}{list(self.shape)} on device {self.device.id})"


def _host(value: Any) -> Any:
    """`value`, which may be a list, with copies in the place of fake arrays."""
    if isinstance(value, list | tuple):
        return type(value)(map(_host, value))
    return value.get() if isinstance(value, FakeArray) else value


def free_with(owner: object, free: Callable[[Block], None], block: Block) -> None:
    """Free `block` when `owner` is garbage."""
    weakref.finalize(owner, free, block).atexit = False


class _Held(Resource):
    def __init__(self, block: Block, release: Callable[[Block], None]) -> None:
        self._block = block
        self._release = release
        self.pointer = block.pointer
        self.nbytes = block.nbytes

    def close(self) -> None:
        """Give the memory back. Raises DistBackendError if queued work still uses it."""
        if not self._block.freed:
            self._release(self._block)


class FakePinned(_Held, Pinned):
    """Host memory that pretends to be page-locked."""

    def __init__(self, block: Block, release: Callable[[Block], None]) -> None:
        super().__init__(block, release)
        self.array = block.octets


class FakeMemory(_Held, Memory):
    """A block of a fake device."""

    def __init__(self, block: Block, release: Callable[[Block], None]) -> None:
        super().__init__(block, release)
        assert block.device is not None
        self.device = block.device


def make_handle(key: str, nbytes: int) -> bytes:
    """The bytes by which another process finds an allocation."""
    return f"{key} {nbytes}".encode().ljust(HANDLE_BYTES, b"\0")


def read_handle(handle: bytes) -> tuple[str, int]:
    """Key and size of what `make_handle` was called with. Raises DistBackendError for other bytes."""
    fields = handle.rstrip(b"\0").decode("ascii", "replace").split(" ")
    if len(handle) != HANDLE_BYTES or len(fields) != 2 or not fields[1].isdigit():
        raise DistBackendError("invalid argument: no handle of memory")
    return fields[0], int(fields[1])
