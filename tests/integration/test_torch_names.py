"""Every public name of torch.distributed is in docs/from-torch.md, on the right side, with torch's argument order."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch_later import Later

import asyncdist as dist
from asyncdist import blocking

torch_dist: Any = Later("torch.distributed")

pytestmark = pytest.mark.peers

STORE_METHODS_NOT_HERE = {"libuvBackend"}

PAGE = (Path(__file__).parent.parent.parent / "docs" / "from-torch.md").read_text()
NOT_TAKEN = {"async_op"}
"""An argument of torch's that means nothing here."""


def names_of(heading: str) -> set[str]:
    """What the table under a heading names in its first column."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


HERE = names_of("Every name of torch.distributed")
NOT_HERE = names_of("What is not here")


def is_torchs(name: str) -> bool:
    if name == "reduce_op":  # asking it anything warns
        return True
    thing = getattr(torch_dist, name)
    return not isinstance(thing, ModuleType) and str(getattr(thing, "__module__", "")).startswith("torch")


def public() -> set[str]:
    names = {name for name in dir(torch_dist) if not name.startswith("_") and is_torchs(name)}
    return names | set(torch_dist.distributed_c10d.__all__)


def offered(name: str) -> bool:
    thing = getattr(dist, name, None)
    return thing is not None and (name == "group" or not isinstance(thing, ModuleType))


def test_every_name_is_in_one_of_the_tables() -> None:
    theirs = public()
    assert not theirs - HERE - NOT_HERE
    assert not HERE & NOT_HERE
    assert not HERE - theirs
    assert len(theirs) > 80


def test_the_tables_say_what_is_so() -> None:
    assert not [name for name in HERE if not offered(name)]
    assert not [name for name in NOT_HERE if offered(name)]


@pytest.mark.parametrize("name", sorted(name for name in HERE if inspect.isfunction(getattr(dist, name, None))))
def test_arguments_are_torchs_in_torchs_order(name: str) -> None:
    parameters = inspect.signature(getattr(torch_dist, name)).parameters
    theirs = [one for one in parameters if one not in NOT_TAKEN and not one.startswith("_")]
    ours = inspect.signature(getattr(dist, name)).parameters
    assert [one for one in theirs if one not in ours] == []
    positional = [one for one, what in ours.items() if what.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == theirs[: len(positional)]  # the rest is by name here


@pytest.mark.parametrize("name", ["Store", "TCPStore", "HashStore", "FileStore", "PrefixStore"])
@pytest.mark.parametrize("module", [dist, blocking], ids=lambda module: module.__name__)
def test_stores_have_torchs_methods_and_arguments(module: ModuleType, name: str) -> None:
    theirs, ours = getattr(torch_dist, name), getattr(module, name)
    if name == "TCPStore" and module is dist:
        ours = dist.TCPStore("127.0.0.1", 29500)  # host and port are its own
    public = {method for method in dir(theirs) if not method.startswith("_")}
    assert {method for method in public if not hasattr(ours, method)} <= STORE_METHODS_NOT_HERE
    if name != "Store":
        parameters = re.findall(r"(\w+): ", theirs.__init__.__doc__.splitlines()[0])[1:]
        assert list(inspect.signature(getattr(module, name)).parameters)[: len(parameters)] == parameters


def test_the_names_that_torch_has_dropped_exist() -> None:
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):  # its tutorials still write dist.reduce_op.SUM
        assert getattr(dist.reduce_op, name) is getattr(dist.ReduceOp, name)
        assert getattr(blocking.reduce_op, name) is getattr(dist.ReduceOp, name)
    for kind in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
        assert offered(f"{kind}_multigpu")
        assert f"`{kind}_multigpu`" in PAGE
