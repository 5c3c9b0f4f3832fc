"""SECURITY.md names limits as they are."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

UNITS = {"": 1, "s": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ROW = re.compile(r"^\| .* \| (\d+) ?(\w*) \| `([\w.]+)` \|$", re.MULTILINE)
ROWS = ROW.findall((Path(__file__).parent.parent / "SECURITY.md").read_text())


def test_there_are_limits_before_and_after_the_proof() -> None:
    assert len(ROWS) > 20
    assert {"asyncdist_server.wire.auth.MAX_HANDSHAKE_BYTES", "asyncdist_server.wire.messages.MAX_MEMORY_BYTES"} <= {
        constant for _, _, constant in ROWS
    }


@pytest.mark.parametrize(("figure", "unit", "constant"), ROWS, ids=[row[2] for row in ROWS])
def test_a_limit_is_what_the_document_says(figure: str, unit: str, constant: str) -> None:
    module, _, name = constant.rpartition(".")
    assert getattr(importlib.import_module(module), name) == int(figure) * UNITS[unit]
