"""The token of a user on this host: what a store on loopback asks for where no token was given.

Every process of the host can connect to a store on loopback. So that other users are kept out, the token is in a file
that only its user can read. The file is made by the first server that needs it; the user's clients find it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncdist_server.serving.sockets import is_loopback
from asyncdist_server.wire.auth import MAX_TOKEN_FILE_BYTES, new_token, parse_tokens

RUNTIME: Final = Path("/run/user")
"""Where systemd makes the runtime directories, for processes that have lost the variable."""

TEMPORARY: Final = Path("/tmp")
"""Where a host without runtime directories keeps it. Not TMPDIR: all processes of a user must look in one place."""

_FILE: Final = "token"


def default_token(host: str) -> str | None:
    """Return the token of a store that is served on `host` and was given none: the user's own, made if need be.

    None where others than this host can connect; the store refuses to listen there. Raises as `make_user_token` does.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None  # it cannot be listened on, which says so
    return make_user_token() if all(is_loopback(str(address[0])) for *_, address in found) else None


def make_user_token() -> str:
    """Return this user's token, made if there is none. Of processes that make it at once, all get the same one.

    Raises ValueError, which says where it cannot be and what to do.
    """
    try:
        with _folder(user_token_path().parent, make=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                return _read(folder)
            found = find_user_token()  # a daemon that saw no runtime directory has put it elsewhere
            if found is not None:
                return found
            draft = f"{_FILE}.{secrets.token_hex(8)}"
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with open(file, "w") as text:
                    text.write(new_token() + "\n")
                with contextlib.suppress(FileExistsError):  # another process was first: its token counts
                    os.link(draft, _FILE, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.unlink(draft, dir_fd=folder)
            return _read(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a store on loopback needs a token, which keeps other users of this host out, and {user_token_path()} "
            f"cannot hold it: {error}. Set ASYNCDIST_TOKEN (`asyncdist token` makes one), or give the daemon "
            "--insecure-no-auth"
        ) from error


def find_user_token() -> str | None:
    """Return this user's token, None if there is none or it cannot be trusted.

    All places are searched: a daemon that was started outside a session may have seen no runtime directory.
    """
    for path in _places():
        with contextlib.suppress(OSError, ValueError), _folder(path) as folder:
            return _read(folder)
    return None


def user_token_path() -> Path:
    """Return where this user's token is made: in the runtime directory, else in a directory of the user's in /tmp."""
    return next(_places()) / _FILE


def _places() -> Iterator[Path]:
    """The directories where this user's token may be, the one where it is made first."""
    user = os.geteuid()
    for place in (os.environ.get("XDG_RUNTIME_DIR"), RUNTIME / str(user)):
        if place and _is_private(place):
            yield Path(place, "asyncdist")
    yield TEMPORARY / f"asyncdist-{user}"


@contextlib.contextmanager
def _folder(path: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of that directory: checked, and from then on the same one whatever its name means."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_private(os.fstat(folder), f"the directory {path}")
        yield folder
    finally:
        os.close(folder)


def _read(folder: int) -> str:
    file = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    with open(file, "rb") as content:
        _check_private(os.fstat(file), "the file")
        return parse_tokens(content.read(MAX_TOKEN_FILE_BYTES + 1))[0]


def _is_private(place: Path | str) -> bool:
    try:
        status = os.stat(place)
        _check_private(status, str(place))
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(status.st_mode)


def _check_private(status: os.stat_result, what: str) -> None:
    """Raise ValueError unless it belongs to this user, and to no others by its mode."""
    if status.st_uid != os.geteuid():
        raise ValueError(f"{what} belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & 0o077:
        raise ValueError(f"{what} has mode {stat.S_IMODE(status.st_mode):04o}, which lets other users in")
