"""How wide tables are that go to a file or a pipe."""

from __future__ import annotations

import pytest

from asyncdist.cli.tables import TABLE_WIDTH, table_console


def test_a_table_that_is_not_for_a_terminal_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert table_console().width == 60
    monkeypatch.delenv("COLUMNS")
    assert table_console().width == TABLE_WIDTH
