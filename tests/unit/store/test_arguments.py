"""The bounds of counters' amounts; the types are checked by the conformance suite."""

from __future__ import annotations

import pytest

from asyncdist.store.base import MAX_AMOUNT, MIN_AMOUNT, checked_amount, checked_value, encoded_keys


@pytest.mark.parametrize("amount", [MIN_AMOUNT, 0, MAX_AMOUNT])
def test_amount_within_64_bits(amount: int) -> None:
    assert checked_amount(amount) == amount


@pytest.mark.parametrize("amount", [MIN_AMOUNT - 1, MAX_AMOUNT + 1])
def test_amount_beyond_64_bits(amount: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        checked_amount(amount)


def test_value_is_a_copy_that_its_owner_cannot_change() -> None:
    buffer = bytearray(b"abc")
    value = checked_value(memoryview(buffer)[1:])
    buffer[1] = 0
    assert value == b"bc"


def test_keys_may_come_from_any_iterable() -> None:
    assert encoded_keys(name for name in ("a", "\u00e9")) == (b"a", b"\xc3\xa9")
