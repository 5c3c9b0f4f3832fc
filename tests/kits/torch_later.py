"""torch, imported by the first test that asks anything of it: it takes seconds, and every worker collects all tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

__all__ = ["Later"]


class Later:
    """A module of torch; whoever makes it while tests are collected has them skipped where there is no torch."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("needs torch (extra `peers`)", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._name))
