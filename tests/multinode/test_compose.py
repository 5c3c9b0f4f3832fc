"""docker-compose.yml: any number of nodes, whose store loses nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_kit import PATIENCE_S, PREFIX, ROOT, TOKEN

PROJECT = f"{PREFIX}-compose-{os.environ.get('PYTEST_XDIST_WORKER', 'gw0')}"


def engines() -> list[list[str]]:
    """The compose commands of this machine: 1.29, 2 or both. COMPOSE names one more."""
    found = [["docker-compose"]] if shutil.which("docker-compose") else []
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        found.append(["docker", "compose"])
    return found + ([os.environ["COMPOSE"].split()] if "COMPOSE" in os.environ else [])


class Compose:
    """The project of docker-compose.yml."""

    def __init__(self, command: list[str], token: Path, **environ: str) -> None:
        self._command = [*command, "--project-name", PROJECT]
        self._environ = {**os.environ, "ASYNCDIST_TOKEN_FILE": str(token), **environ}

    def __call__(self, *arguments: str, timeout_s: float = 2 * PATIENCE_S) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def scale(self, nodes: int) -> None:
        self("up", "--detach", "--no-build", "--no-recreate", "--scale", f"node={nodes}")

    def logs(self) -> str:
        return self("logs", "--no-color")

    def until_said(self, pattern: str) -> None:
        deadline_s = time.monotonic() + 2 * PATIENCE_S
        while not re.search(pattern, self.logs()):
            assert time.monotonic() < deadline_s, f"nobody said {pattern!r}"
            time.sleep(0.5)

    def nodes(self) -> list[str]:
        return self("ps", "--quiet", "node").split()

    def ended(self, containers: list[str]) -> list[int]:
        wait = ["docker", "wait", *containers]
        return [int(code) for code in subprocess.check_output(wait, timeout=2 * PATIENCE_S).split()]


@pytest.fixture(params=engines() or [None], ids=lambda command: "_".join(command or ["none"]).rpartition("/")[2])
def compose(request: pytest.FixtureRequest, tmp_path: Path, images: None) -> Iterator[Callable[..., Compose]]:
    """Starts the project with variables; all of it is removed afterwards."""
    if request.param is None:
        pytest.skip("needs docker-compose or docker compose")
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    made: list[Compose] = []

    def make(**environ: str) -> Compose:
        made.append(Compose(request.param, token, **environ))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            try:
                print(one.logs())
            finally:
                one("down", "--volumes", "--timeout", "5")


def test_compose_runs_as_many_nodes_as_are_asked_for_and_more_later(compose: Callable[..., Compose]) -> None:
    project = compose(PROGRAM="examples/elastic_training.py /checkpoints/run --pause 0.15", RANKS="1")
    project.scale(2)
    project.until_said(r"round \d+: 2 ranks go on after step 0")
    project.scale(5)
    project.until_said(r"round \d+: 5 ranks go on after step [1-9]")
    everybody = project.nodes()
    assert len(everybody) == 5
    subprocess.check_call(["docker", "kill", everybody[0]], stdout=subprocess.DEVNULL)
    project.until_said(r"round \d+: 4 ranks go on after step [1-9]")
    assert project.ended(everybody) == [137, 0, 0, 0, 0]
    assert project.logs().count("weights: [ 3. -2.  1.]") == 1


def test_compose_restarts_a_store_that_has_lost_nothing(compose: Callable[..., Compose]) -> None:
    project = compose(NNODES="3", PROGRAM="examples/train_digits.py")
    project.scale(3)
    project.until_said("training on 6 ranks")
    subprocess.check_call(["docker", "restart", "--time", "5", project("ps", "--quiet", "store").strip()])
    assert project.ended(project.nodes()) == [0, 0, 0]
    logs = project.logs()
    assert sorted(set(re.findall(r"node (\d) of 3, ranks", logs))) == ["0", "1", "2"]
    assert "weights bit-identical" in logs
    assert re.search("info journal durability=durable .* keys=[1-9]", logs)
    assert TOKEN not in logs
    containers = [*project.nodes(), project("ps", "--quiet", "store").strip()]
    assert TOKEN not in subprocess.check_output(["docker", "inspect", *containers], text=True)
