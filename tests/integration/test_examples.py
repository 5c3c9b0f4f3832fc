"""The examples, as a reader would run them, and what they promise; README's is in test_document_code.py."""

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
from launching import run, run_one_after_another

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEMO = EXAMPLES / "train_digits.py"
UPDATE = EXAMPLES / "weight_update.py"
GPU_UPDATE = EXAMPLES / "gpu_weight_update.py"
ELASTIC = EXAMPLES / "elastic_training.py"
FLEET = EXAMPLES / "fleet.py"

PRINTED = {
    "collectives": [
        "[rank 0] broadcast: [0 0] [3 3]",
        "[rank 3] scatter: [30 30]",
        "[rank 0] gather: [0 1 4 9]",
        "[rank 0] reduce: [3 0]",
        "[rank 0] all_gather: [[0.0, 0.0], [1.0, 0.5], [2.0, 1.0], [3.0, 1.5]]",
        "[rank 0] all_gather_array: [[], [0], [0, 1], [0, 1, 2]]",
        "[rank 0] all_gather_object: [b'rank 0', b'rank 1', b'rank 2', b'rank 3']",
        "[rank 0] all_reduce: [4. 6.] meanwhile: 332833500",
    ],
    "point_to_point": [
        "[rank 3] chain: [8.]",
        "[rank 0] ring: 3.0 from rank 3",
        "[rank 0] crossed sends: 8 MiB each way",
        "[rank 0] from anybody: nothing yet",
        "[rank 0] from anybody: [[0], [0, 1], [0, 1, 2]]",
    ],
    "reductions": [
        "[rank 0] groups joined by MAX: [5.]",
        "[rank 0] weighted sum: [2. 1.]",
        "[rank 1] softmax: the largest share is 0.197",
        "[rank 0] norm: 6.3246",
    ],
    "data_parallel": ["[rank 0] weights: [ 3. -2.  1.]"],
    "checkpoint": ["[rank 0] loaded: [6. 6. 6. 6.]"],
    "pipeline": ["[rank 3] pipeline: 8 pieces of 32 rows through 4 layers"],
}
"""What the short examples print on four ranks, with asyncio and without."""
CALLS = {
    "rpc_parameter_server": "[rank 0] parameter server: [ 3. -2.  1.] after 450 gradients",
    "rpc_model_parallel": "[rank 0] model over two ranks: 200 steps, the loss fell well",
    "rpc_actors": "[rank 0] actors: 60 games, 720 batches, learned to go right: yes",
}
"""The same of those that call other ranks, which need asyncio."""


