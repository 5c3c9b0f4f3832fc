"""The public names, and that importing them does nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import asyncdist

PUBLIC = [getattr(asyncdist, name, None) for name in asyncdist.__all__]

IMPORT_QUIETLY = """
import os, sys, threading
import msgpack, numpy  # not ours to judge

OURS = ("ASYNCDIST_", "GLOO_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
read = []

class Recorder(dict):
    def note(self, key):
        if str(key).startswith(OURS):
            read.append(key)
    def __getitem__(self, key):
        self.note(key)
        return super().__getitem__(key)
    def get(self, key, default=None):
        self.note(key)
        return super().get(key, default)
    def __contains__(self, key):
        self.note(key)
        return super().__contains__(key)

def footprint():
    return {
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "threads": sorted(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
    }

os.environ = Recorder(os.environ)
before, loaded = footprint(), set(sys.modules)
import asyncdist
after = footprint()
assert before == after, f"{before} became {after}"
assert not read, f"read the environment: {read}"
heavy = {"uvloop", "cupy", "torch", "aiohttp", "prometheus_client", "click", "rich", "matplotlib"}
heavy |= {"asyncdist_server.serving.daemon", "sqlite3", "importlib.metadata"}  # for who serves, or asks for the version
assert not heavy & (set(sys.modules) - loaded), f"imported {heavy & set(sys.modules)}"
"""


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_all_is_sorted_without_duplicates() -> None:
    assert list(asyncdist.__all__) == sorted(set(asyncdist.__all__), key=sort_key)


@pytest.mark.parametrize("name", asyncdist.__all__)
def test_every_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(asyncdist, name)
    if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
        assert inspect.getdoc(thing)


@pytest.mark.parametrize("public", [thing for thing in PUBLIC if inspect.isclass(thing)], ids=lambda c: c.__name__)
def test_every_public_method_is_documented(public: type) -> None:
    own = {name: member for name, member in vars(public).items() if not name.startswith("_")}
    methods = {name for name, member in own.items() if inspect.isroutine(member) or isinstance(member, property)}
    shared = {name for name in methods if getattr(own[name], "__name__", name).startswith("_")}  # one stand-in for many
    assert not {name for name in methods - shared if not inspect.getdoc(getattr(public, name))}


async def test_the_world_is_spelled_as_in_torch() -> None:
    async with asyncdist.init_process_group(store=asyncdist.HashStore(), rank=0, world_size=1):
        assert asyncdist.get_rank(asyncdist.group.WORLD) == 0
        await asyncdist.barrier(group=asyncdist.group.WORLD)


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_import_opens_and_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_QUIETLY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_torchs_old_name_of_operations_is_there() -> None:
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        assert getattr(asyncdist.reduce_op, name) is getattr(asyncdist.ReduceOp, name)
