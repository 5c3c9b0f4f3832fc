"""Ranks that die or do not come while operations are under way on the device: an error with a name, soon; no hang."""

from __future__ import annotations

import signal
from pathlib import Path

from gpu_kit import on_gpu, run_on_gpu, succeeded

pytestmark = on_gpu

KILLED = """
async def main():
    with open_gpu() as gpu:
        group = await dist.init_process_group(timeout=30)
        x = gpu.full(4 << 20, 1)
        await dist.all_reduce(x)
        await dist.barrier()
        if group.rank == 1:
            dist.all_reduce(x)
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        works = [dist.all_reduce(x) for _ in range(4)]
        start = time.monotonic()
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert any(isinstance(outcome, dist.PeerLostError) and outcome.rank == 1 for outcome in outcomes), outcomes
        assert time.monotonic() - start < 15
        try:
            await dist.all_reduce(x)
        except dist.GroupAbortedError:
            print("aborted")
        try:
            await dist.destroy_process_group()
        except dist.DistError:
            pass
dist.run(main())
"""

LATE = """
async def main():
    with open_gpu() as gpu:
        group = await dist.init_process_group(timeout=30)
        x = gpu.full(1 << 20, 1)
        await dist.all_reduce(x)
        await dist.barrier()
        start = time.monotonic()
        try:
            if group.rank == 0:
                await dist.all_reduce(x, timeout=2)
            else:
                await asyncio.sleep(4)
                await dist.all_reduce(x)
        except dist.CollectiveTimeoutError as error:
            print("timed out", error.missing, round(time.monotonic() - start, 1))
        except dist.GroupAbortedError as error:
            print("aborted", error.reason)
        else:
            raise AssertionError("it did not fail")
        assert time.monotonic() - start < 20
        try:
            await dist.destroy_process_group()
        except dist.DistError:
            pass
dist.run(main())
"""

MIXED = """
async def main():
    with open_gpu() as gpu:
        group = await dist.init_process_group(timeout=30)
        await dist.all_reduce(gpu.full(10, 1))
        array = gpu.full(10, 1) if group.rank else np.ones(10, np.float32)
        start = time.monotonic()
        try:
            await dist.all_reduce(array)
        except dist.CollectiveMismatchError as error:
            print("mismatch", error)
        else:
            raise AssertionError("it did not fail")
        assert time.monotonic() - start < 15
        try:
            await dist.destroy_process_group()
        except dist.DistError:
            pass
dist.run(main())
"""


def test_a_killed_rank_is_named(path_environment: dict[str, str], tmp_path: Path) -> None:
    survivor, killed = run_on_gpu(KILLED, 2, tmp_path, path_environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert survivor.returncode == 0, survivor.stderr
    assert "aborted" in survivor.stdout


def test_a_late_rank_is_a_time_out(path_environment: dict[str, str], tmp_path: Path) -> None:
    first, second = succeeded(run_on_gpu(LATE, 2, tmp_path, path_environment))
    assert "timed out" in first.stdout
    assert "timed out" in second.stdout or "aborted" in second.stdout


def test_host_array_here_device_array_there(path_environment: dict[str, str], tmp_path: Path) -> None:
    for rank in succeeded(run_on_gpu(MIXED, 2, tmp_path, path_environment)):
        assert "mismatch" in rank.stdout
