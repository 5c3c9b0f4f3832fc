"""`asyncdist manifest`: the YAML is valid by Kubernetes' schemas, and pods started by it find each other."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

from asyncdist.cli.manifest_command import MAX_NAME_CHARACTERS, manifest_group
from asyncdist.launch.config import parse_nproc
from asyncdist.launch.scheduler import find_place

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
JOB = ("--image", "registry/node:1", "--nodes", "4", "--nproc-per-node", "auto", "--max-restarts", "2")
SCRIPT = ("train.py", "--name", 'a "b": {c} ü😀', "#")


def printed(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(manifest_group, arguments)
    assert result.exit_code == 0, result.output
    assert "kubectl create secret generic asyncdist --from-literal=token=" in result.output
    return list(yaml.safe_load_all(result.output))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["template"]["spec"]
    return pod


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ("store", "--image", "registry/server:1"),
        ("job", "--name", "train", *JOB, *SCRIPT),
        ("job", "--name", "train", *JOB, "--store", "asyncdist-store:29500", *SCRIPT),
    ],
)
def test_what_is_printed_is_valid(arguments: tuple[str, ...]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in printed(*arguments):
        schemas.validate(document, schemas.latest_version(), strict=True)


def test_the_store_is_durable_and_alone() -> None:
    service, store = printed("store", "--image", "registry/server:1", "--storage", "5Gi")
    spec = store["spec"]
    pod = pod_of(spec)
    container = pod["containers"][0]
    assert (service["kind"], store["kind"], spec["replicas"]) == ("Service", "StatefulSet", 1)
    assert service["metadata"]["name"] == spec["serviceName"] == "asyncdist-store"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert {"--durability=durable", "--data-dir=/var/lib/asyncdist/data", "--host=0.0.0.0"} <= set(container["args"])
    claim = spec["volumeClaimTemplates"][0]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert container["volumeMounts"] == [{"name": claim["metadata"]["name"], "mountPath": "/var/lib/asyncdist"}]
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "asyncdist", "key": "token"}
    assert (container["readinessProbe"]["httpGet"]["path"], pod["securityContext"]["runAsNonRoot"]) == ("/readyz", True)


def test_the_daemon_takes_what_the_store_gives_it() -> None:
    from asyncdist_server.cli import main as daemon

    container = pod_of(printed("store", "--image", "i")[1]["spec"])["containers"][0]
    assert container["command"] == ["asyncdist-server"]
    known = {name for parameter in daemon.params for name in parameter.opts}
    assert {argument.partition("=")[0] for argument in container["args"]} <= known


def test_pods_of_a_job_take_their_places() -> None:
    service, job = printed("job", "--name", "train", *JOB, *SCRIPT)
    spec, pod = job["spec"], pod_of(job["spec"])
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["containers"][0]["command"] == ["asyncdist", "run", *SCRIPT]
    environ = variables(pod) | {"JOB_COMPLETION_INDEX": "3"}
    place = find_place(environ, lambda: f"train-3.{pod['subdomain']}.default.svc.cluster.local")
    assert place is not None
    assert (place.rank, place.host) == (3, f"train-0.{service['metadata']['name']}.default.svc.cluster.local")
    assert (environ["PET_NNODES"], environ["PET_MAX_RESTARTS"]) == ("4", "2")
    assert parse_nproc(environ["PET_NPROC_PER_NODE"], {}) >= 1
    assert environ["ASYNCDIST_STORE"] == ""  # as if it were not there


def test_a_jobset_has_one_job_whose_pods_jobset_names() -> None:
    (jobset,) = printed("jobset", "--name", "train", *JOB, "--store", "store:1", *SCRIPT)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (nodes,) = jobset["spec"]["replicatedJobs"]
    assert (nodes["name"], nodes["replicas"]) == ("nodes", 1)
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 2
    spec = nodes["template"]["spec"]
    assert spec["completions"] == 4
    assert "subdomain" not in pod_of(spec)
    assert variables(pod_of(spec))["ASYNCDIST_STORE"] == "store:1"


def test_the_file_for_sbatch_is_a_script_of_sh() -> None:
    options = ("--name", "train", "--nodes", "4", "--tasks-per-node", "2", "--store", "store:1")
    result = CliRunner().invoke(manifest_group, ["sbatch", *options, *SCRIPT, "$HOME", "a b"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "#!/bin/sh"
    assert {"#SBATCH --job-name=train", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=2"} <= set(lines)
    trial = 'srun() { printf \'%s\\n\' "$ASYNCDIST_STORE" "$ASYNCDIST_TOKEN" "$@"; }\n' + result.output.replace(
        "exec ", ""
    )
    done = subprocess.run(["sh"], input=trial, env={"ASYNCDIST_TOKEN": "mine"}, capture_output=True, text=True)
    command = ["asyncdist", "run", "--nproc-per-node", "1", "--max-restarts", "0"]
    assert done.stdout.splitlines() == ["store:1", "mine", *command, *SCRIPT, "$HOME", "a b"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("store",), "Missing option '--image'"),
        (("store", "--image", "i", "--storage", "much"), "is not a size of Kubernetes"),
        (("store", "--image", "i", "--name", "A_b"), "is not a name"),
        (("job", "--image", "i", "--name", "x" * (MAX_NAME_CHARACTERS + 1), "a.py"), "is not a name"),
        (("job", "--image", "i", "--name", "x"), "Missing argument"),
        (("jobs",), "Did you mean job"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(manifest_group, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_longest_name_is_taken() -> None:
    assert printed("job", "--image", "i", "--name", "x" * MAX_NAME_CHARACTERS, "a.py")
