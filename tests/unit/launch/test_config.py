"""Endpoints, numbers of workers, command lines, and what a configuration refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncdist.launch import config
from asyncdist.launch.config import (
    MAX_PROCESSES_PER_NODE,
    Endpoint,
    LaunchConfig,
    parse_endpoint,
    parse_nnodes,
    parse_nproc,
    usable_cores,
    worker_command,
)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node0:1234", Endpoint("node0", 1234)),
        ("node0", Endpoint("node0", 29500)),
        (" 10.0.0.1:1 ", Endpoint("10.0.0.1", 1)),
        ("node0:65535", Endpoint("node0", 65535)),
        ("[::1]:80", Endpoint("::1", 80)),
        ("[fe80::1]", Endpoint("fe80::1", 29500)),
        ("fe80::1", Endpoint("fe80::1", 29500)),
    ],
)
def test_endpoint_forms(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text", ["", ":80", "host:0", "host:65536", "host:x", "host:-1", "[::1", "[::1]80", "h:\u00b2"]
)
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|port|HOST"):
        parse_endpoint(text)


def test_number_of_workers() -> None:
    assert parse_nproc("3", {}) == 3
    assert parse_nproc(str(MAX_PROCESSES_PER_NODE), {}) == MAX_PROCESSES_PER_NODE
    assert parse_nproc("CPU", {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == usable_cores()
    assert parse_nproc("gpu", {"CUDA_VISIBLE_DEVICES": "0,GPU-5ab, 7"}) == 3
    assert parse_nproc("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert parse_nproc("auto", {"CUDA_VISIBLE_DEVICES": ""}) == usable_cores()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", str(MAX_PROCESSES_PER_NODE + 1)])
def test_numbers_of_workers_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|between"):
        parse_nproc(text, {})


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1, 1)), (" 12 ", (12, 12)), ("3:3", (3, 3)), ("1:4", (1, 4)), ("2:10", (2, 10))]
)
def test_number_of_nodes(text: str, counts: tuple[int, int]) -> None:
    assert parse_nnodes(text) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "1 or more"),
        ("-1", "1 or more"),
        ("", "1 or more"),
        ("x", "1 or more"),
        ("0:4", "1 or more"),
        ("1:x", "1 or more"),
        ("1:2:3", "1 or more"),
        ("4:1", "ends before it begins"),
    ],
)
def test_numbers_of_nodes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_nnodes(text)


def test_gpu_without_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="no NVIDIA GPU"):
        parse_nproc("gpu", {"CUDA_VISIBLE_DEVICES": "-1"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ()}, "nothing to run"),
        ({"nproc_per_node": 0}, "nproc-per-node"),
        ({"nproc_per_node": MAX_PROCESSES_PER_NODE + 1}, "nproc-per-node"),
        ({"nnodes": 0}, "nnodes"),
        ({"nnodes": 2}, "a place to meet"),
        ({"node_rank": 1}, "node-rank"),
        ({"nnodes": 2, "endpoint": Endpoint("a", 1), "node_rank": 2}, "node-rank"),
        ({"nnodes": 2, "store": Endpoint("a", 1)}, "--rdzv-id"),
        ({"nnodes": 2, "min_nodes": 1, "store": Endpoint("a", 1)}, "--rdzv-id"),
        ({"nnodes": 2, "min_nodes": 0, "endpoint": Endpoint("a", 1)}, "a range of nodes"),
        ({"nnodes": 2, "min_nodes": 2, "endpoint": Endpoint("a", 1)}, "a range of nodes"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LaunchConfig(**{"command": ("true",), **changes})


def test_configurations_that_do() -> None:
    LaunchConfig(command=("true",), nproc_per_node=MAX_PROCESSES_PER_NODE)
    LaunchConfig(command=("true",), nnodes=2, node_rank=1, endpoint=Endpoint("a", 1))
    LaunchConfig(command=("true",), nnodes=2, store=Endpoint("a", 1), job_id="job")


def test_worker_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    assert worker_command(str(script), ("-a",), module=False, no_python=False) == (sys.executable, str(script), "-a")
    assert worker_command("pkg.mod", ("x",), module=True, no_python=False) == (sys.executable, "-m", "pkg.mod", "x")
    assert worker_command("ls", ("-l",), module=False, no_python=True) == ("ls", "-l")
    monkeypatch.setenv("PYTHON_EXEC", "python3.x")
    assert worker_command(str(script), (), module=False, no_python=False) == ("python3.x", str(script))
    assert worker_command("pkg.mod", (), module=True, no_python=False) == ("python3.x", "-m", "pkg.mod")
    assert worker_command("ls", (), module=False, no_python=True) == ("ls",)
    with pytest.raises(ValueError, match="exclude each other"):
        worker_command("ls", (), module=True, no_python=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"missing\.py"):
        worker_command("missing.py", (), module=False, no_python=False)


def test_no_gpu_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(config.os, "listdir", absent)
    assert parse_nproc("auto", {}) == usable_cores()
