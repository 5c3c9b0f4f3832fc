"""Imports go downward only, the store daemon stands alone, and the cores touch no event loop and no socket."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parent.parent
Layers: TypeAlias = tuple[set[str], ...]
PACKAGES = {"asyncdist": ROOT / "asyncdist", "asyncdist_server": ROOT / "server" / "asyncdist_server"}

# A file imports from its own folder and from layers above it in this list. Modules of one line that lie in the root
# folder may import each other; folders of one line may not.
ROOT_LAYERS: Layers = (
    {"errors", "plan"},
    {"arrays", "concurrency"},
    {"store", "transport", "cuda"},
    {"work", "launch"},
    {"collectives"},
    {"messages", "world"},
    {"gpu"},
    {"group"},
    {"api", "threads"},
    {"init", "data_parallel"},
    {"blocking", "testing", "tuning"},
    {"cli"},
    {"__init__", "__main__"},
)
# The same inside of folders that have folders themselves. REST are the modules of theirs that are named nowhere else.
REST = "*"
LAYERS: dict[str, Layers] = {
    "asyncdist": ROOT_LAYERS,
    "asyncdist.collectives": ({"arguments"}, {"backend"}, {"executor"}, {"shared"}, {"host"}),
    "asyncdist.gpu": ({REST}, {"nccl", "staged"}, {"ipc"}, {"backend", "pairs"}),
    "asyncdist.group": ({REST}, {"methods"}, {"core", "process_group"}, {"default_group", "non_member"}),
    "asyncdist.launch": ({REST}, {"rendezvous"}, {"agent", "elastic", "fixed"}),
    "asyncdist.plan": ({REST}, {"cost"}, {"algorithms"}, {"proof"}, {"selection"}, {"simulation"}),
    "asyncdist.transport": (
        {"fork", "keepalive", "socket_dir", "addresses"},
        {"shared_memory"},
        {"protocol"},
        {"config", "context", "host_memory", "spin"},
        {"connections"},
        {REST},
    ),
    "asyncdist_server": (
        {"clock", "logs", "wire"},
        {"engine"},
        {"torch"},
        {"journal"},
        {"serving"},
        {"ops"},
        {"cli"},
        {"__init__", "__main__"},
    ),
}

CORES = (
    "asyncdist.plan.",
    "asyncdist.collectives.shared.inline",
    "asyncdist.collectives.shared.items",
    "asyncdist.collectives.shared.layout",
    "asyncdist.collectives.shared.turns",
    "asyncdist.transport.protocol.",
    "asyncdist.transport.shared_memory.ring",
    "asyncdist_server.wire.",
    "asyncdist_server.engine.",
    "asyncdist_server.torch.",
)
INPUT_AND_OUTPUT = {"asyncio", "uvloop", "socket", "selectors", "threading", "concurrent"}
HTTP = {"aiohttp", "prometheus_client"}


def modules() -> Iterator[tuple[str, Path, bool]]:
    """Every module's name and file, and whether it is a package."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package and len(parts) > 2 else parts)
            yield name, path, is_package


def exists(module: str) -> bool:
    package, *rest = module.split(".")
    path = PACKAGES[package].joinpath(*rest)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(name: str, tree: ast.Module, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Every module imported anywhere in `tree`, inside functions and under TYPE_CHECKING too, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level + is_package or None] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                ours = source.split(".")[0] in PACKAGES
                yield node.lineno, submodule if ours and exists(submodule) else source


def folder_of(package: str) -> Path:
    top, *rest = package.split(".")
    return PACKAGES[top].joinpath(*rest)


def unit_of(module: str, package: str) -> str:
    """The folder or file of `package` that `module` belongs to."""
    return [*module.split("."), "__init__"][package.count(".") + 1]


def level_of(unit: str, package: str) -> int | None:
    """The layer that a folder or file of `package` belongs to, if there is one."""
    levels = {unit: level for level, units in enumerate(LAYERS[package]) for unit in units}
    return levels.get(unit, None if (folder_of(package) / unit).is_dir() else levels.get(REST))


def is_upward(name: str, imported: str, package: str) -> bool:
    own, other = unit_of(name, package), unit_of(imported, package)
    is_folder = [(folder_of(package) / unit).is_dir() for unit in (own, other)]
    own_level, other_level = level_of(own, package), level_of(other, package)
    if own_level is None or other_level is None:
        return False
    return other_level > own_level - (own != other and any(is_folder))


