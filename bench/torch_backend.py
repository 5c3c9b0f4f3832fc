"""torch.distributed on the CPU: backend "asyncdist" beside gloo, in the same processes, their samples in turns.

    python -m bench.torch_backend --ranks 2,4

| row | is |
| --- | --- |
| all_reduce | a float32 tensor for each backend, `dist.all_reduce(tensor)`, short ones several at a stretch (as OSU) |
| awaited | the same by `await asyncdist.all_reduce(array)`, in a world of its own: what the way through torch adds |
| objects | `broadcast_object_list` and `all_gather_object` of 1 KiB, as inference engines use on CPU groups |
| DDP | a step of a model of 25 M parameters, less the same step within `no_sync()` |
| gradients in buckets | the same with `gradient_as_bucket_view=True`: else torch copies them to its buckets and back |

A sample is the time of the slowest rank after a barrier. Ranks leave that some 100 us apart, which operations at a
stretch share. `alone` is one of 4 B after such a barrier, with what its ranks have to wait for each other.

Every rank is a process of its own with one torch thread, and gloo uses the interface ``lo``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import asyncdist as aio
from bench.command_line import ListOf
from bench.model import format_bytes

BACKENDS = ("gloo", "asyncdist")
SIZES = (4, 64 << 10, 1 << 20, 64 << 20)
OBJECT_BYTES = 1 << 10
LAYERS, WIDTH = 6, 2041
"""25 M parameters: six layers of 2041 x 2041 and their biases."""


STRETCH = {4: 50, 64 << 10: 20, 1 << 20: 5}
"""How many operations of a size are timed together; of others, one."""


def samples_for(nbytes: int, scale: float) -> int:
    """How many samples of an operation of that size."""
    return max(5, int(scale * (200 if nbytes <= 1 << 20 else 20)))


class Rank:
    """One process: a group of each backend, and what is measured on both of them."""

    def __init__(self, directory: str, scale: float) -> None:
        self.torch = importlib.import_module("torch")
        self.dist = importlib.import_module("torch.distributed")
        importlib.import_module("asyncdist.torch")
        self.torch.set_num_threads(1)
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.dist.init_process_group("gloo", init_method=f"file://{directory}/gloo{size}", rank=rank, world_size=size)
        self.scale = scale
        self.groups = {backend: self.dist.new_group(backend=backend) for backend in BACKENDS}

    def slowest(self, seconds: float) -> float:
        """The time of the rank that took longest."""
        took = self.torch.tensor([seconds], dtype=self.torch.float64)
        self.dist.all_reduce(took, self.dist.ReduceOp.MAX)
        return float(took[0])

    def sample(self, start: Callable[[], object]) -> float:
        """Seconds that `start` takes on the slowest rank."""
        self.dist.barrier()
        began = time.perf_counter()
        start()
        return self.slowest(time.perf_counter() - began)

    def in_turns(self, starts: Mapping[str, Callable[[], object]], samples: int) -> dict[str, float]:
        """The median of each of `starts`, in turns, after as many as a tenth for warming up."""
        took: dict[str, list[float]] = {name: [] for name in starts}
        for number in range(samples + samples // 10):
            for name, start in starts.items():
                seconds = self.sample(start)
                if number >= samples // 10:
                    took[name].append(seconds)
        return {name: statistics.median(each) for name, each in took.items()}

    def all_reduce(self, tensor: Any, group: Any, count: int) -> None:
        """`count` operations, one after the other."""
        for _ in range(count):
            self.dist.all_reduce(tensor, group=group)

    def rows(self) -> Iterator[tuple[str, dict[str, float]]]:
        """What is measured, by name and backend."""
        size = self.dist.get_world_size()
        for nbytes in SIZES:
            count = STRETCH.get(nbytes, 1)
            starts = {
                name: partial(self.all_reduce, self.torch.zeros(nbytes // 4), group, count)
                for name, group in self.groups.items()
            }
            took = self.in_turns(starts, samples_for(nbytes, self.scale))
            yield f"all_reduce {format_bytes(nbytes)}", {name: seconds / count for name, seconds in took.items()}
        tensor = self.torch.zeros(1)
        starts = {name: partial(self.all_reduce, tensor, group, 1) for name, group in self.groups.items()}
        yield "all_reduce 4 B, alone", self.in_turns(starts, samples_for(4, self.scale))
        value = b"x" * OBJECT_BYTES

        def broadcast(group: Any) -> None:
            self.dist.broadcast_object_list([value], 0, group=group)

        def gather(group: Any) -> None:
            self.dist.all_gather_object([None] * size, value, group=group)

        for title, run in (("broadcast_object_list", broadcast), ("all_gather_object", gather)):
            starts = {name: partial(run, group) for name, group in self.groups.items()}
            yield f"{title} {format_bytes(OBJECT_BYTES)}", self.in_turns(starts, samples_for(OBJECT_BYTES, self.scale))
        for title, views in (
            ("DDP, communication of 25 M parameters", False),
            ("the same, gradients in buckets", True),
        ):
            yield title, self.steps(views=views)

    def steps(self, *, views: bool) -> dict[str, float]:
        """A step of each backend, less the same step without communication; checks that the weights are the same.

        With `views` gradients are views of DDP's buckets, and torch copies them neither there nor back.
        """
        torch = self.torch
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.dist.get_rank()))
        models: dict[str, Any] = {}
        starts: dict[str, Callable[[], object]] = {}

        def step(ddp: Any) -> None:
            ddp.zero_grad()
            ddp(inputs).square().mean().backward()

        def alone(ddp: Any) -> None:
            with ddp.no_sync():
                step(ddp)

        for name, group in self.groups.items():
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
            models[name] = ddp = torch.nn.parallel.DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=views
            )
            starts[name], starts[f"{name} alone"] = partial(step, ddp), partial(alone, ddp)
        took = self.in_turns(starts, samples_for(64 << 20, self.scale))
        for start in (starts[name] for name in BACKENDS):
            start()
        for ours, theirs in zip(*(models[name].parameters() for name in BACKENDS), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        return {name: took[name] - took[f"{name} alone"] for name in BACKENDS}

    async def awaited(self) -> float:
        """Seconds of an awaited all_reduce of 4 B."""
        took, count = [], STRETCH[4]
        async with aio.init_process_group() as group:
            array = self.torch.zeros(1).numpy()
            for _ in range(samples_for(4, self.scale)):
                await group.barrier()
                began = time.perf_counter()
                for _ in range(count):
                    await group.all_reduce(array)
                took.append((time.perf_counter() - began) / count)
        return self.slowest(statistics.median(took))


def run_rank(_local_rank: int, directory: str, scale: float) -> list[tuple[str, dict[str, float]]]:
    """One rank: all rows."""
    rank = Rank(directory, scale)
    found = list(rank.rows())
    found.insert(1, ("the same, awaited", {"asyncdist": asyncio.run(rank.awaited())}))
    rank.dist.destroy_process_group()
    return found


def microseconds(seconds: float | None) -> str:
    """For the table."""
    return "" if seconds is None else f"{seconds * 1e6:,.0f}"


@click.command()
@click.option("--ranks", type=ListOf(click.INT), default="2,4", show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="samples, as a multiple of the usual number")
def command(ranks: tuple[int, ...], scale: float) -> None:
    """Measure, and print a table for each number of ranks."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    for size in ranks:
        with tempfile.TemporaryDirectory() as directory:
            rows = aio.spawn(run_rank, (directory, scale), nprocs=size)[0]
        table = Table(title=f"{size} ranks, one host: median of the slowest rank, us")
        for title in ("", *BACKENDS, "gloo / asyncdist"):
            table.add_column(title, justify="left" if not title else "right")
        for title, took in rows:
            ratio = f"{took['gloo'] / took['asyncdist']:.1f}x" if "gloo" in took else ""
            table.add_row(title, *(microseconds(took.get(name)) for name in BACKENDS), ratio)
        Console(file=sys.stdout, width=100).print(table)


if __name__ == "__main__":
    command()
