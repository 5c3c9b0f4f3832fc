"""Python objects as bytes: msgpack with extensions for what it lacks, and arrays behind it, aligned and uncopied.

| offset | size | field |
| --- | --- | --- |
| 0 | 1 | format: 1 msgpack, 2 pickle |
| 1 | 7 | zero |
| 8 | 8 | bytes of the skeleton, little-endian |
| 16 | | the skeleton: the object in msgpack (or pickle), without the elements of its arrays |
| | | the arrays' elements, in the order in which the skeleton names them, each at a multiple of ALIGNMENT |

Arrays above APART_BYTES may travel apart, each as a message of its own: then the skeleton only says what they are.

None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set, frozenset, and numpy arrays and scalars
of every dtype that can be sent travel exactly as they are, as do msgpack's ExtType and Timestamp; bytearray and
memoryview arrive as bytes. Everything else, subclasses of these included, would lose its type, and is a TypeError that
names it and its place in the object.

What is decoded comes from a peer: any byte string gives an object or RemoteProtocolError, in memory proportional to
its length. Arrays are views of the bytes decoded, which the caller must not use otherwise. Pickle runs code that the
peer chooses, so it is decoded only where the caller says so.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack
import numpy as np

from asyncdist.arrays.host import Array, decode_meta, encode_meta, host_array
from asyncdist.errors import RemoteProtocolError

OBJECT_META: Final = b"\0object"
"""What travels before the bytes of an object, where a dtype and a shape travel before those of an array."""

GPU_META: Final = b"\0gpu"
"""How what travels instead begins where a message announces an array on a GPU."""

ALIGNMENT: Final = 64
"""Of arrays in the bytes: a cache line, and the widest vector register."""

APART_BYTES: Final = 256 << 10
"""Longest array that is copied into the bytes where arrays may travel apart: a message up to here goes at once, and is
copied anyway."""

SMALL_BYTES: Final = 32 << 10
"""Up to here it is faster to copy arrays twice than to place them."""

MAX_DEPTH: Final = 64
"""Tuples and sets inside each other; each costs a call here and there. msgpack's own limit for the others is 511."""

MAX_DEPTH_OF_DEEP: Final = 16
"""Tuples and sets inside each other whose lists and dicts may be as deep as msgpack lets them: it calls itself for
each, and 64 times 511 calls are more than a stack of 8 MiB holds."""

MAX_LISTS: Final = 64
"""Lists and dicts inside each other in the tuples and sets below those."""

MSGPACK: Final = 1
PICKLE: Final = 2

_HEADER: Final = struct.Struct("<B7xQ")
_COMPLEX: Final = struct.Struct("<2d")

# Extension codes. A msgpack.ExtType of the caller's own has one from 0 to 127, and msgpack's Timestamp has -1.
_TUPLE: Final = -128
_SET: Final = -127
_FROZENSET: Final = -126
_COMPLEX_NUMBER: Final = -125
_LONG: Final = -124
_ARRAY: Final = -123
_SCALAR: Final = -122
_APART: Final = -121

_SEQUENCES: Final[dict[type, int]] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_BUILDERS: Final[dict[int, Callable[[list[Any]], Any]]] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}
_BASES: Final = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)
_PLAIN: Final = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview),
    *(msgpack.ExtType, msgpack.Timestamp),
)


def encode(value: object, *, allow_pickle: bool = False, apart: list[Array] | None = None) -> memoryview:
    """Return `value` as writable bytes; arrays in it are copied now.

    With `apart`, arrays above APART_BYTES are appended to it instead, uncopied, and have to be sent behind the bytes.

    Raises TypeError for what cannot be encoded, naming its type and place, and ValueError for what is nested too
    deeply, itself included. `allow_pickle`: pickle the whole object where it cannot be encoded otherwise.
    """
    try:
        return _Encoder(apart).encode(value)
    except (TypeError, ValueError):
        if not allow_pickle:
            raise
    try:
        skeleton = pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever the object's own methods raise
        raise TypeError(f"the object can neither be encoded nor pickled: {error}") from error
    return _join(PICKLE, skeleton, [])


