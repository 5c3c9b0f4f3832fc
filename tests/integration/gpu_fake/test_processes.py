"""Ranks as processes that share one fake GPU: memory of other processes, and processes that are killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from jobs import finish, run_ranks, start_ranks

PRELUDE = """
from asyncdist.testing import fake_cuda
folder = os.environ["GPU_FOLDER"]
"""

JOB = (
    PRELUDE
    + """
async def main():
    with fake_cuda(1, folder=folder) as cuda:
        async with dist.init_process_group(timeout=60) as group:
            for count in (1, 5000, 200_000):
                x = cuda.runtime.array(np.full(count, group.rank + 1.0))
                await dist.all_reduce(x)
                assert (x.get() == sum(range(1, group.size + 1))).all(), x.get()
            y = cuda.runtime.array(np.full(70_000, group.rank))
            await dist.broadcast(y, 1)
            assert (y.get() == 1).all()
            subgroup = dist.new_group([0, group.size - 1])
            if group.rank in (0, group.size - 1):
                z = cuda.runtime.array(np.full(10, group.rank + 1.0))
                await dist.all_reduce(z, group=subgroup)
                assert (z.get() == 1 + group.size).all()
                await subgroup.close()
            print(repr(group))
        assert not cuda.runtime.failure, cuda.runtime.failure
dist.run(main())
"""
)


@pytest.mark.parametrize(
    ("size", "path"),
    [
        (2, "staged"),
        (4, "ipc"),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((2, "ipc"), (4, "staged"))),
    ],
)
def test_ranks_on_one_gpu(size: int, path: str, tmp_path: Path) -> None:
    environ = {"GPU_FOLDER": str(tmp_path)} | ({"ASYNCDIST_CUDA_PATH": "staged"} if path == "staged" else {})
    for rank in run_ranks(JOB, size, environ):
        assert f"path {path}" in rank.stdout
    assert not list(tmp_path.glob("block-*")), "device memory is left behind"


KILLED = (
    PRELUDE
    + """
async def main():
    with fake_cuda(1, folder=folder) as cuda:
        group = await dist.init_process_group(timeout=60)
        x = cuda.runtime.array(np.ones(3))
        await dist.all_reduce(x)
        x = cuda.runtime.array(np.ones(2_000_000))
        works = [dist.all_reduce(x) for _ in range(3 if group.rank == 1 else 4)]  # the last one needs the victim
        if group.rank == 1:
            for other in (0, 2):
                await dist.recv(np.zeros(1), other)  # what they issue after its death would fail at the call
            os.kill(os.getpid(), signal.SIGKILL)
        await dist.send(np.zeros(1), 1)
        try:
            for work in works:
                await work
        except dist.PeerLostError as error:
            print("lost", error.rank)
        await asyncio.gather(*works, return_exceptions=True)
        await dist.destroy_process_group()
dist.run(main())
"""
)


@pytest.mark.parametrize("path", ["ipc", "staged"])
def test_a_process_is_killed_with_operations_under_way(path: str, tmp_path: Path) -> None:
    environ = {"GPU_FOLDER": str(tmp_path), "ASYNCDIST_CUDA_PATH": path}
    ended = finish(start_ranks(KILLED, 3, environ))
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (ended[0], ended[2]):
        assert rank.returncode == 0, rank.stderr
        assert "lost 1" in rank.stdout, rank.stderr
