"""What a store accepts as key, value and amount, checked where the caller stands.

A wrong type is a TypeError at the call, as in torch.distributed, so that the traceback points at the mistake and not
at whoever awaits the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

__all__ = [
    "checked_amount",
    "checked_integer",
    "checked_key",
    "checked_keys",
    "checked_value",
    "checked_values",
    "decoded_key",
    "encoded_key",
    "encoded_keys",
]

Item = TypeVar("Item")

MIN_AMOUNT: Final = -(2**63)
MAX_AMOUNT: Final = 2**63 - 1
"""Counters are signed 64-bit numbers, as in torch's stores, so that every client can hold them."""


def checked_key(key: str) -> str:
    """Return `key`; TypeError unless it is a str, ValueError if it cannot be written as bytes."""
    if not isinstance(key, str) or not key.isascii():
        encoded_key(key)  # here, not in the middle of a batch
    return key


def encoded_key(key: str) -> bytes:
    """Return `key` as UTF-8, with the bytes that `decoded_key` found to be none; raises as `checked_key`."""
    if not isinstance(key, str):
        raise TypeError(f"a store key must be str, not {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError:
        return key.encode(errors="surrogateescape")


def decoded_key(key: bytes) -> str:
    """Return `key` as callers have it. What is no UTF-8 becomes lone surrogates, as in the names of files."""
    return key.decode(errors="surrogateescape")


def checked_keys(keys: Iterable[str]) -> list[str]:
    """Return `keys` as a list; TypeError for a single str, what is not iterable, or a member that is no str."""
    return [checked_key(key) for key in several(keys)]


def encoded_keys(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Return each of `keys` as `encoded_key` does; raises as `checked_keys`."""
    return tuple([encoded_key(key) for key in several(keys)])


def several(items: Iterable[Item]) -> Iterable[Item]:
    """Return `items`; TypeError for what is not iterable, and for a single str or bytes, which is by accident."""
    if type(items) is list:  # asking for its abstract class would take longer than all else here
        return items
    if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Iterable):
        raise TypeError(f"store keys and values must be lists, not {type(items).__name__}")
    return items


def checked_value(value: str | bytes | bytearray | memoryview) -> bytes:
    """Return `value` as bytes the caller can no longer change (a str as UTF-8); TypeError for any other type."""
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a store value must be str or bytes, not {type(value).__name__}")


def checked_values(count: int, values: Iterable[str | bytes]) -> tuple[bytes, ...]:
    """Return `values` as bytes; ValueError unless there are `count`."""
    checked = tuple([checked_value(value) for value in several(values)])
    if len(checked) != count:
        raise ValueError(f"multi_set got {count} keys and {len(checked)} values")
    return checked


def checked_amount(amount: int) -> int:
    """Return `amount`; TypeError unless it is an int (bool is none), ValueError beyond 64 bits."""
    return checked_integer("a store counter's amount", amount)


def checked_integer(what: str, number: int) -> int:
    """Return `number` as a plain int; TypeError unless it is an int (bool is none), ValueError beyond 64 bits."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{what} must be int, not {type(number).__name__}")
    if not MIN_AMOUNT <= number <= MAX_AMOUNT:
        raise ValueError(f"{what} must fit 64 bits, got {number}")
    return int(number)  # a member of an IntEnum is none for who reads the request
