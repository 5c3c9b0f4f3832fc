"""Every operation reads attributes of its group's core: CPython finds those of small objects faster."""

from __future__ import annotations

import asyncdist as dist
from asyncdist.testing import run_world

SHARED_KEYS = 30
"""CPython 3.11 specializes loads of attributes for objects with fewer."""


def test_a_core_has_few_attributes_of_its_own() -> None:
    async def main(group: dist.ProcessGroup) -> int:
        return len(vars(group._core))

    assert run_world(1, main)[0] < SHARED_KEYS
