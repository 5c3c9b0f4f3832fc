"""The demo and README's example, as a reader would run them, and what the demo promises."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "train_digits.py"


def launch(ranks: int, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist", "run", "--nproc-per-node", str(ranks), str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_data_is_what_its_readme_says(demo: ModuleType) -> None:
    readme = (ROOT / "examples" / "data" / "README.md").read_text()
    assert f"`{hashlib.sha256(demo.DATA.read_bytes()).hexdigest()}`" in readme
    training, test = demo.load_digits()
    assert training.images.shape == (1200, 64)
    assert test.images.shape == (597, 64)
    counts = np.bincount(np.concatenate([training.labels, test.labels]))
    assert " ".join(map(str, counts)) in readme


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_shards_make_up_the_same_batches_for_any_world_size(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 2)
    training, _ = demo.load_digits()
    shards = [demo.batches(training, rank, world_size) for rank in range(world_size)]
    for batch, *parts in zip(demo.batches(training, 0, 1), *shards, strict=True):
        whole = np.empty_like(batch.images)
        for rank, part in enumerate(parts):
            whole[rank::world_size] = part.images
        assert np.array_equal(whole, batch.images)


def test_the_demo_learns_and_all_ranks_agree() -> None:
    done = launch(2, DEMO, "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"accuracy (\S+) \(alone (\S+)\) in .* on 2 ranks, weights bit-identical", done.stdout)
    assert summary is not None, done.stdout
    assert float(summary[1]) >= 0.96
    assert abs(float(summary[1]) - float(summary[2])) <= 0.003


SABOTAGED = """
import os, sys
sys.path.insert(0, {folder!r})
import train_digits as demo

async def train(*arguments, honest=demo.train):
    network = await honest(*arguments)
    network[0].weights[0, 0] += {drift} * int(os.environ["RANK"])
    return network

demo.train, demo.EPOCHS = train, {epochs}
sys.exit(demo.dist.run(demo.main(compare=False)))
"""


@pytest.mark.parametrize(
    ("epochs", "drift", "status", "printed"),
    [
        (0, 0, 1, "accuracy 0.[01].*bit-identical"),
        (8, 1e-6, 1, "accuracy 0.9.*DIFFERENT"),
        (8, 0, 0, "accuracy 0.9.*bit-identical"),
    ],
    ids=["learns nothing", "one weight differs", "not sabotaged"],
)
def test_the_demo_fails_where_it_must(tmp_path: Path, epochs: int, drift: float, status: int, printed: str) -> None:
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED.format(folder=str(DEMO.parent), epochs=epochs, drift=drift))
    done = launch(2, script)
    assert done.returncode == status, done.stdout + done.stderr
    assert re.search(printed, done.stdout), done.stdout


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    source = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert source is not None
    script = tmp_path / "example.py"
    script.write_text(source[1])
    done = launch(4, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"received \((\d+),\)", done.stdout)) == ["10", "20", "30"]
