"""Backend "asyncdist" of torch.distributed: collectives, messages, Works, groups and training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch_later import Later
from torch_world import TorchWorld

torch = Later("torch")

pytestmark = pytest.mark.peers

COLLECTIVES = (
    "reduces_every_dtype",
    "moves_what_cannot_be_reduced",
    "reduces_by_every_operation",
    "leaves_neighbors_of_views_alone",
    "leaves_what_reduce_did_not_ask_for",
    "reduces_a_parameter",
    "adds_sparse_tensors_up",
    "gathers",
    "scatters",
    "exchanges_with_all",
    "gathers_several_lists",
    "waits_once_for_several",
    "gathers_objects",
)
MESSAGES = ("matches_tags", "receives_from_anybody", "passes_round_in_a_batch", "gives_up_a_receive_in_its_time")
WORKS = (
    "calls_back",
    "waits_within_a_callback",
    "waits_in_coroutines",
    "waits_for_works_of_gloo",
    "counts_and_names_operations",
    "takes_the_short_forms",
    "works_from_several_threads",
)
GROUPS = (
    "makes_groups",
    "splits_a_group",
    "asks_about_groups",
    "names_a_backend_for_other_devices",
    "moves_meshes",
    "takes_functional_collectives",
    "differentiates_through_collectives",
)
TRAINING = (
    "trains_as_one",
    "trains_with_buffers",
    "skips_synchronization",
    "trains_what_is_not_always_used",
    "trains_sparse_gradients",
    "trains_on_uneven_inputs",
    "divides_an_optimizer",
    "averages_models",
    "shards_a_model",
    "shards_and_replicates_a_model",
    "shards_with_mixed_precision",
    "redistributes",
    "divides_layers",
    "pipelines",
)
MISTAKES = ("refuses_what_is_wrong", "fails_a_future")
HOOKS = ("allreduce_hook", "fp16_compress_hook", "powerSGD")
"""Without a GPU torch refuses bf16_compress_hook."""


@pytest.fixture(scope="module")
def world() -> Iterator[TorchWorld]:
    """Four ranks for all cases, which are one after the other."""
    ranks = TorchWorld(4)
    yield ranks
    ranks.close()


@pytest.mark.slow("the first case starts four ranks that import torch")
@pytest.mark.parametrize("case", [*COLLECTIVES, *MESSAGES, *WORKS, *GROUPS, *TRAINING, *MISTAKES])
def test_case(world: TorchWorld, case: str) -> None:
    world.run(case)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_distributed_data_parallel(world: TorchWorld, hook: str) -> None:
    world.run("trains_with_hook", hook)


@pytest.mark.slow("files, and a thread that waits for other ranks")
@pytest.mark.parametrize("case", ["saves_and_loads", "saves_in_the_background"])
def test_distributed_checkpoints(world: TorchWorld, case: str, tmp_path: Path) -> None:
    world.run(case, str(tmp_path))
