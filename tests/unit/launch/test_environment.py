"""The environment contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncdist.errors import LaunchError
from asyncdist.launch.config import Endpoint
from asyncdist.launch.worker import NodePlace, Roster, line_prefix, worker_environment


def place(nproc: int = 4, token: str | None = "secret") -> NodePlace:
    roster = Roster(1, (3, nproc), "ab12")
    return NodePlace(roster, Endpoint("10.0.0.1", 29500), Endpoint("node0", 29501), token)


def test_what_a_worker_is_told() -> None:
    assert worker_environment(place(), 2, attempt=1, max_restarts=3, base={"HOME": "/root"}) == {
        "HOME": "/root",
        "RANK": "5",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "7",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29501",
        "ASYNCDIST_STORE": "10.0.0.1:29500",
        "ASYNCDIST_JOB_ID": "ab12.1",
        "ASYNCDIST_TOKEN": "secret",
        "TORCHELASTIC_RUN_ID": "ab12",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_rounds_of_an_elastic_job_are_more_than_its_restarts() -> None:
    environment = worker_environment(replace(place(), restarts=1), 2, attempt=4, max_restarts=3, base={})
    assert environment["ASYNCDIST_JOB_ID"] == "ab12.4"
    assert environment["ASYNCDIST_ROUND"] == "4"
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert "ASYNCDIST_ROUND" not in worker_environment(place(), 2, 4, 3, base={"ASYNCDIST_ROUND": "9"})


def test_the_users_choices_stay() -> None:
    environment = worker_environment(place(), 0, 0, 0, base={"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""})
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["PYTHONUNBUFFERED"] == ""


def test_a_single_worker_keeps_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in worker_environment(place(nproc=1), 0, 0, 0, base={})


def test_the_launchers_own_token_is_not_handed_on() -> None:
    base = {"ASYNCDIST_TOKEN": "master", "ASYNCDIST_TOKEN_FILE": "/etc/token", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert worker_environment(place(), 0, 0, 0, base=base)["ASYNCDIST_TOKEN"] == "secret"
    environment = worker_environment(place(token=None), 0, 0, 0, base=base)
    assert not base.keys() & environment.keys()


def test_a_job_inside_of_a_job_does_not_write_that_ones_error_file() -> None:
    assert "TORCHELASTIC_ERROR_FILE" not in worker_environment(place(), 0, 0, 0, {"TORCHELASTIC_ERROR_FILE": "outer"})


def test_a_worker_that_sees_one_gpu_is_local_rank_0() -> None:
    virtual = replace(place(), virtual_local_rank=True)
    for base, device in (({}, "2"), ({"CUDA_VISIBLE_DEVICES": "4, 5, GPU-8a"}, "GPU-8a")):
        environment = worker_environment(virtual, 2, 0, 0, base=base)
        assert (environment["LOCAL_RANK"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", device)
        assert environment["LOCAL_WORLD_SIZE"] == "4"
    with pytest.raises(LaunchError, match="local rank 2 has no GPU of its own"):
        worker_environment(virtual, 2, 0, 0, base={"CUDA_VISIBLE_DEVICES": "0,1"})


def test_the_interface_that_was_chosen() -> None:
    base = {"ASYNCDIST_SOCKET_IFNAME": "lo"}
    assert worker_environment(place(), 0, 0, 0, base=base)["ASYNCDIST_SOCKET_IFNAME"] == "lo"
    chosen = replace(place(), interface="eth1")
    assert worker_environment(chosen, 0, 0, 0, base=base)["ASYNCDIST_SOCKET_IFNAME"] == "eth1"


def test_what_stands_before_lines() -> None:
    assert line_prefix(5, 1, "trainer", {}) == b"[rank 5] "
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}${local_rank} of ${rank}\n$other $]: "}
    assert line_prefix(5, 1, "trainer", template) == b"[trainer1 of 5 $other $]: "
