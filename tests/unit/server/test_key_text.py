"""Keys for people: harmless, reversible, and short in messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist_server.wire.key_text import SHOWN_HEAD_BYTES, SHOWN_TAIL_BYTES, escaped, shown, unescaped


@given(st.binary(max_size=50) | st.text(max_size=20).map(str.encode))
def test_any_key_comes_back(key: bytes) -> None:
    text = escaped(key)
    assert text.isprintable()
    assert unescaped(text) == key


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from("\\x0f"), max_size=20))
def test_any_text_is_a_key_or_refused(text: str) -> None:
    try:
        key = unescaped(text)
    except ValueError:
        assert "\\" in text
    else:
        assert unescaped(escaped(key)) == key


def test_what_is_visible_stands_for_itself() -> None:
    assert escaped("world/0/caf\u00e9".encode()) == "world/0/caf\u00e9"
    assert escaped(b"a\\b\n\xff") == r"a\\b\x0a\xff"


@pytest.mark.parametrize("past", [0, 1])
def test_so_much_of_a_key_is_shown(past: int) -> None:
    size = SHOWN_HEAD_BYTES + SHOWN_TAIL_BYTES + past
    key = bytes(range(65, 91)) * 5
    text = shown(key[:size])
    if past:
        assert (
            text == f"{escaped(key[:SHOWN_HEAD_BYTES])}...{escaped(key[size - SHOWN_TAIL_BYTES : size])} ({size} bytes)"
        )
    else:
        assert text == escaped(key[:size])


def test_no_key_makes_a_long_message() -> None:
    for key in (bytes(2**16), b"\xff" * 2**16, b"\\" * 2**16, "\udcff" * 2**16):
        assert len(shown(key)) < 600
        assert shown(key).isprintable()
