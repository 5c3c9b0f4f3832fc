"""torchrun's --rdzv-conf."""

from __future__ import annotations

import pytest

from asyncdist.launch.config import RdzvTimes, parse_rdzv_conf


def test_times() -> None:
    assert parse_rdzv_conf("") == RdzvTimes(None, None, None)
    assert parse_rdzv_conf("join_timeout=7, last_call_timeout = 0.5") == RdzvTimes(7.0, 0.5, None)
    assert parse_rdzv_conf("keep_alive_interval=2").keep_alive_s == 8.0
    assert parse_rdzv_conf("keep_alive_max_attempt=3").keep_alive_s == 15.0
    assert parse_rdzv_conf("keep_alive_interval=2,keep_alive_max_attempt=3").keep_alive_s == 6.0


def test_what_is_not_used_is_named() -> None:
    assert parse_rdzv_conf("is_host=1,join_timeout=7,timeout=900").unused == ("is_host", "timeout")


@pytest.mark.parametrize("text", ["join_timeout", "=3", "join_timeout=", "join_timeout=0", "last_call_timeout=-1"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"KEY=VALUE|a number above 0"):
        parse_rdzv_conf(text)


@pytest.mark.parametrize("value", ["nan", "inf", "soon"])
def test_numbers_that_are_none(value: str) -> None:
    with pytest.raises(ValueError, match=f"not {value!r}"):
        parse_rdzv_conf(f"keep_alive_interval={value}")
