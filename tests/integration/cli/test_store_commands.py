"""`asyncdist store ...` and `asyncdist token` against a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from asyncdist.cli import token_command
from asyncdist.cli.store_commands import store_group
from asyncdist.store import TCPStore
from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread
from asyncdist_server.wire.auth import check_token, new_token

TOKEN = new_token()


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with serve_in_thread(token=TOKEN) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def invoke(*arguments: object, **options: object) -> Result:
    return CliRunner().invoke(store_group, [str(argument) for argument in arguments], **options)  # type: ignore[arg-type]


def test_verbs(server: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_STORE", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("ASYNCDIST_TOKEN", TOKEN)
    monkeypatch.setenv("ASYNCDIST_JOB_ID", "verbs")
    assert invoke("set", "key", "value").exit_code == 0
    assert invoke("get", "key").stdout_bytes == b"value"
    assert invoke("set", "binary", "-", input=b"\x00\xff").exit_code == 0
    assert invoke("get", "binary").stdout_bytes == b"\x00\xff"
    assert invoke("set", "binary", os.fsdecode(b"\x01\xff")).exit_code == 0  # as a shell gives bytes that are no text
    assert invoke("get", "binary").stdout_bytes == b"\x01\xff"
    assert invoke("add", "n").stdout == "1\n"
    assert invoke("add", "n", "-5").stdout == "-4\n"
    assert invoke("wait", "key", "n").exit_code == 0
    assert invoke("ls").stdout == "binary\nkey\nn\n"
    assert invoke("ls", "k").stdout == "key\n"
    assert invoke("--namespace", "other", "ls").stdout == ""
    assert invoke("del", "key", "n", "none").stdout == "2\n"


def test_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_in_thread(token=TOKEN) as server:
        monkeypatch.setenv("ASYNCDIST_STORE", f"127.0.0.1:{server.port}")
        monkeypatch.setenv("ASYNCDIST_TOKEN", TOKEN)
        assert invoke("set", "k", "v").exit_code == 0
        for key in ("k", "l"):
            assert invoke("--namespace", "job-1\x1b", "set", key, "v").exit_code == 0
        lines = invoke("namespaces").stdout.splitlines()
        assert lines == [
            "        2 keys      0 queues      0 clients  job-1\\x1b",
            "        1 keys      0 queues      1 clients  the default namespace",
        ]
        listed = json.loads(invoke("namespaces", "--json").stdout)
        assert listed[0] == {"name": "job-1\x1b", "keys": 2, "queues": 0, "clients": 0}


def test_wait_says_what_is_missing(server: ThreadedServer, token_file: Path) -> None:
    where = ("--store", f"127.0.0.1:{server.port}", "--token-file", token_file)
    result = invoke(*where, "--timeout", "0.05", "wait", "absent")
    assert result.exit_code == 1
    assert "still missing: absent" in result.output


@pytest.mark.parametrize("command", sorted(store_group.commands))
def test_help_needs_no_store(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASYNCDIST_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert "Usage:" in shown.output


def test_master_address_is_the_last_resort(
    server: ThreadedServer, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ASYNCDIST_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = invoke("ls")
    assert result.exit_code == 2
    assert "ASYNCDIST_STORE" in result.output
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("ASYNCDIST_TOKEN_FILE", str(token_file))
    assert invoke("ls").exit_code == 0


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("\udcff\x00", r"\xff\x00"),
        ("caf\u00e9 \U0001f642", "caf\u00e9 \U0001f642"),
        ("a\\xff", r"a\\xff"),
        ("two\nlines\u2028", r"two\x0alines\xe2\x80\xa8"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\udcc3", r"\xc3"),
    ],
)
def test_a_key_is_taken_as_it_is_shown(
    key: str, text: str, server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCDIST_STORE", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("ASYNCDIST_TOKEN", TOKEN)
    namespace = ("--namespace", text.encode().hex())

    async def set_it() -> list[str]:
        async with TCPStore("127.0.0.1", server.port, token=TOKEN, namespace=namespace[1]) as store:
            await store.set(key, "value")
            return await store.list_keys(key[:1])

    assert asyncio.run(set_it()) == [key]
    assert invoke(*namespace, "ls").stdout == f"{text}\n"
    assert invoke(*namespace, "ls", text).stdout == f"{text}\n"
    assert invoke(*namespace, "get", text).stdout == "value"
    assert invoke(*namespace, "wait", text).exit_code == 0
    assert invoke(*namespace, "del", text).stdout == "1\n"


@pytest.mark.parametrize("text", ["a\\", r"\n", r"\x1", r"\xgg"])
def test_a_single_backslash_is_refused(text: str) -> None:
    for command in (("get", text), ("wait", "k", text), ("ls", text), ("watch", text)):
        result = invoke("--store", "127.0.0.1:1", *command)
        assert result.exit_code == 2
        assert r"\xHH is a byte" in result.output


def test_the_help_says_how_keys_are_written() -> None:
    assert r"\xHH is a byte" in " ".join(invoke("--help").output.split())


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_master_address_may_be_one_of_ipv6(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCDIST_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "[::1]:1: " in invoke("--timeout", "0", "ls").output


def test_missing_token_is_said(server: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCDIST_TOKEN", raising=False)
    monkeypatch.delenv("ASYNCDIST_TOKEN_FILE", raising=False)
    result = invoke("--store", f"127.0.0.1:{server.port}", "ls")
    assert result.exit_code == 1
    assert "the server requires a token" in result.output


def test_wrong_endpoint_is_said() -> None:
    assert "is not a port" in invoke("--store", "host:port", "ls").output


def test_token_is_new_and_long_enough() -> None:
    first, second = (CliRunner().invoke(token_command).output.strip() for _ in range(2))
    assert check_token(first) != check_token(second)


def test_an_option_of_all_commands_behind_one_of_them_is_sent_to_its_place() -> None:
    for arguments in (("ls", "--store", "127.0.0.1:1"), ("get", "key", "--timeout", "1"), ("waits", "--namespace=x")):
        result = invoke(*arguments)
        assert result.exit_code == 2
        name = next(text for text in arguments if text.startswith("--")).partition("=")[0]
        assert f"{name} goes before the command: asyncdist store {name} ... {arguments[0]}" in result.output
    assert re.search("No such option.*--what", invoke("ls", "--what").output)  # click quotes it or does not
