"""What Slurm, MPI launchers and Kubernetes tell a process; the environments were recorded, but for those of pods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncdist.cli.run_command import run_command
from asyncdist.launch.config import Endpoint, LaunchConfig
from asyncdist.launch.scheduler import Place, _first_host, find_place, torchrun_variables
from asyncdist.world.init_method import parse_init_method

RECORDED: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parents[2] / "data" / "scheduler_environments.json").read_text()
)
PER_NODE = RECORDED["srun --ntasks-per-node=1, second of two nodes"]
OPEN_MPI, HYDRA = RECORDED["mpirun of Open MPI 4.1"], RECORDED["mpiexec.hydra of MPICH 4.0"]

# As the documentation of Kubernetes, JobSet and Kubeflow's Trainer has them.
POD = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
POD_NAME = "train-3.workers.default.svc.cluster.local"
JOBSET_NAME = "train-workers-0-3.train.default.svc.cluster.local"
TRAIN_JOB = POD | {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


def pod() -> str:
    return POD_NAME


def nameless() -> str:
    return "vm"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("srun --ntasks-per-node=1, second of two nodes", ("Slurm", 1, 2, "slurm-1.0", "node1", 0, 1)),
        ("srun -n3 on two nodes, last task", ("Slurm", 2, 3, "slurm-2.0", "node1", 0, 1)),
        ("srun -n3 on two nodes, second task", ("Slurm", 1, 3, "slurm-2.0", "node1", 1, 2)),
        ("srun -n1", ("Slurm", 0, 1, "slurm-3.0", "127.0.0.1", 0, 1)),
        ("srun within sbatch, last task", ("Slurm", 3, 4, "slurm-4.0", "node1", 1, 2)),
        ("srun --mpi=pmi2", ("Slurm", 1, 2, "slurm-6.0", "127.0.0.1", 1, 2)),
        ("srun --mpi=pmix", ("Slurm", 1, 2, "slurm-1.0", "127.0.0.1", 1, 2)),
        ("srun of a requeued job, last task", ("Slurm", 3, 4, "slurm-2.0r1", "node1", 1, 2)),
        ("mpiexec.hydra of MPICH 4.0 within sbatch, last process", ("MPICH", 3, 4, "mpi-2.0", "node1", 1, 2)),
        ("mpiexec.hydra of MPICH 5.0 within sbatch, last process", ("MPICH", 3, 4, "mpi-3.0", "node1", 1, 2)),
        ("mpirun of Open MPI 4.1 within sbatch, last process", ("Open MPI", 3, 4, "mpi-691863553", "node1", 1, 2)),
        ("mpirun within salloc", ("Open MPI", 1, 2, "mpi-896008193", "node1", 0, 1)),
        ("mpirun of Open MPI 4.1", ("Open MPI", 1, 2, "mpi-358547457", "127.0.0.1", 1, 2)),
        ("mpiexec.hydra of MPICH 4.0", ("MPICH", 1, 2, "", "127.0.0.1", 1, 2)),
    ],
)
def test_places_in_recorded_environments(name: str, expected: tuple[Any, ...]) -> None:
    place = find_place(RECORDED[name], nameless)
    assert place is not None
    assert (place.by, place.rank, place.size, place.job, place.host, place.local_rank, place.local_size) == expected
    assert 61440 <= place.port < 65536


@pytest.mark.parametrize("environ", [{}, RECORDED["sbatch, the script itself"], RECORDED["salloc, a shell"]])
def test_who_was_not_started_as_one_of_several_has_no_place(environ: dict[str, str]) -> None:
    assert find_place(environ, nameless) is None
    assert find_place(environ | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, nameless) is None  # an interactive step
    assert torchrun_variables(environ, nameless) == {}


def test_all_tasks_of_a_step_meet_at_one_port_and_other_steps_elsewhere() -> None:
    one = find_place(RECORDED["srun -n3 on two nodes, last task"], nameless)
    other = find_place(RECORDED["srun -n3 on two nodes, second task"], nameless)
    next_step = find_place(RECORDED["srun -n3 on two nodes, last task"] | {"SLURM_STEP_ID": "1"}, nameless)
    assert one is not None
    assert other is not None
    assert next_step is not None
    assert one.port == other.port != next_step.port


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (PER_NODE, "SLURM_JOB_ID SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_NODELIST"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE"),
        (HYDRA, "PMI_RANK PMI_SIZE MPI_LOCALNRANKS"),
    ],
)
def test_what_is_half_set_names_what_is_missing(environ: dict[str, str], names: str) -> None:
    for name in names.split():
        for wrong, message in (("", f"does not say all: {name} not set"), ("x", f"{name} is not a number")):
            if wrong and name == "SLURM_STEP_NODELIST":
                continue
            with pytest.raises(ValueError, match=message):
                find_place(environ | {name: wrong}, nameless)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[03-05,9],x1", "node03"),
        ("rack[1-2]node[07,09]", "rack1node07"),
        ("n[1-2]-ib,other", "n1-ib"),
        ("a-b[12]", "a-b12"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first


def test_torchs_names_are_added_and_never_changed() -> None:
    found = torchrun_variables(PER_NODE | {"MASTER_PORT": "29500", "ASYNCDIST_JOB_ID": "mine"}, nameless)
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node1",
    }
    assert torchrun_variables(PER_NODE | {"RANK": "5"}, nameless) == {}  # a launcher's worker has its place


def test_a_process_group_takes_its_place() -> None:
    environ = dict(OPEN_MPI)
    method = parse_init_method(None, -1, -1, environ=environ)
    assert (method.rank, method.world_size, method.host, method.may_host) == (1, 2, "127.0.0.1", True)
    assert method.namespace == "mpi-358547457"
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]) == ("1", "1", "2")
    arguments = dict(OPEN_MPI, MASTER_ADDR="a", MASTER_PORT="1")
    assert parse_init_method(None, 0, 1, environ=arguments).world_size == 1
    assert "RANK" not in arguments


def test_a_pod_is_told_how_many_there_are() -> None:
    for environ in (POD, {"PMIX_RANK": "3"}):
        with pytest.raises(ValueError, match="as number 3, but of how many\\? set WORLD_SIZE"):
            torchrun_variables(environ, pod)
    found = torchrun_variables(POD | {"WORLD_SIZE": "4"}, pod)
    assert found["RANK"] == "3"
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("train-0.workers.default.svc.cluster.local", "29500")
    assert found["ASYNCDIST_JOB_ID"] == "train"
    assert find_place(POD, lambda: JOBSET_NAME) == Place(
        "Kubernetes", 3, None, "train-workers-0", 29500, "train-workers-0-0.train.default.svc.cluster.local"
    )


def test_who_cannot_tell_where_to_meet_says_so() -> None:
    message = "as number 1 of 8, but where do they meet\\? set MASTER_ADDR"
    with pytest.raises(ValueError, match=message):
        torchrun_variables(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8"}, nameless)
    with pytest.raises(ValueError, match="where do they meet"):
        torchrun_variables(POD | {"WORLD_SIZE": "4"}, lambda: "train-3")  # a pod without a service
    there = {"OMPI_COMM_WORLD_SIZE": "8", "MASTER_ADDR": "node0"}
    assert torchrun_variables(OPEN_MPI | there, nameless)["MASTER_PORT"]
    with pytest.raises(ValueError, match="number 1 of 2, but WORLD_SIZE is 3"):
        torchrun_variables(OPEN_MPI | {"WORLD_SIZE": "3"}, nameless)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Start a launcher with these options and variables; returns its configuration, or what it said in refusing."""
    script = tmp_path / "script.py"
    script.write_text("")
    made: list[LaunchConfig] = []
    monkeypatch.setattr("asyncdist.cli.run_command._launch", lambda config: made.append(config) or 0)
    monkeypatch.setattr("asyncdist.cli.run_command.find_place", lambda environ: find_place(environ, pod))

    def launch(environ: dict[str, str], *options: str) -> Any:
        made.clear()
        result = CliRunner().invoke(run_command, [*options, str(script)], env=environ, auto_envvar_prefix="PET")
        return made[0] if made else " ".join(result.output.split())

    return launch


