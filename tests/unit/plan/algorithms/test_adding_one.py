"""An algorithm is one file, and its name in the registry: added to a copy of the package, everything knows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import asyncdist

STAR = """
from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.cost.load import Hop, Load, Work


def barrier(builder, problem, chunk_length):
    center = problem.world - 1
    if builder.rank != center:
        builder.signal(center)
        builder.await_signal(center)
        return builder.build()
    heard = [builder.await_signal(peer) for peer in range(center)]
    for peer in range(center):
        builder.signal(peer, after=heard)
    return builder.build()


def _cost(shape):
    path = Hop(2, 0, 0, shape.rooted())
    return Load((path,), (path,), Work(2 * shape.world, 0, 0), Work(4 * shape.world, 0, 0))


ALGORITHMS = (Algorithm("barrier", "star", barrier, _cost, growth=ROUNDS_OF_VECTORS, chunked=False),)
"""

KITS = Path(__file__).parents[3] / "kits"
USE = """
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.cost.constants import ASYNCIO_TCP
from asyncdist.plan.problem import Problem
from asyncdist.plan.selection.selector import candidates, parse_overrides
from asyncdist.plan.simulation.simulate import simulate
from plan_proof.verify import verify

for world in (1, 2, 5):
    problem = Problem.of("barrier", world, 0)
    verify(problem, [build(problem, "star", rank, 1) for rank in range(world)])
assert "star" in {one.algorithm for one in candidates(problem, 1)}, "chosen among"
assert parse_overrides("barrier:star") == {"barrier": "star"}
assert simulate(Problem.of("barrier", 20_000, 0), "star", 1, ASYNCIO_TCP, 1) > 0, "its growth is known"
"""


def test_one_file_and_its_name_in_the_registry(tmp_path: Path) -> None:
    shutil.copytree(
        Path(asyncdist.__file__).parent, tmp_path / "asyncdist", ignore=shutil.ignore_patterns("__pycache__")
    )
    folder = tmp_path / "asyncdist" / "plan" / "algorithms"
    (folder / "star.py").write_text(STAR)
    registry = folder / "registry.py"
    registry.write_text(registry.read_text().replace("    scan,\n", "    scan,\n    star,\n"))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{KITS}", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, check=True, timeout=60)
