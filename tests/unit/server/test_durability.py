"""The names of the durability modes, and which settings fit together."""

from __future__ import annotations

import pytest

from asyncdist_server.journal.journal import (
    DURABLE,
    MAX_DELAY_MS,
    MAX_JOURNALED_VALUE_BYTES,
    MEMORY,
    Durability,
    parse_durability,
)
from asyncdist_server.serving.config import ConfigError, ServerConfig, limits_for


def test_modes_by_name() -> None:
    assert parse_durability("memory") == MEMORY
    assert parse_durability("durable") == DURABLE
    assert parse_durability("relaxed:50") == Durability("relaxed:50", 0.05)
    assert parse_durability(f"relaxed:{MAX_DELAY_MS}").delay_s == MAX_DELAY_MS / 1000
    assert [mode.journaled for mode in (MEMORY, DURABLE, parse_durability("relaxed:1"))] == [False, True, True]


@pytest.mark.parametrize(
    "text", ["", "Durable", "disk", "relaxed", "relaxed:", "relaxed:0", "relaxed:1.5", "relaxed:-1", "relaxed:1\n"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="memory, durable, or relaxed:<ms>"):
        parse_durability(text)


def test_longer_delays_are_refused() -> None:
    with pytest.raises(ValueError, match=str(MAX_DELAY_MS)):
        parse_durability(f"relaxed:{MAX_DELAY_MS + 1}")


def test_a_journal_needs_a_directory_and_a_directory_a_journal() -> None:
    with pytest.raises(ConfigError, match="durable the data needs a place: give --data-dir"):
        ServerConfig(durability=DURABLE)
    with pytest.raises(ConfigError, match="memory nothing is kept"):
        ServerConfig(data_dir="/somewhere")


def test_values_that_no_row_could_hold_are_refused() -> None:
    ServerConfig(durability=DURABLE, data_dir="/somewhere", limits=limits_for(MAX_JOURNALED_VALUE_BYTES))
    with pytest.raises(ConfigError, match=f"at most {MAX_JOURNALED_VALUE_BYTES} bytes"):
        ServerConfig(durability=DURABLE, data_dir="/somewhere", limits=limits_for(MAX_JOURNALED_VALUE_BYTES + 1))