def launch(ranks: int, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("--nproc-per-node", str(ranks), str(script), *arguments)


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


@pytest.mark.slow("trains")
def test_the_demo_learns_and_all_ranks_agree() -> None:
    done = launch(2, DEMO, "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"accuracy (\S+) \(alone (\S+)\) in .* on 2 ranks, weights bit-identical", done.stdout)
    assert summary is not None, done.stdout
    assert float(summary[1]) >= 0.96
    assert abs(float(summary[1]) - float(summary[2])) <= 0.003


@pytest.mark.slow("runs every example on four ranks")
def test_the_short_examples_print_what_they_say(tmp_path: Path) -> None:
    """Each twice: with asyncio and without."""
    scripts = [EXAMPLES / f"{name}{variant}.py" for variant in ("", "_blocking") for name in PRINTED]
    done = run_one_after_another(4, tmp_path, scripts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(2 * [line for lines in PRINTED.values() for line in lines])


@pytest.mark.slow("runs three examples on four ranks")
def test_the_examples_of_calls_print_what_they_say(tmp_path: Path) -> None:
    done = run_one_after_another(4, tmp_path, [EXAMPLES / f"{name}.py" for name in CALLS])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(CALLS.values())


@pytest.mark.parametrize("name", PRINTED)
def test_examples_without_asyncio_differ_by_little_else(name: str) -> None:
    asynchronous, blocking = (
        (EXAMPLES / f"{name}{variant}.py").read_text().splitlines() for variant in ("", "_blocking")
    )
    assert abs(len(asynchronous) - len(blocking)) <= 3
    assert not [line for line in blocking if "async def" in line or "await" in line]


def test_every_example_is_tested_and_says_how_to_run_it() -> None:
    files = set(EXAMPLES.glob("*.py"))
    assert files == {EXAMPLES / f"{name}{variant}.py" for name in PRINTED for variant in ("", "_blocking")} | {
        *(EXAMPLES / f"{name}.py" for name in CALLS),
        DEMO,
        UPDATE,
        GPU_UPDATE,
        FLEET,
        *EXAMPLES.glob("weights_*.py"),  # tests/integration/test_weight_servers.py
        ELASTIC,  # tests/integration/launch/test_elastic_training.py
    }
    readme = (ROOT / "README.md").read_text()
    for path in files:
        starts = (
            r"(STORE=\S+ )?(python|uvicorn)"
            if path.name.startswith("weights_")
            else r"asyncdist run --nproc-per-node \d"
        )
        assert re.search(rf"^    {starts} .*\b{path.stem}\b", path.read_text(), re.MULTILINE), path
        assert f"examples/{path.name.replace('_blocking', '')}" in readme


@pytest.mark.slow("workers come and go, each for its time")
def test_workers_come_and_go_and_train_one_model() -> None:
    done = launch(3, FLEET, "--steps", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [re.sub(r"^\[rank \d\] ", "", line) for line in done.stdout.splitlines()]
    worlds = [line.partition(":")[0] for line in printed if "from step" in line]
    assert len(worlds) == len(set(worlds)) > 1  # how many depends on how fast they start
    goes = [re.fullmatch(r"(worker-\d) goes after step (\d+), weights: \[ 3. -2.  1.\]", line) for line in printed]
    ends = {found[1]: int(found[2]) for found in goes if found}
    assert set(ends) == {"worker-0", "worker-1", "worker-2"}
    assert min(ends.values()) >= 60


@pytest.mark.slow("runs an example of five processes")
@pytest.mark.thorough
def test_weights_are_updated_while_servers_answer() -> None:
    done = launch(5, UPDATE, "--updates", "1", "--megabytes", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines() if line.startswith("[rank 0]")]
    outcomes = [
        r"update 1 \(\d+ ms\): 4 servers have version 1",
        r"update 2 \(killed half way\): 4 servers have version 1",
        r"update 3 \(another model\): 4 servers have version 1",
        r"update 4 \(\d+ ms\): 4 servers have version 2",
        r"before: \d+ requests, p50 \S+ ms, p99 \S+ ms, max \S+ ms",
        r"during: \d+ requests, p50 \S+ ms, p99 \S+ ms, max \S+ ms",
    ]
    assert len(printed) == len(outcomes)
    for line, expected in zip(printed, outcomes, strict=True):
        assert re.fullmatch(expected, line)
    assert "[rank 1] update 2 failed, version 1 stays: PeerLostError" in done.stdout
    assert "[rank 1] update 3 failed, version 1 stays: CollectiveMismatchError" in done.stdout


@pytest.mark.slow("runs an example of several processes")
def test_an_update_in_place_is_noticed(tmp_path: Path) -> None:
    """At the latest when the trainer has been killed, with half of the layers overwritten."""
    source = UPDATE.read_text()
    sabotaged = source.replace("for layer in model.next_layers:", "for layer in model.layers:")
    assert sabotaged != source
    script = tmp_path / "in_place.py"
    script.write_text(sabotaged)
    done = launch(3, script, "--updates", "1", "--megabytes", "16")
    assert done.returncode == 1
    assert "an answer made from two versions" in done.stderr


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
        pytest.param(8, 1e-6, 1, "accuracy 0.9.*DIFFERENT", marks=pytest.mark.thorough),
        pytest.param(8, 0, 0, "accuracy 0.9.*bit-identical", marks=pytest.mark.thorough),
    ],
    ids=["learns nothing", "one weight differs", "not sabotaged"],
)
def test_the_demo_fails_where_it_must(tmp_path: Path, epochs: int, drift: float, status: int, printed: str) -> None:
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED.format(folder=str(DEMO.parent), epochs=epochs, drift=drift))
    done = launch(2, script)
    assert done.returncode == status, done.stdout + done.stderr
    assert re.search(printed, done.stdout), done.stdout


@pytest.mark.slow("runs an example of several processes")
@pytest.mark.parametrize("arrays", [pytest.param("numpy", marks=pytest.mark.thorough), "fake"])
def test_weights_from_one_gpu_to_others(arrays: str) -> None:
    done = launch(3, GPU_UPDATE, "--arrays", arrays, "--updates", "3", "--megabytes", "4")
    assert done.returncode == 0, done.stderr
    for version in (1, 2, 3):
        assert f"[rank 0] version {version} sent in" in done.stdout
    for rank in (1, 2):
        assert re.search(rf"\[rank {rank}\] \d+ requests, the last from version 3", done.stdout)
    assert ("path nccl" in done.stdout) == (arrays == "fake")
