"""GPU arrays as pointer, shape and dtype, whoever made them."""

from __future__ import annotations

import ctypes
import re
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncdist.arrays.device import DeviceArray, any_array, device_array, flat_of, is_contiguous, read_capsule
from asyncdist.arrays.host import Flat


class OnGpu:
    """An array that says where it is as numba's do."""

    def __init__(self, shape: Any = (2, 3), typestr: str = "<f4", **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (0x1000, False),
            "version": 3,
            **interface,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


def seen(value: Any) -> DeviceArray:
    found = device_array(value, "weights")
    assert found is not None
    return found


def test_the_interface_is_read() -> None:
    value = OnGpu(stream=7)
    found = seen(value)
    assert (found.pointer, found.shape, found.dtype, found.device) == (0x1000, (2, 3), np.float32, 1)
    assert (found.size, found.nbytes, found.itemsize, found.ndim, len(found)) == (6, 24, 4, 2, 2)
    assert (found.contiguous, found.writable, found.stream, found.owner) == (True, True, 7, value)
    assert not seen(OnGpu(data=(0x1000, True))).writable
    assert seen(OnGpu(shape=(), data=(None, False))).size == 1
    assert repr(found) == "<DeviceArray float32[2, 3] on cuda:1>"
    assert any_array(found) is found
    assert any_array(value).pointer == 0x1000


class CupyArray(OnGpu):
    """As far as it is looked at; what it also has, `__cuda_array_interface__`, takes longer to make."""

    def __init__(self, dtype: Any = np.float32, *, contiguous: bool = True) -> None:
        super().__init__(shape=(9,))
        self.data = SimpleNamespace(ptr=0x2000, device_id=3)
        self.shape = (4, 5)
        self.dtype = np.dtype(dtype)
        self.flags = SimpleNamespace(c_contiguous=contiguous)


def test_cupys_arrays_are_read_without_a_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=CupyArray))  # type: ignore[arg-type]
    value = CupyArray()
    found = seen(value)
    assert (found.pointer, found.shape, found.dtype, found.device) == (0x2000, (4, 5), np.float32, 3)
    assert (found.contiguous, found.writable, found.ordered, found.owner) == (True, True, False, value)
    assert found.stream is None  # cupy's current one, where it is used
    assert not seen(CupyArray(contiguous=False)).contiguous
    with pytest.raises(TypeError, match="weights has dtype"):
        device_array(CupyArray("V2"), "weights")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())  # type: ignore[arg-type]
    assert seen(value).shape == (9,)  # of a cupy that is being imported


