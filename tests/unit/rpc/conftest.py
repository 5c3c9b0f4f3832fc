"""Every test begins with nothing seen."""

from __future__ import annotations

import pytest
from rpc_kit import seen


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()
