"""The file of a host's constants, and the tuning that rank 0 makes of it and of its environment."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from asyncdist.plan.cost.constants import ASYNCIO, ASYNCIO_LOOPBACK, ASYNCIO_TCP
from asyncdist.world import tuning_file
from asyncdist.world.tuning_file import (
    MAX_FILE_BYTES,
    VERSION,
    built_in_constants,
    default_path,
    host_cores,
    own_tuning,
    read_file,
    save_constants,
    stored_constants,
)

MEASURED = replace(ASYNCIO_TCP, alpha_s=12e-6, copy_s=0.1e-9)


@pytest.fixture
def environ(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path)}


def own(environ, world=4, *, one_host=False, transport="tcp"):
    return own_tuning(environ, world, one_host=one_host, transport=transport, overrides={"all_reduce": "ring"})


def stored(environ):
    path = default_path(environ)
    assert path is not None
    return path


def test_the_file_is_in_the_cache_directory():
    assert default_path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}).parent == Path("/c/asyncdist")
    assert default_path({"HOME": "/h"}).parent == Path("/h/.cache/asyncdist")
    assert re.fullmatch(r"tuning-[\w.-]+\.json", default_path({"HOME": "/h"}).name)
    assert default_path({}) is None


def test_what_is_saved_is_read_again_and_others_stay(environ):
    path = stored(environ)
    save_constants(path, "tcp", MEASURED, {"date": "today"})
    save_constants(path, "unix", ASYNCIO, {})
    assert stored_constants(path, "tcp") == MEASURED
    assert stored_constants(path, "unix") == ASYNCIO
    assert stored_constants(path, "shm") is None
    assert read_file(path)["transports"]["tcp"]["date"] == "today"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_save_that_fails_leaves_the_old_file(environ, monkeypatch):
    path = stored(environ)
    save_constants(path, "tcp", MEASURED, {})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save_constants(path, "tcp", ASYNCIO, {})
    assert stored_constants(path, "tcp") == MEASURED
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_damaged_file_is_written_anew(environ):
    path = stored(environ)
    path.parent.mkdir()
    path.write_text("{")
    save_constants(path, "tcp", MEASURED, {})
    assert stored_constants(path, "tcp") == MEASURED


def good_file():
    constants = {"alpha_s": 1e-5, "beta_s": 1e-9, "gamma_s": 1e-10, "overhead_s": 1e-6}
    return {"format": "asyncdist tuning", "version": 2, "transports": {"tcp": {"constants": constants}}}


DAMAGED = {
    "empty": b"",
    "cut": b'{"format": "asyncdist tun',
    "binary": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
    "list": b"[]",
    "other": b'{"format": "something"}',
    "older": json.dumps({**good_file(), "version": 1}).encode(),
    "newer": json.dumps({**good_file(), "version": 3}).encode(),
    "no version": json.dumps({**good_file(), "version": None}).encode(),
    "shared memory of another kind": json.dumps(good_file())
    .replace('"gamma_s"', '"shared": {"x": 1}, "gamma_s"')
    .encode(),
    "no transports": json.dumps({**good_file(), "transports": []}).encode(),
    "no constants": json.dumps({**good_file(), "transports": {"tcp": {}}}).encode(),
    "a string": json.dumps({**good_file(), "transports": {"tcp": "fast"}}).encode(),
    "infinite": json.dumps(good_file()).replace("1e-05", "Infinity").encode(),
    "negative": json.dumps(good_file()).replace("1e-05", "-1").encode(),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_line_of_the_log_and_built_in_constants_count(environ, content, caplog):
    path = stored(environ)
    path.parent.mkdir()
    path.write_bytes(json.dumps(good_file()).encode())
    assert own(environ).constants.alpha_s == 1e-5
    assert not caplog.records
    path.write_bytes(content)
    assert own(environ).constants.alpha_s == ASYNCIO_LOOPBACK.alpha_s
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert str(path) in record.getMessage()
    assert "asyncdist tune" in record.getMessage()


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_that_is_named_is_an_error(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        own({"ASYNCDIST_TUNING": str(path)})


def test_a_file_that_is_named_must_exist_and_have_the_transport(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(ValueError, match="cannot be read"):
        own({"ASYNCDIST_TUNING": str(path)})
    save_constants(path, "unix", MEASURED, {})
    with pytest.raises(ValueError, match="no constants for transport 'tcp', only for unix: set ASYNCDIST_TRANSPORT"):
        own({"ASYNCDIST_TUNING": str(path)})
    assert own({"ASYNCDIST_TUNING": str(path)}, transport="unix").constants.alpha_s == MEASURED.alpha_s


def test_the_length_of_a_file_at_and_one_past(tmp_path):
    path = tmp_path / "mine.json"
    text = json.dumps(good_file())
    path.write_text(text + " " * (MAX_FILE_BYTES - len(text)))
    assert read_file(path)["version"] == VERSION
    path.write_text(text + " " * (MAX_FILE_BYTES - len(text) + 1))
    with pytest.raises(ValueError, match="more than"):
        read_file(path)


def test_a_tuning_has_the_file_the_cores_and_the_overrides(environ):
    save_constants(stored(environ), "tcp", MEASURED, {})
    tuning = own(environ)
    assert tuning.constants == replace(MEASURED, between=ASYNCIO.between, cores=host_cores(1))
    assert tuning.overrides == (("all_reduce", "ring"),)
    assert own(environ, transport="unix").constants.alpha_s == ASYNCIO_LOOPBACK.alpha_s
    assert own({**environ, "ASYNCDIST_TUNING": " Off "}).constants.alpha_s == ASYNCIO_LOOPBACK.alpha_s
    assert own({}).constants.alpha_s == ASYNCIO_LOOPBACK.alpha_s


def test_built_in_constants_are_those_of_the_transport(monkeypatch):
    monkeypatch.setattr(tuning_file.sys, "platform", "linux")
    assert [built_in_constants(word) for word in ("auto", "shm")] == [ASYNCIO] * 2
    assert [built_in_constants(word) for word in ("unix", "tcp")] == [ASYNCIO_LOOPBACK] * 2
    monkeypatch.setattr(tuning_file.sys, "platform", "darwin")
    assert built_in_constants("auto") == ASYNCIO_LOOPBACK, "no memory is shared there"


@pytest.mark.parametrize(
    ("local", "world_size", "one_host", "expected"),
    [
        ("2", "4", False, 2),
        ("2", "4", True, 2),
        ("4", "4", False, 4),
        (None, None, True, 4),
        (None, None, False, 1),
        ("2", "8", True, 4),  # this world is not the launcher's
        ("2", "8", False, 1),
        ("5", "4", False, 1),
    ],
)
def test_ranks_per_host(local, world_size, one_host, expected):
    environ = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": world_size} if local else {}
    assert own(environ, one_host=one_host).ranks_per_host == expected


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_launcher_that_says_nonsense_is_an_error(text):
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        own({"LOCAL_WORLD_SIZE": text, "WORLD_SIZE": "4"})


def test_a_rank_that_is_pinned_counts_the_cores_of_its_host(monkeypatch):
    monkeypatch.setattr(tuning_file.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(tuning_file.os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert [host_cores(ranks) for ranks in (1, 4, 16)] == [1, 4, 8]
    monkeypatch.setattr(tuning_file.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert host_cores(16) == 2