def decode(data: memoryview, *, allow_pickle: bool = False, apart: list[Array] | None = None) -> Any:
    """Return the object that `data` encodes. Raises RemoteProtocolError for anything else.

    Arrays in the object are views of `data`, writable if it is. Those that travel apart are made, appended to `apart`,
    and have to be filled. Pickled objects are refused without `allow_pickle`, arrays apart without `apart`.
    """
    try:
        form, skeleton_bytes = _HEADER.unpack_from(data)
        if form not in (MSGPACK, PICKLE) or skeleton_bytes > len(data) - _HEADER.size or any(data[1:8]):
            raise ValueError("no such format")
        skeleton = data[_HEADER.size : _HEADER.size + skeleton_bytes]
        if form == MSGPACK:
            return _Decoder(data, _HEADER.size + skeleton_bytes, apart).decode(skeleton)
        if len(data) != _HEADER.size + skeleton_bytes:
            raise ValueError("bytes behind the end")
    except RecursionError as error:
        raise RemoteProtocolError("the object is nested too deeply") from error
    except (ValueError, TypeError, OverflowError, MemoryError, struct.error, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"the bytes are no object: {error or type(error).__name__}") from error
    if not allow_pickle:
        raise RemoteProtocolError("the object is pickled, and not every rank said allow_pickle=True")
    try:
        return pickle.loads(skeleton)
    except Exception as error:  # whatever the object's own methods raise
        raise RemoteProtocolError(f"the object cannot be unpickled: {error or type(error).__name__}") from error


class _Encoder:
    """One object on its way into bytes."""

    __slots__ = ("_apart", "_arrays", "_depth")

    def __init__(self, apart: list[Array] | None) -> None:
        self._apart = apart
        self._arrays: list[Array] = []
        self._depth = 0

    def encode(self, value: object) -> memoryview:
        """The bytes of `value`."""
        try:
            return _join(MSGPACK, self._pack(value), self._arrays)
        except (_UnsupportedError, BufferError) as error:
            culprit = error.value if isinstance(error, _UnsupportedError) else memoryview
            where, culprit = next(_unsupported(value, "the object", 0), ("the object", culprit))
            raise TypeError(f"{where} cannot be encoded: {_reason(culprit)}") from None
        except RecursionError:
            raise ValueError("the object is nested too deeply, or contains itself") from None
        except ValueError as error:
            if "recursion limit" not in str(error):
                raise
            raise ValueError("the object is nested too deeply, or contains itself") from None

    def _pack(self, value: object) -> bytes:
        # A packer of its own for every level: one that is in use cannot be entered again.
        packer = msgpack.Packer(default=self._extend, strict_types=True, unicode_errors="surrogatepass")
        packed: bytes = packer.pack(value)
        return packed

    def _extend(self, value: Any) -> msgpack.ExtType:
        """What msgpack does not know."""
        kind = type(value)
        if kind in _SEQUENCES:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"tuples and sets are nested more than {MAX_DEPTH} deep, or contain themselves")
            if self._depth > MAX_DEPTH_OF_DEEP:
                _check_shallow(value)
            packed = _own(_SEQUENCES[kind], self._pack(list(value)))
            self._depth -= 1
            return packed
        if kind is complex:
            return _own(_COMPLEX_NUMBER, _COMPLEX.pack(value.real, value.imag))
        if kind is int:
            return _own(_LONG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if _sendable(value):
            array = np.asarray(value)
            meta = encode_meta(array.dtype, array.shape)
            if kind is np.ndarray:
                if self._apart is not None and array.nbytes > APART_BYTES:
                    self._apart.append(array)
                    return _own(_APART, meta)
                self._arrays.append(array)
                return _own(_ARRAY, meta)
            return _own(_SCALAR, meta + array.tobytes())
        raise _UnsupportedError(value)


class _Decoder:
    """One object on its way out of bytes; its arrays lie in `data` from `offset` on."""

    __slots__ = ("_apart", "_data", "_depth", "_offset")

    def __init__(self, data: memoryview, offset: int, apart: list[Array] | None) -> None:
        self._apart = apart
        self._data = data
        self._offset = offset
        self._depth = 0

    def decode(self, skeleton: memoryview) -> Any:
        """The object; every byte must belong to it."""
        value = self._unpack(skeleton)
        if self._offset != len(self._data):
            raise ValueError("bytes behind the end")
        return value

    def _unpack(self, packed: memoryview | bytes) -> Any:
        _check_whole(packed)
        return msgpack.unpackb(
            packed, ext_hook=self._extension, strict_map_key=False, unicode_errors="surrogatepass", use_list=True
        )

    def _extension(self, code: int, data: bytes) -> Any:
        if code in _BUILDERS:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"tuples and sets nested more than {MAX_DEPTH} deep")
            elements = self._unpack(data)
            self._depth -= 1
            if type(elements) is not list:
                raise ValueError("a tuple or set that is no list")
            return _BUILDERS[code](elements)
        if code == _COMPLEX_NUMBER:
            return complex(*_COMPLEX.unpack(data))
        if code == _LONG:
            return int.from_bytes(data, "little", signed=True)
        if code == _ARRAY:
            return self._array(data)
        if code == _SCALAR:
            return _scalar(data)
        if code == _APART and self._apart is not None:
            dtype, shape = decode_meta(data)
            self._apart.append(np.empty(shape, dtype))
            return self._apart[-1]
        if code >= 0:
            return msgpack.ExtType(code, data)
        raise ValueError(f"extension {code} is unknown")

    def _array(self, meta: bytes) -> Array:
        dtype, shape = decode_meta(meta)
        start = self._offset + -self._offset % ALIGNMENT
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._data) - start:
            raise ValueError("an array reaches behind the end")
        if any(self._data[self._offset : start]):
            raise ValueError("bytes between two arrays")
        self._offset = start + nbytes
        return np.ndarray(shape, dtype, self._data, start)