def test_launchers_of_a_step_are_nodes(launched: Any) -> None:
    config = launched(PER_NODE)
    assert (config.nnodes, config.node_rank, config.endpoint.host) == (2, 1, "node1")
    assert config.job_id == "slurm-1.0"
    place = find_place(PER_NODE, nameless)
    assert place is not None
    assert config.endpoint.port == place.port


def test_launchers_that_share_a_host_count_its_workers(launched: Any) -> None:
    config = launched(RECORDED["srun -n3 on two nodes, second task"], "--nproc-per-node", "2")
    assert (config.nnodes, config.node_rank, config.first_local_rank, config.local_world_size) == (3, 1, 2, 4)
    elastic = launched(RECORDED["srun -n3 on two nodes, second task"], "--nnodes", "1:3")
    assert (elastic.first_local_rank, elastic.local_world_size) == (0, None)


def test_a_job_that_was_requeued_is_another(launched: Any) -> None:
    again = PER_NODE | {"SLURM_RESTART_COUNT": "1"}
    assert launched(again).job_id == "slurm-1.0r1"
    assert launched(again).endpoint != launched(PER_NODE).endpoint
    pmi2 = find_place(RECORDED["srun --mpi=pmi2"] | {"SLURM_RESTART_COUNT": "2"}, nameless)
    assert pmi2 is not None
    assert (pmi2.by, pmi2.job) == ("Slurm", "slurm-6.0r2")


