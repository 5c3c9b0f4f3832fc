"""cupy's modules as tests put them in its place: bindings that answer as cupy 13's and 14's were read to."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OURS = ("asyncdist.cuda.cupy_runtime", "asyncdist.cuda.cupy_runtime", "asyncdist.cuda.cupy_nccl")


class Bindings:
    """cupy's modules, as far as they are used; `calls` is what was called, with the device that was current."""

    def __init__(self, version: str = "14.2.0") -> None:
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        self.event_status = 0
        self.async_error: Exception | None = None
        self.device = threading.local()
        self.streams = {0: 0, 1: 0}
        self.pointers = {0x1000: (2, 1), 0x2000: (0, -2)}

    def getDevice(self) -> int:
        return getattr(self.device, "number", 0)

    def setDevice(self, device: int) -> None:
        self.device.number = device

    def record(self, name: str, result: Any = None) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, self.getDevice(), *arguments))
            return result

        return call

    def closed(self, pointer: int) -> int:
        """What the driver says to closing a handle: 1 is CUDA_ERROR_INVALID_VALUE."""
        self.calls.append(("cuIpcCloseMemHandle", self.getDevice(), pointer))
        return int(pointer != 0x5000)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def runtime(self) -> ModuleType:
        module = ModuleType("cupy.cuda.runtime")
        module.__dict__.update(
            getDevice=self.getDevice,
            setDevice=self.setDevice,
            getDeviceCount=lambda: 2,
            deviceGetAttribute=lambda attribute, device: {75: (8, 9)}[attribute][device],
            runtimeGetVersion=lambda: 12090,
            streamNonBlocking=1,
            eventBlockingSync=1,
            eventDisableTiming=2,
            hostAllocPortable=1,
            memcpyDefault=4,
            CUDARuntimeError=lambda status: RuntimeError(f"CUDA error {status}"),
            eventQuery=lambda handle: self.event_status,
            pointerGetAttributes=lambda p: SimpleNamespace(type=self.pointers[p][0], device=self.pointers[p][1]),
            **{name: self.record(name, 77) for name in ("streamCreateWithFlags", "eventCreateWithFlags", "malloc")},
            ipcOpenMemHandle=self.record("ipcOpenMemHandle", 0x5000),
            memGetInfo=self.record("memGetInfo", (3 << 30, 16 << 30)),  # free, all
            **{
                name: self.record(name)
                for name in (
                    *("streamDestroy", "streamWaitEvent", "streamSynchronize", "eventDestroy", "eventRecord"),
                    *("eventSynchronize", "memcpyAsync", "memsetAsync", "free"),
                )
            },
        )
        return module

    def nccl(self) -> ModuleType:
        bindings = self

        class NcclCommunicator:
            def __init__(self, size: int, unique_id: Any, rank: int) -> None:
                bindings.calls.append(("init", bindings.getDevice(), size, unique_id, rank))

            def check_async_error(self) -> None:
                if bindings.async_error is not None:
                    raise bindings.async_error

            def __getattr__(self, name: str) -> Any:
                return bindings.record(name)

        old = int(self.version.split(".")[0]) < 14
        module = ModuleType("cupy.cuda.nccl")
        module.__dict__.update(
            available=True,
            get_version=lambda: 23203,
            get_unique_id=lambda: tuple(range(-64, 64)) if old else bytes(range(128)),
            groupStart=self.record("groupStart"),
            groupEnd=self.record("groupEnd"),
            NcclCommunicator=NcclCommunicator,
        )
        return module


def install(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import our modules anew, on these bindings; `uninstall` when the test is over."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    runtime, nccl = bindings.runtime(), bindings.nccl()
    cuda.__dict__.update(
        runtime=runtime, nccl=nccl, get_current_stream=lambda device: SimpleNamespace(ptr=bindings.streams[device])
    )
    cupy.__dict__.update(cuda=cuda, __version__=bindings.version, RawKernel=lambda source, name, options: None)
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime, "cupy.cuda.nccl": nccl}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    imported = [importlib.import_module(name) for name in OURS]
    driver = SimpleNamespace(cuIpcCloseMemHandle=lambda pointer: bindings.closed(pointer.value))
    monkeypatch.setattr(imported[0], "_driver", lambda: driver)
    return SimpleNamespace(runtime=imported[1].CupyRuntime(), nccl=imported[2].CupyNccl())


def uninstall() -> None:
    """Let nobody find our modules on these bindings."""
    for name in OURS:
        sys.modules.pop(name, None)
