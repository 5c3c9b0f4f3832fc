"""CUDA is looked for once, without importing anything where it cannot be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from asyncdist.cuda import Provider, find, override, provider, reason, visible
from asyncdist.testing import fake_cuda

NO_CUPY = """
import sys
from asyncdist import cuda
cuda.visible(), cuda.find(), cuda.reason()
assert "cupy" not in sys.modules
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was looked for yet, on a machine that has everything."""
    monkeypatch.setattr(provider, "_state", provider._State())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(provider, "DEVICE_FILES", ("/dev/null",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.usefixtures("fresh")
def test_a_device_is_visible_before_anything_is_imported() -> None:
    assert visible()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not visible()
    assert find() is None
    assert "CUDA_VISIBLE_DEVICES" in reason()


@pytest.mark.usefixtures("fresh")
def test_no_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "DEVICE_FILES", ())
    assert not visible()
    assert "no NVIDIA device" in reason()


@pytest.mark.usefixtures("fresh")
def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "asyncdist[cuda12]" in reason()


@pytest.mark.usefixtures("fresh")
def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "DRIVER_LIBRARY", "libnothing-of-that-name.so")
    assert visible()
    assert find() is None
    assert "driver's library" in reason()
    assert not visible()  # now that it was looked for


@pytest.mark.usefixtures("fresh")
def test_a_broken_cupy_is_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "DRIVER_LIBRARY", "libc.so.6")
    monkeypatch.setitem(sys.modules, "asyncdist.cuda.cupy_runtime", None)
    assert find() is None
    assert "cupy does not work here" in reason()


def test_tests_put_another_in_its_place() -> None:
    with fake_cuda(2) as cuda:
        found = find()
        assert found == Provider(cuda.runtime, cuda.nccl)
        assert visible()
        assert reason() == ""
        with override(None):
            assert find() is None
            assert not visible()
        assert find() == found
    with fake_cuda(nccl=False):
        found = find()
        assert found is not None
        assert found.nccl is None
        assert found.nccl_reason


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed")
def test_nothing_is_imported_without_a_device() -> None:
    subprocess.run([sys.executable, "-c", NO_CUPY], check=True, timeout=60)
