"""The kernels' arithmetic, compiled for the CPU, gives the bits that the CPU's reductions give."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_check_tools import equal, every_dtype, operands

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.arrays.reduction import finish, kernel, prepare, validate
from asyncdist.cuda.kernels import reduce_source, scale_source

COUNT = 5003
SOURCES = 3
FACTOR = 0.3

SHIM = """
#include <cstring>
#define __device__ static inline
#define __global__
#define __align__(n) alignas(n)
struct Dim { unsigned x; };
static const Dim blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
static inline float __uint_as_float(unsigned b) { float f; std::memcpy(&f, &b, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned b; std::memcpy(&b, &f, 4); return b; }
static inline float half_up(unsigned short b) { _Float16 h; std::memcpy(&h, &b, 2); return (float)h; }
static inline unsigned short half_down(float f) {
  _Float16 h = (_Float16)f; unsigned short b; std::memcpy(&b, &h, 2); return b; }
"""

ASSEMBLY = re.compile(r'asm\("(?P<text>[^"]*)" : "=\w"\((?P<result>\w+)\) : (?P<operands>.*?)\);')
OPERAND = re.compile(r'"\w"(\([^"]*\))')
SELECT = "{{ .reg .pred p; setp.nan.f32 p, %1, %1; setp.{}.or.f32 p, %1, %2, p; selp.f32 %0, %1, %2, p; }}"
IN_C = {
    "add.rn.f32 %0, %1, %2;": "{0} + {1}",
    "sub.rn.f32 %0, %1, %2;": "{0} - {1}",
    "mul.rn.f32 %0, %1, %2;": "{0} * {1}",
    "div.rn.f32 %0, %1, %2;": "{0} / {1}",
    SELECT.format("lt"): "{0} < {1} || {0} != {0} ? {0} : {1}",
    SELECT.format("gt"): "{0} > {1} || {0} != {0} ? {0} : {1}",
    "cvt.rn.f32.f64 %0, %1;": "(float){0}",
    "cvt.f32.f16 %0, %1;": "half_up({0})",
    "cvt.rn.f16.f32 %0, %1;": "half_down({0})",
    "cvt.s32.s8 %0, %1;": "(signed char){0}",
}
"""What the kernels say in PTX, as expressions of its operands."""


def defined(op: ReduceOp | PremulSum, dtype: np.dtype[Any]) -> bool:
    try:
        validate(op, dtype)
    except TypeError:
        return False
    return True


CASES = [(op, dtype) for dtype in every_dtype() for op in ReduceOp if defined(op, dtype)]
SCALED = [dtype for dtype in every_dtype() if defined(PremulSum(FACTOR), dtype)]


def in_c(found: re.Match[str]) -> str:
    """A statement of PTX in C."""
    return f"{found['result']} = {IN_C[found['text']].format(*OPERAND.findall(found['operands']))};"


def on_the_cpu(source: str, name: str, new_name: str) -> str:
    """A kernel's source as a C++ function of another name."""
    source = ASSEMBLY.sub(in_c, source)
    source = source.replace(f'extern "C" __global__ void {name}(', f"void {new_name}_(")
    body = f"namespace {new_name}_space {{\n{source}\n}}\n"
    macros = "".join(f"#undef {macro}\n" for macro in re.findall(r"#define (\w+)", source))
    arguments = {"reduce": "void* t, void* a, void* b, void* c, unsigned long long n, unsigned long long p"}.get(
        name, "void* t, void* a, unsigned long long n, double re, double im"
    )
    pointer = f"{new_name}_space::T*"
    passed = {"reduce": f"({pointer})t, ({pointer})a, ({pointer})b, ({pointer})c, n, p"}.get(
        name, f"({pointer})t, ({pointer})a, n, re, im"
    )
    return f'{body}{macros}extern "C" void {new_name}({arguments}) {{ {new_name}_space::{new_name}_({passed}); }}\n'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder: Path = tmp_path_factory.mktemp("kernels")
    parts = [
        on_the_cpu(reduce_source(op, dtype, SOURCES), "reduce", f"r_{op.name}_{dtype.name}") for op, dtype in CASES
    ]
    parts += [on_the_cpu(scale_source(dtype), "scale", f"s_{dtype.name}") for dtype in SCALED]
    source, binary = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(SHIM + "".join(parts))
    command = [compiler, "-shared", "-fPIC", "-O0", "-w", "-ffp-contract=off", "-o", str(binary), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(binary))


@pytest.mark.parametrize("packed", [False, True], ids=["one by one", "packs"])
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_reduce(library: ctypes.CDLL, op: ReduceOp, dtype: np.dtype[Any], packed: bool) -> None:
    arrays = operands(dtype, COUNT, SOURCES)
    expected = arrays[0].copy()
    for array in arrays[1:]:
        kernel(op, dtype)(expected, array, expected)
    finish(op, expected, SOURCES)
    result = np.zeros(COUNT + 16, dtype)[:COUNT]
    aligned = [align(array) for array in (result, *arrays)]
    packs = COUNT * dtype.itemsize // 16 if packed else 0
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in aligned]
    getattr(library, f"r_{op.name}_{dtype.name}")(*pointers, ctypes.c_uint64(COUNT), ctypes.c_uint64(packs))
    assert equal(aligned[0], expected)


@pytest.mark.parametrize("dtype", SCALED, ids=lambda dtype: str(dtype.name))
def test_scale(library: ctypes.CDLL, dtype: np.dtype[Any]) -> None:
    [array] = operands(dtype, COUNT, 1)
    factor = FACTOR - 2j if dtype.kind == "c" else FACTOR
    expected = array.copy()
    prepare(PremulSum(factor), expected)
    result = array.copy()
    pointers = [ctypes.c_void_p(result.ctypes.data)] * 2
    parts = ctypes.c_double(complex(factor).real), ctypes.c_double(complex(factor).imag)
    getattr(library, f"s_{dtype.name}")(*pointers, ctypes.c_uint64(COUNT), *parts)
    assert equal(result, expected)


@pytest.mark.parametrize("dtype", every_dtype(), ids=str)
def test_what_the_cpu_refuses_has_no_kernel(dtype: np.dtype[Any]) -> None:
    for op in ReduceOp:
        if not defined(op, dtype):
            with pytest.raises(KeyError):
                reduce_source(op, dtype, SOURCES)


def align(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that begins where packs may."""
    space = np.zeros(array.nbytes + 16, np.uint8)
    start = -space.ctypes.data % 16
    copy = space[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy
