"""bench is not installed: it lives beside the packages. Its tests are run by .ci/run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests bench/."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.bench)
