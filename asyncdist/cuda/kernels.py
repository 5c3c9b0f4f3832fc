"""The CUDA C++ source of the kernels that reduce and scale, for every dtype and operation that the CPU reduces.

Needs no headers, so that it compiles wherever NVRTC is. Narrow floating point is held as bits, computed in float and
rounded to nearest even after every step, which gives the CPU's results bit by bit: float has more than twice the bits
that are kept, plus two. `-fmad=false` goes with it, lest products be fused with sums.

Everything that is computed in float is written in PTX: cupy passes `-ftz=true` behind our options, with which the
compiler takes every subnormal float of an operator, a comparison or a conversion for zero. PTX does so only where it
says `.ftz`. Double has no such mode.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from asyncdist.arrays.reduce_op import ReduceOp

OPTIONS: Final = ("--fmad=false",)

PACK_BYTES: Final = 16
"""The widest load a thread can do; used where all addresses are multiples of it."""

_STEPS: Final = {
    "add": "add.rn.f32 %0, %1, %2;",
    "subtract": "sub.rn.f32 %0, %1, %2;",
    "multiply": "mul.rn.f32 %0, %1, %2;",
    "divide": "div.rn.f32 %0, %1, %2;",
    "lower": "{ .reg .pred p; setp.nan.f32 p, %1, %1; setp.lt.or.f32 p, %1, %2, p; selp.f32 %0, %1, %2, p; }",
    "higher": "{ .reg .pred p; setp.nan.f32 p, %1, %1; setp.gt.or.f32 p, %1, %2, p; selp.f32 %0, %1, %2, p; }",
}

_FLOAT: Final = """
typedef float R;
__device__ float real(double wide) { float c; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(c) : "d"(wide)); return c; }
""" + "".join(
    f'__device__ float {name}(float a, float b) {{ float c; asm("{step}" : "=f"(c) : "f"(a), "f"(b)); return c; }}\n'
    for name, step in _STEPS.items()
)

_DOUBLE: Final = """
typedef double R;
__device__ double real(double wide) { return wide; }
__device__ double add(double a, double b) { return a + b; }
__device__ double subtract(double a, double b) { return a - b; }
__device__ double multiply(double a, double b) { return a * b; }
__device__ double divide(double a, double b) { return a / b; }
__device__ double lower(double a, double b) { return a < b || a != a ? a : b; }
__device__ double higher(double a, double b) { return a > b || a != a ? a : b; }
"""

_HALF: Final = """
typedef unsigned short T;
__device__ float up(T bits) { float wide; asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits)); return wide; }
__device__ T down(float wide) { T bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide)); return bits; }
"""

_BFLOAT: Final = """
typedef unsigned short T;
__device__ float up(T bits) { return __uint_as_float((unsigned int)bits << 16); }
__device__ T down(float wide) {
  unsigned int bits = __float_as_uint(wide);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (T)(bits >> 16 | 0x40u);
  return (T)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
"""

_FLOAT8: Final = """
typedef unsigned char T;
#define MANTISSA {mantissa}
#define BIAS {bias}
#define LARGEST {largest}u  /* finite */
#define BEYOND {beyond}u    /* what a number that is too large becomes */
#define NOT_A_NUMBER {nan}u
__device__ float up(T bits) {{
  unsigned int magnitude = bits & 0x7fu;
  float wide;
  if (magnitude > {infinity}u) wide = __uint_as_float(0x7fc00000u);
  else if (magnitude > LARGEST) wide = __uint_as_float(0x7f800000u);
  else if (magnitude >> MANTISSA)
    wide = __uint_as_float((magnitude << (23 - MANTISSA)) + ((127u - BIAS) << 23));
  else wide = multiply((float)magnitude, __uint_as_float((128u - BIAS - MANTISSA) << 23));
  return __uint_as_float(__float_as_uint(wide) | (bits & 0x80u) << 24);
}}
__device__ T down(float wide) {{
  unsigned int bits = __float_as_uint(wide), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu, result;
  if (magnitude > 0x7f800000u) return (T)(sign | NOT_A_NUMBER);
  if (magnitude < (128u - BIAS) << 23) {{  /* subnormal: adding this lets the unit round it */
    float shifter = __uint_as_float((128u - BIAS + 23u - MANTISSA) << 23);
    result = __float_as_uint(add(__uint_as_float(magnitude), shifter)) - __float_as_uint(shifter);
  }} else {{
    magnitude += (1u << (22 - MANTISSA)) - 1u + (magnitude >> (23 - MANTISSA) & 1u);
    magnitude -= (127u - BIAS) << 23;
    result = magnitude >> (23 - MANTISSA);
    if (result > LARGEST) result = BEYOND;
  }}
  return (T)(sign | result);
}}
"""

_E4M3: Final = _FLOAT8.format(mantissa=3, bias=7, largest=0x7E, infinity=0x7E, beyond=0x7F, nan=0x7F)
_E5M2: Final = _FLOAT8.format(mantissa=2, bias=15, largest=0x7B, infinity=0x7C, beyond=0x7C, nan=0x7E)

_NARROW: Final = {"float16": _HALF, "bfloat16": _BFLOAT, "float8_e4m3fn": _E4M3, "float8_e5m2": _E5M2}

_WIDE: Final = {
    1: ("signed char", "unsigned char"),
    2: ("short", "unsigned short"),
    4: ("int", "unsigned int"),
    8: ("long long", "unsigned long long"),
}
"""By bytes of an integer, the type with a sign, and the type in which sums and products wrap."""

_REAL: Final = {"float32": _FLOAT, "float64": _DOUBLE}

_COMPLEX: Final = {"complex64": (_FLOAT, 8), "complex128": (_DOUBLE, 16)}

_BITS: Final = {ReduceOp.BAND: "a & b", ReduceOp.BOR: "a | b", ReduceOp.BXOR: "a ^ b"}

_BOOL: Final = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX), "a | b"),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN), "a & b"),
    **_BITS,
}

_INTEGERS: Final = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.AVG), "(C)a + (C)b"),
    ReduceOp.PRODUCT: "(C)a * (C)b",
    ReduceOp.MIN: "a < b ? a : b",
    ReduceOp.MAX: "a > b ? a : b",
    **_BITS,
}

_FLOATS: Final = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.AVG), "add(a, b)"),
    ReduceOp.PRODUCT: "multiply(a, b)",
    ReduceOp.MIN: "lower(a, b)",
    ReduceOp.MAX: "higher(a, b)",
}

_PRODUCT: Final = """
__device__ T product(T a, R re, R im) {
  T c;
  c.re = subtract(multiply(a.re, re), multiply(a.im, im));
  c.im = add(multiply(a.re, im), multiply(a.im, re));
  return c;
}
"""

_COMPLEX_NUMBERS: Final = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.AVG), "T c; c.re = add(a.re, b.re); c.im = add(a.im, b.im); return c;"),
    ReduceOp.PRODUCT: "return product(a, b.re, b.im);",
}

_INT8_QUOTIENT: Final = """
__device__ T finish(T a) {{
  int wide; asm("cvt.s32.s8 %0, %1;" : "=r"(wide) : "r"((int)a));
  return (T)(wide / {sources});
}}"""
"""Any cast of C++'s loses the sign of the first of four elements: NVRTC 13.0 forgets to extend it before it divides."""


@lru_cache(maxsize=256)
def reduce_source(op: ReduceOp, dtype: np.dtype[Any], sources: int) -> str:
    """Source of `reduce(target, source 0, ..., count, packs)`; all three last are unsigned 64-bit values.

    The first `packs` runs of 16 bytes are loaded at once, the rest one by one. Raises KeyError for an op and dtype that
    `arrays.reduction.validate` refuses.
    """
    names = [f"s{number}" for number in range(sources)]
    steps = "".join(f" value = combine(value, {name}[i]);" for name in names[1:])
    loads = " ".join(f"const Pack p{number} = ((const Pack*){name})[i];" for number, name in enumerate(names))
    pack_steps = "".join(f" value = combine(value, p{number}.lane[lane]);" for number in range(1, sources))
    return f"""{_element(dtype)}
{_combine(op, dtype)}
{_finish(op, dtype, sources)}
struct __align__({PACK_BYTES}) Pack {{ T lane[{PACK_BYTES} / sizeof(T)]; }};
extern "C" __global__ void reduce(
    T* target, {", ".join(f"const T* {name}" for name in names)}, unsigned long long count, unsigned long long packs) {{
  const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  const unsigned long long stride = gridDim.x * (unsigned long long)blockDim.x;
  for (unsigned long long i = first; i < packs; i += stride) {{
    {loads}
    Pack result;
    #pragma unroll
    for (int lane = 0; lane < {PACK_BYTES} / (int)sizeof(T); ++lane) {{
      T value = p0.lane[lane];{pack_steps}
      result.lane[lane] = finish(value);
    }}
    ((Pack*)target)[i] = result;
  }}
  for (unsigned long long i = packs * ({PACK_BYTES} / sizeof(T)) + first; i < count; i += stride) {{
    T value = s0[i];{steps}
    target[i] = finish(value);
  }}
}}
"""


@lru_cache(maxsize=32)
def scale_source(dtype: np.dtype[Any]) -> str:
    """Source of `scale(target, source, count, real part, imaginary part)` with both parts of the factor as doubles."""
    if dtype.name in _COMPLEX:
        body = "target[i] = product(a, real(re), real(im));"
    elif dtype.name in _NARROW:
        body = "target[i] = down(multiply(up(a), real(re)));"
    else:
        body = "target[i] = multiply(a, real(re));"
    return f"""{_element(dtype)}
extern "C" __global__ void scale(T* target, const T* source, unsigned long long count, double re, double im) {{
  const unsigned long long stride = gridDim.x * (unsigned long long)blockDim.x;
  for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count; i += stride) {{
    const T a = source[i];
    {body}
  }}
}}
"""


def _element(dtype: np.dtype[Any]) -> str:
    """Source of the element type T, the type that is computed in, and the conversions between them."""
    name = dtype.name
    if name in _NARROW:
        return _FLOAT + _NARROW[name]
    if name in _REAL:
        return f"{_REAL[name]}typedef R T;"
    if name in _COMPLEX:
        steps, nbytes = _COMPLEX[name]
        return f"{steps}struct __align__({nbytes}) T {{ R re, im; }};{_PRODUCT}"
    signed, wrapping = _WIDE[dtype.itemsize]
    return f"typedef {signed if dtype.kind == 'i' else wrapping} T;\ntypedef {wrapping} C;"


def _combine(op: ReduceOp, dtype: np.dtype[Any]) -> str:
    name = dtype.name
    if name in _COMPLEX:
        return f"__device__ T combine(T a, T b) {{ {_COMPLEX_NUMBERS[op]} }}"
    if name in _NARROW:
        return (
            f"__device__ float step(float a, float b) {{ return {_FLOATS[op]}; }}\n"
            "__device__ T combine(T a, T b) { return down(step(up(a), up(b))); }"
        )
    table = _BOOL if name == "bool" else _INTEGERS if dtype.kind in "iu" else _FLOATS
    return f"__device__ T combine(T a, T b) {{ return (T)({table[op]}); }}"


def _finish(op: ReduceOp, dtype: np.dtype[Any], sources: int) -> str:
    quotient = "a"
    if op is ReduceOp.AVG:
        if dtype.name in _COMPLEX:  # numpy multiplies by the reciprocal here
            scaled = f"const R s = (R)1 / (R){sources}; T c; c.re = multiply(a.re, s); c.im = multiply(a.im, s);"
            return f"__device__ T finish(T a) {{ {scaled} return c; }}"
        if dtype.name in _NARROW:
            quotient = f"down(divide(up(a), {sources}.0f))"
        elif dtype.name in _REAL:
            quotient = f"divide(a, (R){sources})"
        elif dtype.name == "int8":
            return _INT8_QUOTIENT.format(sources=sources)
        else:  # C++ truncates toward zero, too
            quotient = (
                f"(T)((unsigned long long)a / {sources}ull)" if dtype.kind == "u" else f"(T)((long long)a / {sources})"
            )
    return f"__device__ T finish(T a) {{ return {quotient}; }}"
