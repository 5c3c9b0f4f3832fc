"""What a terminal may be given of a text that others wrote: nothing that moves its cursor or begins a line."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return `text` with escapes, as in Python, for what is no visible character."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
