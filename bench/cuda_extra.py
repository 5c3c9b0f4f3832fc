"""``python bench/cuda_extra.py``: the extra whose packages fit this machine's NVIDIA driver, `cuda12` or `cuda13`.

Says in one line why there is none, and exits with 1. Needs nothing but the standard library: it runs before anything
is installed.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

DRIVER_LIBRARY: Final = "libcuda.so.1"
OLDEST_MAJOR: Final = 12
NEWEST_MAJOR: Final = 13
"""A driver runs what was built for any older CUDA."""


def extra(library_name: str = DRIVER_LIBRARY) -> tuple[str, str]:
    """The extra's name, or "" and why there is none."""
    try:
        library = ctypes.CDLL(library_name)
    except OSError:
        return "", f"no NVIDIA driver here ({library_name} is not found): the GPU tests need one"
    version, count = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "", "the NVIDIA driver sees no GPU here"
    library.cuDriverGetVersion(ctypes.byref(version))
    major = version.value // 1000
    if major < OLDEST_MAJOR:
        return "", f"the NVIDIA driver is for CUDA {major}; CUDA {OLDEST_MAJOR} or newer is needed"
    return f"cuda{min(major, NEWEST_MAJOR)}", ""


if __name__ == "__main__":
    name, reason = extra()
    if not name:
        print(f"make gpu: {reason}", file=sys.stderr)
        sys.exit(1)
    print(name)
