"""``python bench/cuda_extra.py``: the extra whose packages fit this machine's NVIDIA driver, `cuda12` or `cuda13`.

With `--installed`, whether this interpreter has what `make gpu` needs already. Says in one line what is missing, and
exits with 1. Needs nothing but the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

DRIVER_LIBRARY: Final = "libcuda.so.1"
OLDEST_MAJOR: Final = 12
NEWEST_MAJOR: Final = 13
"""A driver runs what was built for any older CUDA."""

NEEDED: Final = {
    "cupy": "cupy",
    "numpy": "numpy",
    "ml_dtypes": "ml-dtypes",
    "msgpack": "msgpack",
    "psutil": "psutil",
    "uvloop": "uvloop",
    "click": "click",
    "rich": "rich",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
}
"""Modules that the tests and the benchmark import, and the packages that bring them. torch is measured where it is."""

OLDEST: Final = {"numpy": (2, 1, 2), "pytest-asyncio": (1, 4)}
"""Packages that an environment made for something else may have too old."""


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


def lacking() -> str:
    """What this interpreter lacks, in words; empty if nothing."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    old = [
        f"{package} {'.'.join(map(str, oldest))} or newer (it has {found})"
        for package, oldest in OLDEST.items()
        if package not in missing and _numbers(found := importlib.metadata.version(package)) < oldest
    ]
    return f"{sys.executable} lacks {', '.join([*missing, *old])}" if missing or old else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def main(arguments: Sequence[str]) -> int:
    """Print the extra, or why there is none; returns the exit code."""
    name, reason = extra()
    if name and "--installed" in arguments:
        reason = lacking()
    if reason:
        print(f"make gpu: {reason}", file=sys.stderr)
        return 1
    if "--installed" not in arguments:
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
