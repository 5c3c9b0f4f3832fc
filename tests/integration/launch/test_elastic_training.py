"""The example of an elastic job: a node is killed, another comes, and what is learned is what one node alone learns."""

from __future__ import annotations

import asyncio
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from launching import DEADLINE_S, run, running, until

from asyncdist import checkpoint
from asyncdist.checkpoint import files
from asyncdist.testing import run_world
from asyncdist_server import serve_in_thread

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "elastic_training.py")
TIMES = "--rdzv-conf=last_call_timeout=0.5,keep_alive_interval=1,keep_alive_max_attempt=5"


def step_in(path: Path) -> int:
    """The step of the last checkpoint."""
    numbers = files.checkpoints_in(path)
    return files.read_index(path, numbers[-1])["state"]["step"] if numbers else 0


def found_in(path: Path) -> checkpoint.Loaded:
    (found,) = run_world(1, lambda _group: checkpoint.load(path), loop_factory=asyncio.new_event_loop)
    assert found is not None
    return found


def progressed(path: Path) -> None:
    before = step_in(path)
    until(lambda: step_in(path) > before, f"a checkpoint after step {before}")


@pytest.mark.slow("trains through three rounds")
def test_training_survives_the_loss_of_a_node_and_takes_in_another(tmp_path: Path) -> None:
    path, alone = tmp_path / "checkpoints", tmp_path / "alone"
    with ExitStack() as stack:
        server = stack.enter_context(serve_in_thread())

        def start(pause_s: float) -> subprocess.Popen[bytes]:
            options = ["--nnodes=1:2", "--rdzv-id=job", "--grace=1", TIMES, EXAMPLE, str(path), f"--pause={pause_s}"]
            return stack.enter_context(running(*options, ASYNCDIST_STORE=server.address))

        def says(process: subprocess.Popen[bytes], words: bytes) -> None:
            assert process.stderr is not None
            until(lambda: words in process.stderr.readline(), f"{words!r} to be said")

        first = start(0.2)  # slow enough for what follows; the slowest rank decides
        progressed(path)
        second = start(0.02)
        says(second, b"node 1 of 2")
        third = start(0.0)
        says(third, b"waiting for")  # until there is a place for it
        progressed(path)
        first.kill()
        output = b""
        for process in (second, third):
            stdout, stderr = process.communicate(timeout=2 * DEADLINE_S)
            assert process.returncode == 0, stderr.decode()
            output += stdout
    begins = [int(step) for step in re.findall(r"ranks go on after step (\d+)", output.decode())]
    assert begins == sorted(begins)
    assert begins[0] > 0
    assert output.decode().count("2 ranks go on") == 1  # after the loss; before, the first node said it
    assert run(EXAMPLE, str(alone)).returncode == 0
    elastic, undisturbed = found_in(path), found_in(alone)
    assert elastic.state == undisturbed.state == {"step": 200}
    assert np.allclose(elastic.arrays["weights"], undisturbed.arrays["weights"], rtol=0, atol=1e-12)
