"""The engine and four of its clients; journals that are closed after a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_user import User

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.journal.data_directory import DataDirectory
from asyncdist_server.journal.sqlite_journal import SqliteJournal


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


@pytest.fixture
def users(engine: StoreEngine) -> list[User]:
    return [User(engine, b"%d" % number) for number in range(4)]


@pytest.fixture
def nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is abandoned stays open for as long as the process lives: these tests would leave hundreds of files so."""
    abandoned: list[tuple[Any, DataDirectory]] = []
    abandon = SqliteJournal.abandon

    def noted(journal: SqliteJournal) -> None:
        abandoned.append((journal._connection, journal._directory))
        abandon(journal)

    monkeypatch.setattr(SqliteJournal, "abandon", noted)
    yield
    for connection, directory in abandoned:
        if connection is not None:
            connection.close()
        directory.close()