def test_options_win(launched: Any) -> None:
    config = launched(PER_NODE, "--rdzv-endpoint", "a:1", "--rdzv-id", "mine")
    assert (config.nnodes, config.node_rank, config.endpoint, config.job_id) == (2, None, Endpoint("a", 1), "mine")
    assert launched(PER_NODE, "--master-port", "7").endpoint == Endpoint("node1", 7)
    alone = launched(PER_NODE, "--nnodes", "1")
    assert (alone.nnodes, alone.endpoint) == (1, None)
    assert launched(PER_NODE, "--standalone").nnodes == 1
    elastic = launched(PER_NODE, "--nnodes", "1:2")
    assert (elastic.min_nodes, elastic.nnodes, elastic.node_rank) == (1, 2, None)
    daemon = launched(PER_NODE | {"ASYNCDIST_STORE": "store:1"})
    assert (daemon.nnodes, daemon.endpoint, daemon.job_id) == (2, None, "slurm-1.0")
    assert launched(PER_NODE | {"RANK": "0", "WORLD_SIZE": "1"}).nnodes == 1  # started by a worker of another job


def test_launchers_in_pods(launched: Any) -> None:
    config = launched(POD | {"PET_NNODES": "4"})
    assert (config.nnodes, config.node_rank, config.job_id) == (4, 3, "train")
    assert config.endpoint == Endpoint("train-0.workers.default.svc.cluster.local", 29500)
    config = launched(TRAIN_JOB)
    assert (config.nnodes, config.nproc_per_node, config.node_rank) == (4, 2, 3)
    assert config.endpoint == Endpoint("train-node-0-0.train", 29400)


def test_no_launcher_makes_a_world_of_one_in_silence(launched: Any) -> None:
    assert "Kubernetes has started this launcher as number 3, but of how many? give --nnodes" in launched(POD)
    assert launched(POD, "--standalone").nnodes == 1
    half = {name: value for name, value in TRAIN_JOB.items() if name != "PET_NNODES"}
    assert "PET_NODE_RANK is 3, but of how many nodes? set PET_NNODES" in launched(half)
    assert "where do they meet? give --master-addr" in launched(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8"})
    assert re.search("SLURM_PROCID not set", launched(PER_NODE | {"SLURM_PROCID": ""}))
