"""What is used of cupy exists and takes our arguments: asked of the installed cupy, which needs no device for that."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import asyncdist.cuda
from asyncdist.cuda.provider import DRIVER_LIBRARY

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")

FOLDER = Path(asyncdist.cuda.__file__).parent

ROOT = Path(__file__).parent.parent.parent.parent
"""bench is not installed: it lives beside the packages."""

LIMIT_S = 120.0

PROGRAM = """
import json, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
import cupy
from cupy.cuda import nccl, runtime
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.cuda import cupy_runtime

answers = {}

def ask(name, function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        cause = error.__cause__ or error
        answers[name] = f"{type(cause).__name__}: {cause}"
    else:
        answers[name] = ""

RUNTIME = {
    "deviceGetAttribute": (runtime.cudaDevAttrMultiProcessorCount, 0),
    "eventCreateWithFlags": (runtime.eventBlockingSync | runtime.eventDisableTiming,),
    "eventDestroy": (0,),
    "eventQuery": (0,),
    "eventRecord": (0, 0),
    "eventSynchronize": (0,),
    "free": (0,),
    "freeHost": (0,),
    "getDevice": (),
    "getDeviceCount": (),
    "hostAlloc": (1, runtime.hostAllocPortable),
    "ipcGetMemHandle": (0,),
    "ipcOpenMemHandle": (bytes(64),),
    "malloc": (1 << 21,),
    "memGetInfo": (),
    "memcpyAsync": (0, 0, 4, runtime.memcpyDefault, 0),
    "memsetAsync": (0, 255, 4, 0),
    "pointerGetAttributes": (0,),
    "runtimeGetVersion": (),
    "setDevice": (0,),
    "streamCreateWithFlags": (runtime.streamNonBlocking,),
    "streamDestroy": (0,),
    "streamSynchronize": (0,),
    "streamWaitEvent": (0, 0),
}
for name, arguments in RUNTIME.items():
    ask(f"runtime.{name}", getattr(runtime, name), *arguments)
answers["CUDARuntimeError"] = str(runtime.CUDARuntimeError(700))

class Anywhere:
    getDevice, setDevice = staticmethod(lambda: 0), staticmethod(lambda device: None)

    def __getattr__(self, name):
        return getattr(runtime, name)

cupy_runtime.runtime = Anywhere()
ours = cupy_runtime.CupyRuntime()
stream, event = ours.external_stream(0, 0), cupy_runtime._Event(0, 0)
float32 = np.dtype(np.float32)
cupy_runtime._multiprocessors = lambda device: 1
for name, arguments in {
    "device_count": (),
    "current_device": (),
    "set_device": (0,),
    "pointer_device": (0,),
    "new_stream": (0,),
    "current_stream": (0,),
    "new_event": (0,),
    "copy": (1, 2, 3, stream),
    "fill": (1, 2, 3, stream),
    "pinned": (16,),
    "allocate": (16, 0),
    "memory_size": (0,),
    "memory_range": (16,),
    "ipc_handle": (16,),
    "ipc_open": (bytes(64), 0),
    "reduce": (ReduceOp.SUM, float32, 16, [16, 32], 4, stream),
    "scale": (float32, 16, 16, 2.0, 4, stream),
    "prepare_reduce": (ReduceOp.SUM, float32, 2, 0),
    "prepare_scale": (float32, 0),
}.items():
    ask(f"ours.{name}", getattr(ours, name), *arguments)
ask("ours.wait_event", stream.wait_event, event)
ask("ours.record", event.record, stream)
ask("ours.synchronize", event.synchronize)
ask("ours.done", event.done)
launched = cupy_runtime._reduce_kernel(ReduceOp.SUM, float32, 2)
ask("launch", launched, (1,), (512,), (np.uint64(1), np.float64(1)))

from asyncdist.arrays.device import _device_number
ask("device_array", _device_number, None, 16, "tensor")

answers["nccl available"] = nccl.available
if nccl.available:
    from asyncdist.cuda import cupy_nccl
    cupy_nccl.runtime = cupy_runtime.runtime
    library = cupy_nccl.CupyNccl()
    answers["nccl name"] = library.name
    nobody = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    communicator = cupy_nccl._Communicator(nobody, 0, 1, 0, library.version())
    for name, arguments in {
        "all_reduce": (0, 0, 4, float32, ReduceOp.SUM, stream),
        "reduce": (0, 0, 4, float32, ReduceOp.SUM, 0, stream),
        "broadcast": (0, 0, 4, float32, 0, stream),
        "all_gather": (0, 0, 4, float32, stream),
        "reduce_scatter": (0, 0, 4, float32, ReduceOp.SUM, stream),
        "send": (0, 4, float32, 0, stream),
        "recv": (0, 4, float32, 0, stream),
    }.items():
        ask(f"nccl.{name}", getattr(communicator, name), *arguments)
    answers["nccl.async_error"] = communicator.async_error()
    for name in ("rank_id", "size"):
        ask(f"nccl.{name}", getattr(nobody, name))
    with library.group():
        pass
    ask("nccl.abort", communicator.abort)
    again = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    ask("nccl.destroy", cupy_nccl._Communicator(again, 0, 1, 0, library.version()).destroy)
    ask("nccl.open", library.open, 1, bytes(128), 0, 0)
    answers["runtime connect"] = cupy_nccl.os.environ["NCCL_RUNTIME_CONNECT"]
from asyncdist.cuda.interface import NcclOp, NcclType
answers["numbers"] = [
    f"{ours!r} is {theirs} there" for prefix, ours in (
        *((f"NCCL_{one.name}", one) for one in (*NcclType, *NcclOp)),
    )
    if (theirs := getattr(nccl, prefix, None)) not in (None, int(ours))
]
answers["numbers known"] = sum(hasattr(nccl, f"NCCL_{one.name}") for one in (*NcclType, *NcclOp))
answers["not ready"] = [cupy_runtime.NOT_READY, getattr(runtime, "errorNotReady", cupy_runtime.NOT_READY)]
kinds = [runtime.memoryTypeDevice, runtime.memoryTypeManaged]
answers["memory"] = [kinds, list(cupy_runtime.DEVICE_MEMORY)]
told = runtime.PointerAttributes(1, 16, 0, runtime.memoryTypeDevice)
answers["pointer"] = [told.device, told.type]

unowned = cupy.cuda.UnownedMemory(1 << 21, 4096, None, 0)
array = cupy.ndarray((4, 8), np.float32, memptr=cupy.cuda.MemoryPointer(unowned, 128))
answers["array"] = [array.data.ptr, array.device.id, list(array.shape), str(array.dtype), array.flags.c_contiguous]
answers["strided"] = array[:, ::2].flags.c_contiguous

import inspect
import cupyx.distributed
inspect.signature(cupyx.distributed.init_process_group).bind(1, 0, port=1)
inspect.signature(cupyx.distributed.NCCLBackend.all_reduce).bind(None, array, array)
answers["neighbors"] = [hasattr(cupyx.distributed.NCCLBackend, name) for name in ("stop", "all_reduce")]
for name, make in {
    "bench.stream": lambda: cupy.cuda.Stream(non_blocking=True),
    "bench.event": lambda: cupy.cuda.Event(disable_timing=True),
    "bench.device": lambda: cupy.cuda.Device(0).__enter__(),
    "bench.array": lambda: cupy.asarray(np.ones(1)),
    "bench.name": lambda: runtime.getDeviceProperties(0),
}.items():
    ask(name, make)
from bench.gpu import SPIN
ask("bench.spin", cupy.RawKernel(SPIN, "spin"), (1,), (1,), (np.uint64(1),))
answers["missing"] = [
    name for place, names in json.loads(sys.argv[1]).items() for name in names
    if not hasattr({"runtime": runtime, "binding": nccl, "cupy": cupy}.get(place) or nccl.NcclCommunicator, name)
]
answers["version"] = cupy.__version__
print(json.dumps(answers))
"""

COMPILE = """
import sys, warnings
import ml_dtypes, numpy as np
warnings.simplefilter("ignore")
import cupy
from cupy.cuda import compiler
from asyncdist.cuda.kernels import OPTIONS, reduce_source, scale_source
from asyncdist.arrays.reduce_op import ReduceOp

try:
    from cupy_backends.cuda.libs import nvrtc
    nvrtc.getVersion()
except Exception as error:
    print(f"no NVRTC: {type(error).__name__}")  # what it says has many lines
    sys.exit()
compiler._get_arch_for_options_for_nvrtc = lambda arch=None: ("-arch=sm_90", "cubin")  # else it asks the device
names = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split()
dtypes = [np.dtype(name) for name in names]
dtypes += [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]
count = 0
for dtype in dtypes:
    sources = [reduce_source(ReduceOp.SUM, dtype, 3)]
    sources += [] if dtype.kind in "biu" else [scale_source(dtype), reduce_source(ReduceOp.AVG, dtype, 2)]
    sources += [] if dtype.kind in "biuc" else [reduce_source(op, dtype, 3) for op in (ReduceOp.MIN, ReduceOp.MAX)]
    for source in sources:
        compiler.compile_using_nvrtc(source, (*OPTIONS, "-std=c++17"))
        count += 1
print(f"compiled {count}")
"""
"""As `RawKernel` does it, which adds the standard that cupy 14 asks for."""

ASSEMBLE = """
import json, re, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
from asyncdist.cuda.kernels import OPTIONS, reduce_source, scale_source
from asyncdist.arrays.reduce_op import ReduceOp
from cuda_check_tools import every_dtype

try:
    from cupy_backends.cuda.libs import nvrtc
    nvrtc.getVersion()
except Exception as error:
    print(json.dumps(f"no NVRTC: {type(error).__name__}"))
    sys.exit()

def assembled(source):
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    nvrtc.compileProgram(program, (*OPTIONS, "--gpu-architecture=compute_90", "-ftz=true"))
    return nvrtc.getPTX(program).decode()

answers = {"kernels": 0, "flush": {}}
for dtype in every_dtype():
    sources = {}
    for op in ReduceOp:
        try:
            sources[op.name] = reduce_source(op, dtype, 3)
        except KeyError:
            pass
    if dtype.kind not in "biu":
        sources["scale"] = scale_source(dtype)
    for name, source in sources.items():
        answers["kernels"] += 1
        flushing = set(re.findall(r"\\S+[.]ftz\\S*", assembled(source)))
        if flushing:
            answers["flush"][f"{name} of {dtype}"] = sorted(flushing)
average = assembled(reduce_source(ReduceOp.AVG, np.dtype(np.int8), 3))
answers["signs"] = len(re.findall(r"cvt[.]s[0-9]+[.]s8", average))
print(json.dumps(answers))
"""
"""With the option that cupy adds behind ours."""


def used() -> dict[str, set[str]]:
    """The attributes of cupy's modules, and of its communicators, that our sources name."""
    found: dict[str, set[str]] = {"runtime": set(), "binding": set(), "cupy": set(), "_raw": set()}
    for file in ("cupy_nccl.py", "cupy_runtime.py"):  # the benchmark's are asked for one by one
        for node in ast.walk(ast.parse((FOLDER / file).read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            place = node.value
            name = place.id if isinstance(place, ast.Name) else getattr(place, "attr", "")
            if name in found:
                found[name].add(node.attr)
    return found


@cache
def answers() -> dict[str, Any]:
    """What the installed cupy says to each call, in a process that sees no device."""
    names = used()
    if importlib.util.find_spec("nvidia") is None:  # where NCCL is missing cupy's module is empty
        names["binding"].clear()
        names["_raw"].clear()
    told: dict[str, Any] = json.loads(run(PROGRAM, json.dumps({place: sorted(of) for place, of in names.items()})))
    return told


def run(program: str, *arguments: str) -> str:
    """The last line that a program prints which sees no device."""
    environ = {name: value for name, value in os.environ.items() if name != "NCCL_RUNTIME_CONNECT"}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, str(ROOT)]))
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


