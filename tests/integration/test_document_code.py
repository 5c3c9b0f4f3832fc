"""The code in README.md and docs/ runs as it is printed, and its commands have the options it gives them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from launching import run_one_after_another

import asyncdist as dist
from asyncdist.cli import main as asyncdist_command
from asyncdist_server.cli import main as server_command
from asyncdist_server.serving.threaded import serve_in_thread

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDLESS = ("async for event in", "async for world in")
"""Loops over what happens: they are cut off when they wait for the next event."""

SCRIPTS = ("dist.run(", "import asyncdist.blocking")
"""What a block has that is a whole program, for `asyncdist run`."""

PRELUDE = """
import numpy as np
weights = gradients = np.ones(4)
def compute(): pass
"""
"""What scripts on the pages take for granted."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The code between two fences, the first of which names one of `languages` (`""`: none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for language, code in fenced if language in languages]


PYTHON = [pytest.param(code, id=f"{page.name}-{n}") for page in PAGES for n, code in enumerate(blocks(page, "python"))]


def kind_of(code: str) -> str:
    if 'init_process_group("mpi")' in code:
        return "mpi"  # see tests/integration/mpi
    if "asyncdist.torch" in code:
        return "torch"  # see tests/integration/torch
    if any(mark in code for mark in SCRIPTS):
        return "script"
    if "ip netns" in code or "netns add" in code:
        return "hosts"
    return "test" if re.search(r"^def test_", code, re.MULTILINE) else "fragment"


def of_kind(kind: str) -> list[Any]:
    return [block for block in PYTHON if kind_of(str(block.values[0])) == kind]


def assumed(store: dist.Store) -> dict[str, Any]:
    """What a page takes for granted: its usual imports, and values with names that say what they are."""

    def gradient_of(_index: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.zeros(2)

    return {
        "asyncio": asyncio,
        "contextlib": contextlib,
        "np": np,
        "cupy": np,
        "dist": dist,
        "timedelta": timedelta,
        "TCPStore": dist.TCPStore,
        "store": store,
        "address": b"10.0.0.1:5",
        "path": "checkpoint",
        "write": lambda path, token: None,
        "gradients": np.ones(4),
        "weights": np.ones(4),
        "compute": lambda: None,
        "gradient_of": gradient_of,
        "param": SimpleNamespace(grad=np.ones(3)),
        "open_my_store": None,
        "print": lambda *values: None,
    }


async def execute(code: str, names: dict[str, Any]) -> None:
    """Run a block, which may `await` outside any function, as a page's fragments do."""
    compiled = compile(code, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(compiled, names)
    if waiting is not None:
        try:
            await asyncio.wait_for(waiting, 0.3 if any(loop in code for loop in ENDLESS) else 30)
        except TimeoutError:
            assert any(loop in code for loop in ENDLESS)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve_in_thread() as server:
        yield server.port


@pytest.mark.parametrize("code", of_kind("fragment"))
async def test_fragments_run(code: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    code = code.replace("29500", str(port))
    code = re.sub(r"init_process_group\(.*?\)", "new_group()", code)  # in a world already
    async with (
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1) as group,
        dist.TCPStore("127.0.0.1", port, namespace="fragments") as store,
    ):
        names = assumed(store)
        await asyncio.gather(*(execute(code, names | {}) for _ in range(2 if "store.join(" in code else 0)))
        await execute(code, names)
        await call_what_was_defined(names, group)


@pytest.mark.parametrize("code", of_kind("test"))
def test_tests_pass(code: str) -> None:
    names: dict[str, Any] = {"np": np, "dist": dist}
    exec(code, names)
    for name in [name for name in names if name.startswith("test_")]:
        names[name]()


@pytest.mark.parametrize("code", of_kind("hosts"))
def test_tests_on_several_hosts_are_python(code: str) -> None:
    """tests/multinode runs them, as root."""
    ast.parse(code)


@pytest.mark.slow("runs the code of many pages on four ranks")
def test_scripts_run_on_four_ranks(tmp_path: Path) -> None:
    scripts = []
    for block in of_kind("script"):
        code = str(block.values[0])
        scripts.append(tmp_path / f"{block.id}.py")
        scripts[-1].write_text(code if "import numpy" in code else PRELUDE + code)
    assert scripts
    done = run_one_after_another(4, tmp_path, scripts)
    assert done.returncode == 0, done.stderr
    # README's twenty lines; no other script prints
    assert sorted(done.stdout.splitlines()) == [f"[rank 0] received ({10 * rank},)" for rank in (1, 2, 3)]


async def call_what_was_defined(names: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Functions that a page defines are called, with arguments that fit their names."""
    calls: dict[str, Callable[[Any], Any]] = {
        "train": lambda f: f([np.zeros(2)], np.ones((8, 2)), np.ones(8), names["gradient_of"]),
        "train_module": lambda f: f({"x": np.zeros(2)}, None, [], None),
        "receive_weights": lambda f: f(np.ones(1000), lambda start, data: None),
        "check_everybody": lambda f: f(np.ones(1000), lambda source, data: True),
        "add": lambda f: f(names["store"], "client"),
        "keep_averaging": lambda f: f(group, np.ones(4)),
        "keep_reducing": lambda f: f(np.ones(4)),
    }
    for name, call in calls.items():
        if name in names:
            await call(names[name])
    if "serve_versions" in names:
        store = names["store"]
        task = asyncio.ensure_future(names["serve_versions"](store))
        await names["publish_steps"](store)
        assert set((await names["weights"].wait_ready("policy", 10, store=store, timeout=20)).values()) == {10}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if "updates" in names:  # which goes on for ever
        task = asyncio.ensure_future(names["updates"]({"w": np.ones(3)}, group))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def commands() -> list[tuple[str, str]]:
    """Each command line in a block of shell, with its page."""
    found = []
    for page in PAGES:
        for block in blocks(page, "", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = re.sub(r"\s#.*", "", line)
                if re.match(r"asyncdist(-server)? (?!rank \d)", words + " "):
                    found.append((page.name, words.strip()))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_have_the_options_that_pages_give_them(page: str, line: str) -> None:
    words = shlex.split(line)
    command: click.Command = asyncdist_command if words.pop(0) == "asyncdist" else server_command
    known = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        if isinstance(command, click.Group) and (inner := command.get_command(click.Context(command), word)):
            command = inner
            known |= {option for parameter in command.params for option in parameter.opts}
        elif word.startswith("-"):
            assert word.partition("=")[0] in known
        elif isinstance(command, click.Command) and word.endswith(".py"):
            break  # the rest is the script's
        elif word == "asyncdist":  # behind -m
            command = asyncdist_command


def test_there_is_something_to_check() -> None:
    assert len(commands()) > 20
    assert all(len(of_kind(kind)) > 2 for kind in ("fragment", "test", "script"))
    assert of_kind("hosts")
