"""Arrays in the memory of a GPU, seen as pointer, shape and dtype; and what takes arrays of either kind.

Nothing here touches a GPU or imports a library for one: an array says by itself where it lies, through
`__cuda_array_interface__`, DLPack, or as a torch tensor. `any_array` is what operations call that move both kinds.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.arrays.host import Flat, dtype_named, host_array, sendable_dtype

__all__ = [
    "LEGACY_STREAM",
    "PLAIN",
    "DeviceArray",
    "any_array",
    "device_array",
    "device_flat",
    "device_of",
    "flat_of",
    "read_capsule",
]

LEGACY_STREAM: Final = 1
"""CUDA's default stream, as `__cuda_array_interface__` numbers it (0 would be ambiguous there)."""

PLAIN: Final = frozenset(np.dtype(code) for code in "?bBhHiIlLqQefdgFDG")
"""Dtypes that every backend knows, in this machine's byte order: most arrays pass with one look-up."""


class DeviceArray:
    """An array in a GPU's memory. `owner` keeps that memory; `stream` is where its producer works on it, if it says.

    `pointer` is an address on GPU number `device`, the sizes are as numpy's. It can be cut like a one-dimensional
    array, if it is one, and is never read or written here. With `ordered`, `stream` is all that its users must wait
    for: the current stream of the library it is from.
    """

    __slots__ = ("contiguous", "device", "dtype", "ordered", "owner", "pointer", "shape", "size", "stream", "writable")

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        *,
        contiguous: bool = True,
        writable: bool = True,
        owner: object = None,
        stream: int | None = None,
        ordered: bool = False,
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.contiguous = contiguous
        self.writable = writable
        self.owner = owner
        self.stream = stream
        self.ordered = ordered
        self.size = math.prod(shape)

    @property
    def elements(self) -> DeviceArray:
        """Itself, as a `Flat` has it for a host array."""
        return self

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> DeviceArray:
        start, stop, step = part.indices(self.size)
        if step != 1 or self.ndim != 1 or not self.contiguous:
            raise ValueError("only runs of a contiguous one-dimensional array can be taken")
        return self._run(self.pointer + start * self.itemsize, max(0, stop - start))

    def flat(self) -> DeviceArray:
        """The same memory, which must be contiguous, as one dimension."""
        return self if len(self.shape) == 1 else self._run(self.pointer, self.size)

    def _run(self, pointer: int, size: int) -> DeviceArray:
        return DeviceArray(
            pointer,
            (size,),
            self.dtype,
            self.device,
            writable=self.writable,
            owner=self.owner,
            stream=self.stream,
            ordered=self.ordered,
        )

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on cuda:{self.device}>"


def device_flat(array: DeviceArray, *, writable: bool, name: str = "tensor") -> DeviceArray:
    """A GPU array as one contiguous run of elements: what `Flat` is for a host array.

    Strided arrays are refused, as NCCL needs contiguous ones. Raises ValueError for those, and for an array that must
    be written and cannot be.
    """
    if writable and not array.writable:
        raise ValueError(f"{name} is read-only and this operation writes into it")
    if not array.contiguous:
        raise ValueError(
            f"{name} is not C-contiguous, which an array on a GPU must be: make a contiguous copy of it first"
        )
    return array if len(array.shape) == 1 else array.flat()


def any_array(value: object, name: str = "tensor") -> Any:
    """A numpy array or a `DeviceArray` over the memory of `value`, wherever that is.

    Raises TypeError as `host_array` does.
    """
    if type(value) is np.ndarray and value.dtype in PLAIN:
        return value
    found = device_array(value, name)
    return host_array(value, name) if found is None else found


def flat_of(array: Any, *, writable: bool, name: str = "tensor") -> Any:
    """`array`, of either kind, as one run of elements. Raises ValueError as `Flat` and `device_flat` do."""
    if type(array) is np.ndarray:
        return Flat(array, writable=writable, name=name)
    return device_flat(array, writable=writable, name=name)


def device_of(array: Any) -> int | None:
    """The number of the GPU that an array of `any_array` is on; None on the host."""
    return array.device if type(array) is DeviceArray else None


