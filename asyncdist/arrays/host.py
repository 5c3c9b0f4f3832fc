"""What may be sent: anything that exposes host memory as a numpy array, without a copy.

`host_array` turns the caller's object into a numpy array over the same memory or refuses it; `Flat` is that array as
the engine wants it, one contiguous run of elements.
"""

from __future__ import annotations

import struct
import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SENDABLE_KINDS: Final = frozenset("biufc")
_NARROW_FLOATS: Final = ("bfloat16", "float8_")
_HOST_DEVICES: Final = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost (pinned)
_MAX_NDIM: Final = 64  # numpy's own limit; bounds the shape a peer can make us parse


def host_array(value: object, name: str = "tensor") -> Array:
    """Return a numpy array over the memory of `value`.

    Accepts numpy arrays and anything with the buffer protocol, `__array_interface__` or DLPack on the CPU (torch CPU
    tensors among them, also those that require a gradient, which is not recorded; bfloat16 and float8 if ml_dtypes is
    installed). Raises TypeError for anything else, masked arrays among it (their mask would be lost), for object,
    string, datetime and structured dtypes, for dtypes numpy does not know, and for non-native byte order.
    """
    if type(value) is np.ndarray:
        array: Array = value
    else:
        array = _foreign_array(value, name)
    sendable_dtype(array.dtype, name)
    return array


def sendable_dtype(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """Return `dtype`. Raises TypeError for one whose elements cannot be sent as they are in memory."""
    if dtype.kind not in _SENDABLE_KINDS and not _is_extension(dtype):
        raise TypeError(f"{name} has dtype {dtype}, which cannot be sent: use a bool, integer, float or complex dtype")
    if not dtype.isnative:
        raise TypeError(f"{name} has dtype {dtype} in foreign byte order; convert it with astype({dtype.name!r})")
    return dtype


def dtype_named(name: str) -> np.dtype[Any] | None:
    """numpy's dtype of that name, or ml_dtypes' if that is installed; None if there is none that can be sent."""
    try:
        return _dtype_by_name(name.encode("ascii", "replace"))
    except ValueError:
        return None


def _foreign_array(value: object, name: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost: pass its .data, or fill it with .filled()"
        )
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if isinstance(value, np.generic):
        scalar = np.asarray(value)  # a copy, so whatever is written into it would be lost
        scalar.flags.writeable = False
        return scalar
    if hasattr(value, "__dlpack__"):
        return _dlpack_array(value, name)
    if hasattr(value, "__cuda_array_interface__"):
        raise _on_a_gpu(value, name)
    if hasattr(value, "__array_interface__"):
        return np.asarray(value)
    try:
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except TypeError:
        pass
    hint = ""
    if isinstance(value, int | float | complex | list | tuple):
        hint = "; numpy.array makes one of it, and collectives of objects take it as it is"
    raise TypeError(
        f"{name} must be a numpy array or expose its memory (buffer protocol, __array_interface__, DLPack), "
        f"not {type(value).__name__}{hint}"
    )


def _dlpack_array(value: Any, name: str) -> Array:
    if getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        if value.__dlpack_device__()[0] not in _HOST_DEVICES:
            raise _on_a_gpu(value, name)
        narrow = _narrow_tensor(value)
        return np.from_dlpack(value) if narrow is None else narrow
    except (BufferError, RuntimeError, ValueError) as error:  # bfloat16, sparse, conjugated, without memory, ...
        reason = str(error).rstrip(".")
        hint = ""
        if "dtype" in reason:
            hint = (
                "; install ml_dtypes if it is one of its types, or pass a view as integers to move its bits unreduced"
            )
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} ({kind}) cannot be seen as a numpy array: {reason}{hint}") from None


def _narrow_tensor(value: Any) -> Array | None:
    """A torch tensor of bfloat16 or float8 as an array of ml_dtypes' type of that name, over the same memory.

    DLPack has no such types that numpy would take, so the bits cross as integers. None for every other tensor, and
    where ml_dtypes is not installed.
    """
    name = str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else ""
    torch = sys.modules.get("torch")
    if torch is None or not name.startswith(_NARROW_FLOATS) or not isinstance(value, torch.Tensor):
        return None
    extension = _extension_dtype(name)
    if extension is None:
        return None
    bits = value.view(torch.int16 if extension.itemsize == 2 else torch.uint8)
    return np.from_dlpack(bits).view(extension)


def _extension_dtype(name: str) -> np.dtype[Any] | None:
    """ml_dtypes' type of that name; None without one, or without ml_dtypes."""
    try:
        import ml_dtypes

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        return None
    return extension if extension.type.__module__ == "ml_dtypes" else None


