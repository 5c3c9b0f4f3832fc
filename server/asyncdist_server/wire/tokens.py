"""Where tokens are read: the environment, and files, which hold two of them while a token is being changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncdist_server.wire.auth import check_token

__all__ = ["MAX_TOKEN_FILE_BYTES", "load_token", "parse_tokens", "read_token_file", "read_tokens", "token_file"]

MAX_TOKEN_FILE_BYTES: Final = 4096
"""A token file longer than this is some other file."""


def load_token(environ: Mapping[str, str]) -> str | None:
    """Return the token of ASYNCDIST_TOKEN, else of the file ASYNCDIST_TOKEN_FILE, else None.

    An empty variable counts as unset; white space around a token is removed. Raises `ValueError` for a token that is
    too short and for a file that cannot hold one, `OSError` for a file that cannot be read.
    """
    token = environ.get("ASYNCDIST_TOKEN")
    if token:
        return check_token(token.strip())
    path = token_file(environ)
    try:
        return read_token_file(path) if path else None
    except OSError as error:
        raise OSError(error.errno, f"ASYNCDIST_TOKEN_FILE: {error.strerror}", str(path)) from None


def token_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `load_token` reads, None if it reads none."""
    path = environ.get("ASYNCDIST_TOKEN_FILE")
    return Path(path) if path and not environ.get("ASYNCDIST_TOKEN") else None


def read_token_file(path: Path) -> str:
    """Return the token, or the newer one of two, in the file at `path`; raises as `load_token` does."""
    return read_tokens(path)[0]


def read_tokens(path: Path) -> tuple[str, str | None]:
    """Return the tokens in the lines of the file at `path`, the former one, if any, behind; raises as `load_token`."""
    with path.open("rb") as file:
        content = file.read(MAX_TOKEN_FILE_BYTES + 1)
    try:
        return parse_tokens(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_tokens(content: bytes) -> tuple[str, str | None]:
    """Return the tokens in what a file holds, the former one, if any, behind; ValueError says what is wrong with it."""
    if len(content) > MAX_TOKEN_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_TOKEN_FILE_BYTES} bytes and is no token file")
    try:
        token, *former = map(check_token, content.decode("ascii").split() or [""])
    except UnicodeDecodeError:
        raise ValueError("it holds other than ASCII text and is no token file") from None
    if len(former) > 1:
        raise ValueError(f"it has {1 + len(former)} tokens, a new one and the one before it are all that count")
    return token, former[0] if former else None
