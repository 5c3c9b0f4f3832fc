"""What a store accepts as key, value and amount, checked where the caller stands.

A wrong type is a TypeError at the call, as in torch.distributed, so that the traceback points at the mistake and not
at whoever awaits the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["checked_amount", "checked_key", "checked_keys", "checked_value", "checked_values"]

MIN_AMOUNT: Final = -(2**63)
MAX_AMOUNT: Final = 2**63 - 1
"""Counters are signed 64-bit numbers, as in torch's stores, so that every client can hold them."""


def checked_key(key: str) -> str:
    """Return `key`; TypeError unless it is a str, ValueError if it cannot be written as UTF-8."""
    if not isinstance(key, str):
        raise TypeError(f"a store key must be str, not {type(key).__name__}")
    if not key.isascii():
        key.encode()  # lone surrogates: a UnicodeEncodeError (a ValueError) here, not in the middle of a batch
    return key


def checked_keys(keys: Iterable[str]) -> list[str]:
    """Return `keys` as a list; TypeError for a single str, what is not iterable, or a member that is no str."""
    if isinstance(keys, str | bytes | bytearray | memoryview) or not isinstance(keys, Iterable):
        raise TypeError(f"store keys must be a list of str, not {type(keys).__name__}")
    return [checked_key(key) for key in keys]


def checked_value(value: str | bytes | bytearray | memoryview) -> bytes:
    """Return `value` as bytes the caller can no longer change (a str as UTF-8); TypeError for any other type."""
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a store value must be str or bytes, not {type(value).__name__}")


def checked_values(keys: list[str], values: Iterable[str | bytes]) -> list[bytes]:
    """Return `values` as a list of bytes; ValueError unless there is one for each of `keys`."""
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Iterable):
        raise TypeError(f"store values must be a list of str or bytes, not {type(values).__name__}")
    checked = [checked_value(value) for value in values]
    if len(checked) != len(keys):
        raise ValueError(f"multi_set got {len(keys)} keys and {len(checked)} values")
    return checked


def checked_amount(amount: int) -> int:
    """Return `amount`; TypeError unless it is an int (bool is none), ValueError beyond 64 bits."""
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise TypeError(f"a store counter's amount must be int, not {type(amount).__name__}")
    if not MIN_AMOUNT <= amount <= MAX_AMOUNT:
        raise ValueError(f"a store counter's amount must fit 64 bits, got {amount}")
    return amount