def _on_a_gpu(value: object, name: str) -> TypeError:
    return TypeError(f"{name} lives on a GPU ({type(value).__name__}); this operation takes host arrays")


def _is_extension(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is one of ml_dtypes' (bfloat16, float8, ...): numpy reports most as void with a scalar type."""
    return dtype.kind in "Vf" and dtype.type.__module__ == "ml_dtypes"


class Flat:
    """An array as one contiguous run of elements.

    `elements` is one-dimensional and `octets` the same memory as bytes. Where the array is not C-contiguous both are
    a copy (`is_copy`), and `write_back` must be called once results are in place.
    """

    __slots__ = ("_array", "_octets", "elements", "is_copy")

    def __init__(self, array: Array, *, writable: bool, name: str = "tensor") -> None:
        """Flatten `array`. Raises ValueError when it must be written and cannot be."""
        self._octets: memoryview | None = None
        self._array: Array | None = None
        self.is_copy = False
        flags = array.flags  # each look at them makes a new object
        if flags.carray:  # contiguous and writable, as nearly all are
            self.elements: Array = array if array.ndim == 1 else array.reshape(-1)
            return
        if writable and not flags.writeable:
            raise ValueError(f"{name} is read-only and this operation writes into it")
        if flags.c_contiguous:
            self.elements = array.reshape(-1)
        else:
            if writable and _overlaps_itself(array):
                raise ValueError(f"{name} overlaps itself (strides {array.strides}) and this operation writes into it")
            self.elements = array.flatten()
            if writable:
                self._array, self.is_copy = array, True

    @property
    def octets(self) -> memoryview:
        """The elements' memory as bytes."""
        found = self._octets
        if found is None:
            try:
                found = self.elements.data.cast("B")
            except ValueError:  # a dtype that the buffer protocol does not know: those of ml_dtypes
                found = self.elements.view(np.uint8).data
            self._octets = found
        return found

    def write_back(self) -> None:
        """Copy results into the caller's array, where `elements` is not already its memory."""
        if self._array is not None:
            self._array[...] = self.elements.reshape(self._array.shape)


def _overlaps_itself(array: Array) -> bool:
    """Whether two elements may share memory: whether some stride is shorter than what the smaller ones span.

    True for a few layouts that do not overlap after all, which only `as_strided` can make.
    """
    span = array.itemsize
    steps = sorted((abs(stride), extent) for stride, extent in zip(array.strides, array.shape, strict=True))
    for stride, extent in steps:
        if extent > 1:
            if stride < span:
                return array.size > 1
            span += stride * (extent - 1)
    return False


@lru_cache(maxsize=1024)
def encode_meta(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Encode a dtype and a shape as they travel before a point-to-point payload: u8 length, name, u64 per dimension."""
    name = dtype.name.encode("ascii")
    return struct.pack(f"<B{len(name)}s{len(shape)}Q", len(name), name, *shape)


@lru_cache(maxsize=1024)
def decode_meta(meta: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Decode what `encode_meta` made. Raises ValueError for anything else: the bytes come from a peer."""
    if not meta or len(meta) < 1 + meta[0] or (len(meta) - 1 - meta[0]) % 8:
        raise ValueError("malformed array description")
    ndim = (len(meta) - 1 - meta[0]) // 8
    if ndim > _MAX_NDIM:
        raise ValueError(f"array description has {ndim} dimensions, at most {_MAX_NDIM} are allowed")
    dtype = _dtype_by_name(meta[1 : 1 + meta[0]])
    return dtype, struct.unpack_from(f"<{ndim}Q", meta, 1 + meta[0])


def _dtype_by_name(name: bytes) -> np.dtype[Any]:
    try:
        text = name.decode("ascii")
        dtype = np.dtype(text)
    except (UnicodeDecodeError, TypeError, SyntaxError) as error:
        extension = _extension_dtype(name.decode("ascii", "replace"))
        if extension is None or not _is_extension(extension):
            raise ValueError(f"unknown dtype {name!r} (ml_dtypes' types need ml_dtypes installed)") from error
        return extension
    if _is_extension(dtype):  # known to numpy, because ml_dtypes is imported already
        return dtype
    if dtype.kind not in _SENDABLE_KINDS or dtype.name != text:
        raise ValueError(f"dtype {text!r} cannot be received")
    return dtype


def describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """`float32[2, 3]`, for messages."""
    return f"{dtype.name}{list(shape)}"


def human_bytes(nbytes: int) -> str:
    """`8 MiB`, for messages."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
