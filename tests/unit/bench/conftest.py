"""bench is not installed: it lives beside the packages. Its tests are run by .ci/run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests bench/."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.bench)
