"""A key, or the beginning of keys, as an argument of a command."""

from __future__ import annotations

import click

from asyncdist.store.arguments import decoded_key, encoded_key
from asyncdist_server.wire.key_text import escaped, unescaped

__all__ = ["key_argument", "key_text"]


def key_argument(text: str) -> str:
    """Return the key as the store's methods take it: the `type` of a click argument."""
    try:
        return decoded_key(unescaped(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}.") from error


def key_text(key: str) -> str:
    """Return `key` as a command shows it, and takes it."""
    return escaped(encoded_key(key))