def test_dtypes_that_have_no_type_string_are_the_arrays_own() -> None:
    value = OnGpu(typestr="|V2")
    value.dtype = np.dtype(ml_dtypes.bfloat16)  # type: ignore[attr-defined]
    assert seen(value).dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="weights has dtype"):
        device_array(OnGpu(typestr="|V2"), "weights")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (OnGpu(typestr="|O"), "weights has dtype object"),
        (OnGpu(typestr=">f4"), "foreign byte order"),
        (OnGpu(mask=1), "masked"),
    ],
)
def test_what_cannot_be_sent_is_refused(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        device_array(value, "weights")


@pytest.mark.parametrize("value", [np.zeros(2), np.float32(1), 3, None, "text", bytearray(3)])
def test_what_is_on_the_host_is_none(value: Any) -> None:
    assert device_array(value) is None


def test_which_gpu_an_array_is_on() -> None:
    class Bare:
        __cuda_array_interface__ = OnGpu().__cuda_array_interface__
        device: Any = None

    bare = Bare()
    with pytest.raises(TypeError, match="does not say which GPU"):
        device_array(bare)
    for name in ("id", "index"):
        bare.device = type("Device", (), {name: 3})()
        assert seen(bare).device == 3


def test_which_gpu_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        __cuda_array_interface__ = OnGpu().__cuda_array_interface__

    class Cupy:
        class cuda:
            class runtime:
                @staticmethod
                def pointerGetAttributes(pointer: int) -> Any:
                    assert pointer == 0x1000
                    return type("Attributes", (), {"device": 5})()

    monkeypatch.setitem(sys.modules, "cupy", Cupy)  # type: ignore[arg-type]
    assert seen(Bare()).device == 5


def test_strides() -> None:
    assert seen(OnGpu(strides=(12, 4))).contiguous
    assert not seen(OnGpu(strides=(4, 8))).contiguous
    assert is_contiguous((1, 3), (999, 4), 4)
    assert is_contiguous((0, 3), (1, 1), 4)
    with pytest.raises(ValueError, match=re.escape("weights is not C-contiguous")):
        flat_of(seen(OnGpu(strides=(4, 8))), writable=False, name="weights")
    with pytest.raises(ValueError, match="weights is read-only"):
        flat_of(seen(OnGpu(data=(0x1000, True))), writable=True, name="weights")


def test_flats_and_their_parts() -> None:
    flat = flat_of(seen(OnGpu()), writable=True)
    assert type(flat) is DeviceArray
    assert flat.elements.shape == (6,)
    part = flat.elements[2:5]
    assert (part.pointer, part.size, part.device) == (0x1008, 3, 1)
    assert flat.elements[9:].size == 0
    assert type(flat_of(np.zeros(2), writable=True)) is Flat
    with pytest.raises(ValueError, match="runs of a contiguous"):
        flat.elements[::2]
    with pytest.raises(ValueError, match="runs of a contiguous"):
        seen(OnGpu())[0:1]


class FakeTorch:
    """What is asked of torch about a CUDA tensor."""

    strided = "strided"

    class Tensor:
        is_cuda = True
        device = "cuda:1"
        layout = "strided"
        dtype = "torch.bfloat16"
        shape = (2, 2)

        def data_ptr(self) -> int:
            return 0x2000

        def get_device(self) -> int:
            return 1

        def is_contiguous(self) -> bool:
            return True

        def is_conj(self) -> bool:
            return False

        def is_neg(self) -> bool:
            return False

    class cuda:
        @staticmethod
        def current_stream(device: Any) -> Any:
            return type("Stream", (), {"cuda_stream": 0x77})()


def test_torch_tensors_by_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)  # type: ignore[arg-type]
    tensor = FakeTorch.Tensor()
    found = seen(tensor)
    assert (found.pointer, found.dtype, found.device, found.shape) == (0x2000, ml_dtypes.bfloat16, 1, (2, 2))
    assert (found.stream, found.ordered) == (0x77, True)
    for name, value, text in (
        ("dtype", "torch.qint8", "no dtype of numpy's name"),
        ("layout", "sparse", "not dense"),
        ("is_conj", lambda: True, "conjugated"),
    ):
        tensor = FakeTorch.Tensor()
        setattr(tensor, name, value)
        with pytest.raises(TypeError, match=text):
            device_array(tensor)
    tensor = FakeTorch.Tensor()
    tensor.is_cuda = False
    assert device_array(tensor) is None


class Lying:
    """Host memory that claims to be a GPU's, so that its capsule can be made."""

    def __init__(self, array: Any, *, fails: bool = False) -> None:
        self.array = array
        self.fails = fails

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, **options: Any) -> Any:
        if self.fails:
            raise BufferError("no")
        return self.array.__dlpack__()


@pytest.mark.parametrize("dtype", ["float16", "int64", "uint8", "bool", "complex64"])
def test_dlpack_capsules(dtype: str) -> None:
    array = np.zeros((2, 3), dtype)
    found = seen(Lying(array))
    assert (found.pointer, found.shape, found.dtype) == (array.ctypes.data, (2, 3), array.dtype)
    assert (found.contiguous, found.stream) == (True, 1)
    assert not seen(Lying(np.zeros((4, 4))[:, ::2])).contiguous
    with pytest.raises(TypeError, match="cannot be read as DLPack: no"):
        device_array(Lying(array, fails=True))


def test_capsules_of_types_nobody_has() -> None:
    array = np.zeros(2, np.int8)
    capsule = array.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    pointer = get_pointer(capsule, b"dltensor")
    code = ctypes.c_uint8.from_address(pointer + 20)
    assert code.value == 0
    code.value = 3
    with pytest.raises(ValueError, match="code 3, 8 bits, 1 lanes"):
        read_capsule(capsule)
    code.value = 0
    assert read_capsule(capsule).dtype == np.int8
