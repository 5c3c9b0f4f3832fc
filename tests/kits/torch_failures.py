"""Torch jobs that end badly: python tests/kits/torch_failures.py killed_in_backward --ranks 4 --trials 20

Each trial forks a world from this process, which has imported torch. Of a rank that is killed the others have to say
who it was, soon, and then their processes have to end by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DistributedDataParallel imports: once for all ranks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist.torch

PROMISED_S = 0.5
"""Within which the others have noticed that a rank was killed."""
EXIT_S = 60.0
"""Within which all processes have ended."""


def joined(rank: int, size: int, directory: str) -> None:
    """Join a world."""
    dist.init_process_group(
        "asyncdist", init_method=f"file://{directory}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def killed_in_backward(rank: int, size: int, directory: str, trial: int) -> None:
    """One rank, another in each trial, is killed in the middle of a backward pass."""
    victim = trial % size
    killed = Path(directory) / "killed"
    joined(rank, size, directory)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)

    def kill(gradient: torch.Tensor) -> torch.Tensor:
        if step == 2 and rank == victim:
            killed.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

    model[1].weight.register_hook(kill)
    for step in range(3):  # noqa: B007 - the hook reads it
        try:
            ddp(torch.ones(8, 256)).sum().backward()
        except RuntimeError as error:
            late_s = time.time() - float(killed.read_text())
            said = str(error)
            break
    else:
        raise AssertionError("nobody was missed")
    assert step == 2, said
    assert f"rank {victim}" in said, said
    (Path(directory) / f"noticed {rank}").write_text(json.dumps([late_s, said]))
    if trial % 2:
        dist.destroy_process_group()  # else it is left to the end of the program


def aborted_under_load(rank: int, size: int, directory: str, trial: int) -> None:
    """Rank 0 aborts while operations are under way: they fail everywhere, and a new world can be made."""
    joined(rank, size, directory)
    with contextlib.suppress(RuntimeError):  # at the call, or while it is waited for
        works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(20)]
        if rank == 0:
            dist.distributed_c10d._abort_process_group()
        for work in works:
            work.wait()
        while rank:
            dist.all_reduce(torch.ones(1))
    if rank:
        dist.destroy_process_group()
    joined(rank, size, f"{directory}/again")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def destroyed_under_load(rank: int, size: int, directory: str, trial: int) -> None:
    """Leaving waits for what is under way, in all groups; and then the same ranks meet again."""
    for place in (directory, f"{directory}/again"):
        joined(rank, size, place)
        pair = dist.new_group([0, 1])
        tensors = [torch.ones(1 << 18) for _ in range(10)]
        for number, tensor in enumerate(tensors):
            dist.all_reduce(tensor, async_op=True)
            if rank < 2 and number % 2:
                dist.all_reduce(torch.ones(1), group=pair, async_op=True)
        dist.destroy_process_group()
        assert all(tensor[0] == size for tensor in tensors)


def left_waiting(rank: int, size: int, directory: str, trial: int) -> None:
    """A rank that does not come is named when the time is over; the time-out is the group's."""
    joined(rank, size, directory)
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank != 1:
        said = ""
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            said = str(error)
        assert "Timed out" in said, said
        assert "missing: rank 1" in said, said
    dist.barrier()
    dist.destroy_process_group()


def never_destroyed(rank: int, size: int, directory: str, trial: int) -> None:
    """A program that ends with its groups open, callbacks and all."""
    joined(rank, size, directory)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda ended: ended.value())


PROGRAMS = (killed_in_backward, aborted_under_load, destroyed_under_load, left_waiting, never_destroyed)


def run(program: Callable[..., None], size: int, trial: int) -> dict[str, Any]:
    """One trial: what the ranks noticed. AssertionError where one failed, or did not end."""
    parent = os.getpid()
    directory = tempfile.mkdtemp()  # which a rank that ends must not remove
    try:
        (Path(directory) / "again").mkdir()
        processes = []
        for rank in range(size):
            process = os.fork()
            if not process:
                try:
                    program(rank, size, directory, trial)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                raise SystemExit  # the whole end of a program
            processes.append(process)
        statuses: dict[int, int] = {}
        deadline_s = time.monotonic() + EXIT_S
        while len(statuses) < size and time.monotonic() < deadline_s:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process:
                statuses[processes.index(process)] = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        for rank, process in enumerate(processes):
            if rank not in statuses:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        assert len(statuses) == size, f"trial {trial}: only ranks {sorted(statuses)} ended: {statuses}"
        killed = [rank for rank, status in statuses.items() if status == -signal.SIGKILL]
        assert all(status in (0, -signal.SIGKILL) for status in statuses.values()), f"trial {trial}: {statuses}"
        assert len(killed) == (program is killed_in_backward), f"trial {trial}: {statuses}"
        return {each.name: json.loads(each.read_text()) for each in sorted(Path(directory).glob("noticed *"))}
    finally:
        if os.getpid() == parent:
            shutil.rmtree(directory)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=[program.__name__ for program in PROGRAMS])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--trials", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    program = next(each for each in PROGRAMS if each.__name__ == given.program)
    slowest_s = 0.0
    for trial in range(given.trials):
        noticed = run(program, given.ranks, trial)
        slowest_s = max([slowest_s, *(late_s for late_s, _ in noticed.values())])
        if program is killed_in_backward:
            assert len(noticed) == given.ranks - 1, f"trial {trial}: {noticed}"
    print(f"{given.trials} trials of {given.program}, {given.ranks} ranks: all ended; noticed within {slowest_s:.3f} s")
    return int(slowest_s > PROMISED_S)


if __name__ == "__main__":
    asyncdist.torch.register()
    sys.exit(main())