def _own(code: int, data: bytes) -> msgpack.ExtType:
    """An extension of ours; the class itself makes those of applications only."""
    return tuple.__new__(msgpack.ExtType, (code, data))


def _check_whole(packed: memoryview | bytes) -> None:
    """Raise unless everything that msgpack's headers promise is there: it makes room for it before it looks."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(packed)))
    unpacker.feed(packed)
    unpacker.skip()


def _check_shallow(values: Any) -> None:
    """Raise unless lists and dicts in `values` are at most MAX_LISTS deep, up to the tuples and sets in them."""
    for _ in range(MAX_LISTS + 1):
        inner = [each for each in values if type(each) in (list, dict)]
        if not inner:
            return
        values = [child for each in inner for child in (each.values() if type(each) is dict else each)]
    raise ValueError(f"lists are nested more than {MAX_LISTS} deep in tuples that are, or contain themselves")


class _UnsupportedError(Exception):
    """Ends encoding at a value that cannot be encoded."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def _scalar(data: bytes) -> Any:
    if not data:
        raise ValueError("an empty scalar")
    meta, octets = data[: 1 + data[0]], data[1 + data[0] :]
    dtype, _ = decode_meta(meta)
    if len(octets) != dtype.itemsize:
        raise ValueError("a scalar of another size")
    return np.frombuffer(octets, dtype)[0]


def _sendable(value: object) -> bool:
    """Whether `value` is an array or scalar of numpy's own kind and of a dtype that can be sent."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return False
    try:
        host_array(value)
    except (TypeError, ValueError):
        return False
    return True


def _join(form: int, skeleton: bytes, arrays: list[Array]) -> memoryview:
    if not arrays:
        return memoryview(bytearray(_HEADER.pack(form, len(skeleton)) + skeleton))
    end = _HEADER.size + len(skeleton)
    if end + sum([array.nbytes for array in arrays]) <= SMALL_BYTES:
        parts = [_HEADER.pack(form, len(skeleton)), skeleton]
        for array in arrays:
            parts += (bytes(-end % ALIGNMENT), array.tobytes())
            end += -end % ALIGNMENT + array.nbytes
        return memoryview(bytearray().join(parts))
    starts = []
    for array in arrays:
        starts.append(end + -end % ALIGNMENT)
        end = starts[-1] + array.nbytes
    whole = np.empty(end, np.uint8)
    _HEADER.pack_into(whole.data, 0, form, len(skeleton))
    position = _HEADER.size + len(skeleton)
    whole[_HEADER.size : position] = np.frombuffer(skeleton, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        whole[position:start] = 0
        position = start + array.nbytes
        target: Array = whole[start:position].view(array.dtype)
        target.reshape(array.shape)[...] = array
    return whole.data


def _unsupported(value: Any, path: str, depth: int) -> Iterator[tuple[str, object]]:
    """Where in `value` something cannot be encoded, and what it is; only called when something is."""
    kind = type(value)
    if kind is memoryview and not value.c_contiguous:
        yield path, value
    if kind in _PLAIN or _sendable(value):
        return
    if kind is dict:
        children = []
        for key, child in value.items():
            children += [(f"a key of {path}", key), (f"{path}[{_brief(key)}]", child)]
    elif kind is list or kind is tuple:
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    elif kind in _SEQUENCES:
        children = [(f"an element of {path}", child) for child in value]
    else:
        yield path, value
        return
    if depth < MAX_DEPTH:
        for where, child in children:
            yield from _unsupported(child, where, depth + 1)


def _reason(value: object) -> str:
    kind = type(value)
    if isinstance(value, np.ndarray | np.generic):
        name = kind.__name__ if kind is not np.ndarray else "an array"
        return f"it is {name} of dtype {value.dtype}; send arrays of numpy's own kind with numeric dtypes"
    if kind is memoryview:
        return "it is a memoryview that is not contiguous: send bytes(...) of it"
    name = f"{kind.__module__}.{kind.__qualname__}"
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if base is not None:
        instead = f"it would arrive as a plain {base.__name__}: send {base.__name__}(...) of it"
    elif hasattr(kind, "__array__"):
        instead = "send it as a numpy array, numpy.asarray(...), or a tensor's .numpy()"
    else:
        instead = "None, numbers, str, bytes, list, tuple, dict, set and numpy arrays can be sent"
    pickled = "any type can be sent if every rank gives allow_pickle=True to init_process_group"
    return f"it is of type {name}; {instead}. Pickled, {pickled}"


def _brief(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
