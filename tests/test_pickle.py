"""Nothing that a stranger sends is ever unpickled: who imports what can run code from data is listed here, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("asyncdist", "server") for path in (ROOT / folder).rglob("*.py"))

EXECUTES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code", "yaml"}
"""Modules that make objects, and so run code, from bytes."""
PICKLES = {"multiprocessing"}
"""Modules that pickle by themselves what is handed to another process."""
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {"load", "loads", "fromfile", "memmap"}

ALLOWED = {
    ("asyncdist/arrays/objects.py", "pickle"): "only with allow_pickle=True on every rank",
    ("asyncdist/cli/flight_record_command.py", "pickle"): "it only writes: torch's analyzer reads nothing else",
    ("asyncdist/launch/spawn.py", "multiprocessing"): "a program's own function, to its own children",
    ("asyncdist/tuning/session.py", "multiprocessing"): "figures of a process's own children, over its own pipe",
    ("asyncdist/testing/fake_meeting.py", "multiprocessing"): "its sockets only, for bytes in msgpack",
}


def findings(tree: ast.Module) -> Iterator[str]:
    """What in `tree` could run code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from {top for name in names if (top := name.split(".")[0]) in EXECUTES | PICKLES}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                yield called
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if called.split(".")[0] in ("np", "numpy") and called.split(".")[-1] in LOADS:
                allowed = keywords.get("allow_pickle")
                if allowed is not None and not (isinstance(allowed, ast.Constant) and allowed.value is False):
                    yield "numpy with allow_pickle"
            if {"object_hook", "object_pairs_hook"} & keywords.keys() and "msgpack" in called:
                yield "msgpack with a hook"


def test_code_is_never_made_from_data_but_where_it_is_said() -> None:
    found = {(str(path.relative_to(ROOT)), name) for path in SOURCES for name in findings(ast.parse(path.read_text()))}
    assert found <= ALLOWED.keys(), sorted(found - ALLOWED.keys())
    assert found >= ALLOWED.keys(), "no longer needed: take it from the list"


def test_the_store_and_its_client_have_no_exception() -> None:
    """Neither what the daemon reads, nor what a client reads of it."""
    assert not [name for name, _ in ALLOWED if name.startswith(("server/", "asyncdist/store/", "asyncdist/transport/"))]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill as d",
        "import multiprocessing.connection",
        "eval(text)",
        "exec(text)",
        "np.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=flag)",
        "msgpack.unpackb(data, object_hook=make)",
    ],
)
def test_a_planted_use_is_found(source: str) -> None:
    assert list(findings(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["import json", "np.load(file)", "msgpack.unpackb(data, use_list=False)"],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert not list(findings(ast.parse(source)))
