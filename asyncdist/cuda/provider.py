"""Which CUDA, NCCL and GPU this process uses: cupy's where there is a driver, or what a test put in its place.

Nothing is imported or started before `find` is called.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncdist.cuda.interface import Nccl, Runtime

DRIVER_LIBRARY: Final = "libcuda.so.1"

DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")
"""One of them exists where a device does: servers and desktops, Jetson, Windows' Linux subsystem."""


@dataclass(frozen=True, slots=True)
class Provider:
    """The libraries in use; `nccl` is None where it does not work, and `nccl_reason` says why."""

    runtime: Runtime
    nccl: Nccl | None
    nccl_reason: str = ""


class _State:
    """What was found, once; tests replace it."""

    lock = threading.Lock()
    looked = False
    provider: Provider | None = None
    reason = ""


_state: Final = _State()


def visible() -> bool:
    """Whether CUDA arrays can be expected here, told cheaply: cupy is installed and there are a driver and a device.

    Imports and starts nothing (in particular no CUDA context, which a later fork would not survive). `find` may still
    find that the driver is broken.
    """
    if _state.looked:
        return _state.provider is not None
    return not _obstacle()


def find() -> Provider | None:
    """The libraries to use, or None: then `reason` says why. Imports cupy the first time; cached. From any thread."""
    if _state.looked:
        return _state.provider
    with _state.lock:
        if not _state.looked:
            _state.provider, _state.reason = _look()
            _state.looked = True
        return _state.provider


def reason() -> str:
    """Why there is no provider, as a sentence without its end, e.g. "cupy is not installed ..."; empty if there is."""
    find()
    return _state.reason


@contextmanager
def override(provider: Provider | None) -> Iterator[None]:
    """Use `provider` (None: no device) in this process until the end of the `with` block; for tests."""
    with _state.lock:
        before = _state.looked, _state.provider, _state.reason
        _state.looked, _state.provider = True, provider
        _state.reason = "" if provider else "a test took CUDA away"
    try:
        yield
    finally:
        with _state.lock:
            _state.looked, _state.provider, _state.reason = before


def _obstacle() -> str:
    """Why importing cupy would be in vain; empty if it would not."""
    if sys.platform != "linux":
        return "CUDA arrays are supported on Linux only"
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed (pip install 'asyncdist[cuda12]' or 'asyncdist[cuda13]')"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every device"
    if not any(Path(file).exists() for file in DEVICE_FILES):
        return "this machine has no NVIDIA device"
    return ""


def _look() -> tuple[Provider | None, str]:
    obstacle = _obstacle()
    if obstacle:
        return None, obstacle
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        return None, f"the NVIDIA driver's library cannot be loaded: {error}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cupy about its surroundings: where they are errors, it would not load
            from asyncdist.cuda.cupy_runtime import CupyRuntime

        runtime = CupyRuntime()
        count = runtime.device_count()
    except Exception as error:  # whatever a broken installation raises: a CPU job must start all the same
        return None, f"cupy does not work here: {type(error).__name__}: {error}"
    if not count:
        return None, "the NVIDIA driver sees no device"
    return Provider(runtime, *_nccl()), ""


def _nccl() -> tuple[Nccl | None, str]:
    """NCCL through cupy, or None and why: other paths do without."""
    try:
        from asyncdist.cuda.cupy_nccl import CupyNccl

        return CupyNccl(), ""
    except Exception as error:  # as above
        return None, f"NCCL does not work here: {type(error).__name__}: {error}"


def chosen_device(device: Any, environ: Mapping[str, str] = os.environ) -> int | None:
    """The GPU's number that `device` says: an int, `"cuda:1"`, a device of torch or cupy; None for None.

    `"cuda"`, or torch's device without a number, is LOCAL_RANK's, modulo the number of GPUs. Raises TypeError for
    anything else, ValueError where there is no such GPU.
    """
    if device is None:
        return None
    number = _device_number(device)
    found = find()
    if found is None:
        raise ValueError(f"device_id={device!r}: {reason()}")
    count = found.runtime.device_count()
    if number is None:
        return int(environ.get("LOCAL_RANK", "0")) % count
    if not 0 <= number < count:
        raise ValueError(f"device_id={device!r}: there are {count} GPUs here")
    return number


def _device_number(device: Any) -> int | None:
    """The number in `device`; None where it has none."""
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind == "cuda" and (number.isdigit() or not colon):
            return int(number) if colon else None
        raise ValueError(f"device_id={device!r}: write 'cuda' or 'cuda:1'")
    if getattr(device, "type", "cuda") != "cuda":
        raise ValueError(f"device_id={device!r}: groups are bound to GPUs only")
    for attribute in ("index", "id"):  # torch's and cupy's
        number = getattr(device, attribute, device)
        if number is None or (isinstance(number, int) and not isinstance(number, bool)):
            return number
    raise TypeError(f"device_id must be a GPU's number or a device, not {type(device).__name__}")