def device_array(value: object, name: str = "tensor") -> DeviceArray | None:
    """`value` as a `DeviceArray` over the same memory; None if it is not in a GPU's memory.

    Takes what has `__cuda_array_interface__` (cupy, numba, jax), torch's CUDA tensors (also those that require a
    gradient, which is not recorded) and what has DLPack. Raises TypeError for dtypes that cannot be sent.
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None and type(value) is getattr(cupy, "ndarray", None):  # it may be being imported
        # What its __cuda_array_interface__ says, in a fraction of the time; work on it is on cupy's current stream.
        array: Any = value
        memory, dtype = array.data, array.dtype
        return DeviceArray(
            memory.ptr,
            array.shape,
            dtype if dtype in PLAIN else sendable_dtype(dtype, name),
            memory.device_id,
            contiguous=array.flags.c_contiguous,
            owner=array,
        )
    if isinstance(value, np.ndarray | np.generic):
        return None
    if isinstance(value, DeviceArray):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(torch, value, name) if value.is_cuda else None
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(value, interface, name)
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in CUDA_DEVICES:
        return _from_dlpack(value, name)
    return None


def _from_interface(value: Any, interface: dict[str, Any], name: str) -> DeviceArray:
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype):  # numpy's own is exact for ml_dtypes' types, which have no type string
        dtype = np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise TypeError(f"{name} is a masked array, whose mask would be lost")
    shape = tuple(interface["shape"])
    pointer, read_only = interface["data"]
    strides = interface.get("strides")
    return DeviceArray(
        pointer or 0,
        shape,
        sendable_dtype(dtype, name),
        _device_number(value, pointer or 0, name),
        contiguous=strides is None or is_contiguous(shape, strides, dtype.itemsize),
        writable=not read_only,
        owner=value,
        stream=interface.get("stream"),
    )


def _from_torch(torch: Any, value: Any, name: str) -> DeviceArray:
    """torch's own interface knows no bfloat16, refuses tensors with gradients, and does not name its stream."""
    dtype = dtype_named(str(value.dtype).removeprefix("torch."))
    if dtype is None:
        raise TypeError(
            f"{name} ({value.dtype}) has no dtype of numpy's name; install ml_dtypes if it is one of its types"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name} ({value.layout}) is not dense")
    if value.is_conj() or value.is_neg():
        raise TypeError(f"{name} is conjugated or negated when read, not in memory: pass .resolve_conj().resolve_neg()")
    return DeviceArray(
        value.data_ptr(),
        tuple(value.shape),
        sendable_dtype(dtype, name),
        value.get_device(),
        contiguous=value.is_contiguous(),
        owner=value,
        stream=torch.cuda.current_stream(value.device).cuda_stream or LEGACY_STREAM,
        ordered=True,
    )


def _from_dlpack(value: Any, name: str) -> DeviceArray:
    try:
        capsule = value.__dlpack__()  # ordered against the legacy default stream, as no other is named
        tensor = read_capsule(capsule)
    except (BufferError, RuntimeError, ValueError) as error:
        raise TypeError(f"{name} ({type(value).__name__}) cannot be read as DLPack: {error}") from None
    return DeviceArray(
        tensor.pointer,
        tensor.shape,
        sendable_dtype(tensor.dtype, name),
        tensor.device,
        contiguous=tensor.strides is None or is_contiguous(tensor.shape, tensor.strides, 1),
        owner=(value, capsule),
        stream=LEGACY_STREAM,
    )


def _device_number(value: Any, pointer: int, name: str) -> int:
    """Which GPU an array is on, as it says itself; where it does not, as the driver says of its pointer."""
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[1])
    device = getattr(value, "device", None)
    for attribute in ("id", "index"):
        number = getattr(device, attribute, None)
        if isinstance(number, int):
            return number
    cupy = sys.modules.get("cupy")
    if cupy is not None and pointer:
        return int(cupy.cuda.runtime.pointerGetAttributes(pointer).device)
    raise TypeError(
        f"{name} ({type(value).__name__}) does not say which GPU it is on: it has neither DLPack nor .device"
    )


def is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements of `itemsize`, in the units of `strides`, follow each other in C order."""
    if 0 in shape:
        return True
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


CUDA_DEVICES: Final = frozenset({2, 13})
"""DLPack's kDLCUDA and kDLCUDAManaged."""

_NAME: Final = b"dltensor"
_KINDS: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLPackTensor(NamedTuple):
    """What a capsule holds; `strides` count elements, None if it is C-contiguous."""

    pointer: int
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]


def read_capsule(capsule: Any) -> DLPackTensor:
    """Look into a capsule, which stays its maker's: keep it as long as the memory is used. Raises ValueError."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(get_pointer(capsule, _NAME))
    shape = tuple(tensor.shape[index] for index in range(tensor.ndim))
    strides = tuple(tensor.strides[index] for index in range(tensor.ndim)) if tensor.strides else None
    kind = _KINDS.get(tensor.code)
    dtype = None
    if kind is not None and tensor.lanes == 1:
        dtype = dtype_named("bool" if kind == "bool" else f"{kind}{tensor.bits}")
    if dtype is None:
        raise ValueError(f"its elements (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) have no dtype")
    pointer = (tensor.data or 0) + tensor.byte_offset
    return DLPackTensor(pointer, tensor.device_id, shape, strides, dtype)
