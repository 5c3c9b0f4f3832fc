"""What root does in a directory of another user, it does as that user.

The owner of a directory can put a link in the place of anything in it: a command that root runs there would open, write
and signal what the owner chose. So root becomes the owner, for good, before the command looks at the first name there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from asyncdist_server.journal.journal import JournalError

_CLONE_NEWNS: Final = 0x20000
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x40000
"""Of <linux/sched.h> and <linux/mount.h>."""


def become_owner(path: Path) -> None:
    """Have this process, if it is root's, be the owner's of `path` from now on. Raises `JournalError` if it cannot.

    The owner is the first user other than root to whom a directory on the way to `path` belongs.
    """
    owner = _owner(path)
    if owner is None:
        return
    uid, gid, groups = owner.st_uid, owner.st_gid or owner.st_uid, []
    with contextlib.suppress(KeyError):  # a user of systemd's exists only while its service runs
        user = pwd.getpwuid(uid)
        gid, groups = user.pw_gid, os.getgrouplist(user.pw_name, user.pw_gid)
    try:
        os.setgroups(groups)
        os.setgid(gid)
        _let_reach(path, uid)
        os.setuid(uid)
    except OSError as error:
        raise JournalError(
            f"root cannot work in {path} as user {uid}, to whom it belongs ({error}); run the command as that user"
        ) from error


@contextlib.contextmanager
def opened_before_becoming_owner(file: Path, directory: Path) -> Iterator[BinaryIO]:
    """Give `file` opened with root's rights, as root named it, then become the owner of `directory`.

    A file on whose way others than root could put another is opened as the owner. Raises `JournalError`.
    """
    try:
        more_flags = 0
        if _owner(directory) is not None:
            if file.is_symlink() or not _is_roots(file.parent):
                become_owner(directory)
            else:
                more_flags = os.O_NOFOLLOW
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | more_flags)) as opened:
            become_owner(directory)
            yield opened
    except OSError as error:
        raise JournalError(f"cannot read {file}: {error.strerror}") from error


def _owner(path: Path) -> os.stat_result | None:
    """Return whose the first directory on the way to `path` is that is not root's. None if all are.

    None for others than root as well. What is not there, or no directory, is told by what uses it.
    """
    if os.geteuid():
        return None
    path = path.absolute()
    with contextlib.suppress(OSError):
        for directory in (*reversed(path.parents), path):
            found = directory.stat()
            if found.st_uid:
                return found
    return None


def _is_roots(path: Path) -> bool:
    """Whether only root can change where `path` leads: by its name, and behind the links in it."""
    ways = {path.absolute(), Path(os.path.realpath(path))}
    for directory in {each for way in ways for each in (way, *way.parents)}:
        found = directory.stat()
        shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
        if found.st_uid or shared:
            return False
    return True


def _let_reach(path: Path, uid: int) -> None:
    """Let the user reach a directory of its own below one that is closed to it, in this process alone.

    /var/lib/private, where systemd keeps what belongs to users that exist only while a service runs, is open to root
    only, and SQLite opens files by their whole path. As systemd does, the directory is mounted where an open way leads.
    """
    path = Path(os.path.realpath(path))
    os.seteuid(uid)
    try:
        closed = [each for each in reversed(path.parents) if not os.access(each, os.X_OK, effective_ids=True)]
    finally:
        os.seteuid(0)
    if not closed or not path.is_dir():
        return
    if sys.platform != "linux":
        raise PermissionError(f"{closed[0]} is closed to it")
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if os.fstat(directory).st_uid != uid:
        raise PermissionError(f"{path} was replaced")
    _call("mount", None, os.fsencode(closed[0]), b"tmpfs", 0, b"mode=0755")
    umask = os.umask(0o022)
    path.mkdir(parents=True)
    os.umask(umask)
    _call("mount", b"/proc/self/fd/%d" % directory, os.fsencode(path), None, _MS_BIND, None)
    os.close(directory)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that Python does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*(ctypes.c_ulong(each) if type(each) is int else each for each in arguments)):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