def test_every_attribute_exists() -> None:
    assert len(used()["runtime"]) > 30
    assert "allReduce" in used()["_raw"]
    assert answers()["missing"] == []


def test_cudas_functions_take_our_arguments() -> None:
    """What fails, fails for want of a device; a wrong argument is a TypeError of cupy's own before that."""
    asked = {
        name: said
        for name, said in answers().items()
        if name.startswith(("runtime.", "ours.", "launch", "device", "bench."))
    }
    assert len(asked) > 50
    wrong = {name: said for name, said in asked.items() if said and not said.startswith("CUDARuntimeError: cudaError")}
    assert not wrong
    assert answers()["CUDARuntimeError"].startswith("cudaErrorIllegalAddress")


def test_numbers_and_objects_are_what_we_take_them_for() -> None:
    told = answers()
    assert told["numbers"] == []
    assert not told["nccl available"] or told["numbers known"] >= 14
    assert told["not ready"][0] == told["not ready"][1]
    assert told["memory"][0] == told["memory"][1]
    assert told["pointer"] == [1, 2]
    assert told["array"] == [(1 << 21) + 128, 0, [4, 8], "float32", True]
    assert told["strided"] is False
    assert told["neighbors"] == [True, True]


def test_nccls_functions_take_our_arguments() -> None:
    """They are asked of a communicator that is none, which NCCL refuses by itself."""
    if not answers()["nccl available"]:
        pytest.skip("cupy finds no NCCL")
    asked = {name: said for name, said in answers().items() if name.startswith("nccl.")}
    fine = {"nccl.abort", "nccl.destroy"}
    assert all(asked.pop(name) == "" for name in fine)
    assert "NCCL_ERROR_INVALID_ARGUMENT" in asked.pop("nccl.async_error")
    assert len(asked) >= 10
    assert not {name: said for name, said in asked.items() if not said.startswith("NcclError: NCCL_ERROR_")}
    assert answers()["nccl name"].endswith(f"through cupy {answers()['version']}")
    assert answers()["runtime connect"] == "0"


def test_the_drivers_functions_exist() -> None:
    """Where there is a driver; they are called by name, without cupy."""
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        pytest.skip(f"no NVIDIA driver: {error}")
    named = set(re.findall(r"\b(cu[A-Z]\w+)\(", (FOLDER / "cupy_runtime.py").read_text()))
    assert {"cuInit", "cuDeviceGetUuid_v2", "cuMemGetAddressRange_v2", "cuIpcCloseMemHandle"} <= named
    assert not {name for name in named if not hasattr(library, name)}


def test_cupy_compiles_our_kernels() -> None:
    said = run(COMPILE)
    if said.startswith("no NVRTC"):
        pytest.skip(said)
    assert said == "compiled 45"


def test_kernels_keep_subnormals_and_signs() -> None:
    said = json.loads(run(ASSEMBLE))
    if isinstance(said, str):
        pytest.skip(said)
    assert said["kernels"] > 80
    assert said["flush"] == {}
    assert said["signs"] >= 16 + 1  # the elements of a pack, and the one of the rest