def violations(name: str, tree: ast.Module, is_package: bool = False) -> list[str]:
    found = []
    for line, imported in sorted(set(imports(name, tree, is_package))):
        top = imported.split(".")[0]
        where = f"{name}:{line} imports {imported}"
        if name.split(".")[0] == "asyncdist_server":
            if top in {"asyncdist", "numpy"}:
                found.append(f"{where}: the daemon stands alone")
            if top in HTTP and name != "asyncdist_server.ops.http":
                found.append(f"{where}: only http.py does")
        elif top in PACKAGES:
            shared = [package for package in LAYERS if f"{name}.".startswith(f"{package}.")]
            shared = [package for package in shared if f"{imported}.".startswith(f"{package}.")]
            if any(is_upward(name, imported, package) for package in shared):
                found.append(f"{where}: upward or sideways")
        if name.startswith(CORES) and (top in INPUT_AND_OUTPUT or (top == "numpy" and ".plan." in name)):
            found.append(f"{where}: a core does no input and output")
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_every_unit_has_a_layer(package: str) -> None:
    units = {unit_of(name, package) for name, *_ in modules() if name.startswith(f"{package}.")}
    unknown = sorted(unit for unit in units if level_of(unit, package) is None)
    assert not unknown, f"say in LAYERS where {unknown} belong"


def test_every_layer_has_its_units() -> None:
    named = {f"{package}.{unit}" for package, layers in LAYERS.items() for unit in set().union(*layers) - {REST}}
    assert not {unit for unit in named if not exists(unit)}


def test_imports_go_downward_only() -> None:
    found = [
        problem
        for name, path, is_package in modules()
        for problem in violations(name, ast.parse(path.read_text()), is_package)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("asyncdist.plan.chunks", "from asyncdist.transport import frame"),
        ("asyncdist.plan.chunks", "def f():\n    import asyncdist.group.process_group"),
        ("asyncdist.plan.chunks", "from asyncdist.store import base"),
        ("asyncdist.plan.chunks", "from ..transport.frame import Kind"),
        ("asyncdist.plan.chunks", "from .. import group"),
        ("asyncdist.plan.chunks", "import asyncdist as dist"),
        ("asyncdist.plan.chunks", "import asyncio"),
        ("asyncdist.plan.chunks", "import numpy as np"),
        ("asyncdist.plan.steps", "from asyncdist.plan.algorithms import ring"),
        ("asyncdist.plan.cost.load", "from asyncdist.plan.proof.symbols import Expressions"),
        ("asyncdist.plan.proof.prove", "from ..simulation import sweep"),
        ("asyncdist.collectives.backend", "from asyncdist.messages.work import SendWork"),
        ("asyncdist.gpu.nccl.path", "from asyncdist.gpu.ipc.path import CudaIpcPath"),
        ("asyncdist.gpu.path", "from asyncdist.gpu.backend import PATHS"),
        ("asyncdist.transport.protocol.peer", "from asyncdist.transport.connections import connection"),
        ("asyncdist.transport.connections.connection", "from ..mesh import Mesh"),
        ("asyncdist.errors", "from asyncdist.work import Work"),
        ("asyncdist.launch.agent", "from asyncdist.cli import main"),
        ("asyncdist.transport.protocol.frame", "from socket import socket"),
        ("asyncdist_server.engine.engine", "import asyncio"),
        ("asyncdist_server.serving.daemon", "def f():\n    import numpy"),
        ("asyncdist_server.serving.daemon", "from asyncdist.errors import DistError"),
        ("asyncdist_server.serving.daemon", "from aiohttp import web"),
    ],
)
def test_a_planted_violation_is_found(name: str, source: str) -> None:
    assert violations(name, ast.parse(source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("asyncdist.plan.chunks", "from .steps import Plan\nfrom . import window"),
        (
            "asyncdist.plan.algorithms.ring_2d",
            "from asyncdist.plan.cost import load\nfrom asyncdist.plan.algorithms import ring",
        ),
        (
            "asyncdist.group.process_group",
            "from asyncdist.plan.chunks import offsets\nfrom asyncdist.world.world import World",
        ),
        ("asyncdist.blocking", "from asyncdist.api import collectives"),
        ("asyncdist.store.tcp_client", "from asyncdist_server.wire.messages import Request"),
        ("asyncdist_server.serving.daemon", "import asyncio\nfrom asyncdist_server.engine.engine import StoreEngine"),
        ("asyncdist_server.ops.http", "from aiohttp import web"),
    ],
)
def test_downward_imports_are_fine(name: str, source: str) -> None:
    assert not violations(name, ast.parse(source))
