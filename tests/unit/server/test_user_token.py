"""The file with a user's token: who may have made it, and what is believed."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from asyncdist_server.serving import user_token
from asyncdist_server.serving.user_token import default_token, find_user_token, make_user_token, user_token_path
from asyncdist_server.wire.auth import check_token, new_token


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of the user's, and a /tmp of the test's."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(user_token, "TEMPORARY", tmp_path / "tmp")
    monkeypatch.setattr(user_token, "RUNTIME", tmp_path / "run")
    directory = tmp_path / "runtime"
    directory.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_is_made_once_and_for_its_user_alone(runtime: Path) -> None:
    assert find_user_token() is None
    token = make_user_token()
    assert check_token(token) == token == make_user_token() == find_user_token()
    assert user_token_path() == runtime / "asyncdist" / "token"
    assert mode(user_token_path()) == 0o600
    assert mode(runtime / "asyncdist") == 0o700
    assert os.listdir(runtime / "asyncdist") == ["token"]


def test_all_who_make_it_at_once_get_the_same_one() -> None:
    start = threading.Barrier(16)
    made: list[str] = []

    def make() -> None:
        start.wait()
        made.append(make_user_token())

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 16
    assert set(made) == {find_user_token()}


def test_the_one_that_came_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, link = new_token(), os.link

    def too_late(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        file = os.open(target, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=dst_dir_fd)
        os.write(file, first.encode())
        os.close(file)
        link(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "link", too_late)
    assert make_user_token() == first
    assert os.listdir(user_token_path().parent) == ["token"]


def test_a_runtime_directory_that_others_may_enter_is_not_used(runtime: Path, tmp_path: Path) -> None:
    runtime.chmod(0o755)
    make_user_token()
    assert user_token_path() == tmp_path / "tmp" / f"asyncdist-{os.geteuid()}" / "token"
    assert mode(user_token_path().parent) == 0o700


def test_the_runtime_directory_is_found_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run" / str(os.geteuid())
    directory.mkdir(mode=0o700, parents=True)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    make_user_token()
    assert user_token_path() == directory / "asyncdist" / "token"


def test_a_runtime_directory_that_is_not_there_is_not_used(runtime: Path, tmp_path: Path) -> None:
    runtime.rmdir()
    assert make_user_token() == find_user_token()
    assert user_token_path().parent.parent == tmp_path / "tmp"


@pytest.mark.parametrize("then", ["no runtime directory", "one without the variable"])
def test_a_token_that_a_daemon_made_elsewhere_is_found(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The daemon was started outside a session, and saw another runtime directory or none."""
    if then == "one without the variable":
        (tmp_path / "run" / str(os.geteuid())).mkdir(mode=0o700, parents=True)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    token = make_user_token()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert find_user_token() == token
    assert make_user_token() == token  # so that the next daemon does not part from the first


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("whose", ["runtime", "directory", "file"])
def test_nothing_of_another_user_is_believed(runtime: Path, tmp_path: Path, whose: str) -> None:
    make_user_token()
    path = user_token_path()
    os.chown({"runtime": runtime, "directory": path.parent, "file": path}[whose], 65534, 65534)
    assert find_user_token() is None
    if whose == "runtime":
        make_user_token()
        assert user_token_path().parent.parent == tmp_path / "tmp"
    else:
        with pytest.raises(ValueError, match="belongs to user 65534, not to user 0"):
            make_user_token()


def test_a_directory_prepared_in_tmp_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.chmod(0o755)
    folder = user_token_path().parent
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"asyncdist-\d+ has mode 0777, which lets other users in"):
        make_user_token()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="cannot hold it"):
        make_user_token()
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("spoil", ["mode", "link", "content"])
def test_a_file_that_others_may_know_is_refused(spoil: str, tmp_path: Path) -> None:
    make_user_token()
    path = user_token_path()
    if spoil == "mode":
        path.chmod(0o640)
    elif spoil == "link":
        path.rename(tmp_path / "token")
        path.symlink_to(tmp_path / "token")
    else:
        path.write_text("short")
    assert find_user_token() is None
    with pytest.raises(ValueError, match=r"ASYNCDIST_TOKEN .*--insecure-no-auth"):
        make_user_token()


def test_a_host_without_a_place_for_it_is_told_what_to_do(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(user_token, "TEMPORARY", tmp_path / "none")
    with pytest.raises(ValueError, match=r"none/asyncdist-\d+/token cannot hold it: .*Set ASYNCDIST_TOKEN .*auth"):
        default_token("127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_a_store_on_loopback_has_it(host: str) -> None:
    assert default_token(host) == find_user_token() is not None


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1", "nowhere.invalid"])
def test_others_have_none(host: str) -> None:
    assert default_token(host) is None
    assert find_user_token() is None
