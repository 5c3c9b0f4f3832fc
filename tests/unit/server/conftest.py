"""The engine and four of its clients."""

from __future__ import annotations

import pytest
from engine_user import User

from asyncdist_server.engine.engine import StoreEngine


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


@pytest.fixture
def users(engine: StoreEngine) -> list[User]:
    return [User(engine, b"%d" % number) for number in range(4)]
