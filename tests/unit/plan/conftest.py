"""What the tests of plans have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_search_for_garbage() -> Iterator[None]:
    """Plans have no cycles, and looking for some in a hundred thousand steps takes a tenth of the time of a proof."""
    gc.disable()
    yield
    gc.enable()
