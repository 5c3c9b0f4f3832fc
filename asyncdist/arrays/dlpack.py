"""DLPack capsules, read without the library that made them: where the memory is, its shape and its dtype.

The structures are those of DLPack 0.x, `dltensor`, which every library gives that is not asked for a later version.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.arrays.host import dtype_named

__all__ = ["CUDA_DEVICES", "DLPackTensor", "read_capsule"]

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
