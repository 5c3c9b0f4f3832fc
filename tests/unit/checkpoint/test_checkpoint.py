"""Checkpoints: saved by some ranks, loaded by any number, whole or not at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, run_gpu
from group_kit import Group

from asyncdist import checkpoint
from asyncdist.checkpoint import CheckpointError, Part, files
from asyncdist.gpu import host_copies
from asyncdist.testing import run_world

ROWS = 7


def run(size: int, main: Any) -> list[Any]:
    return run_world(size, main, loop_factory=asyncio.new_event_loop)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 24)


def arrays_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weights": rng.standard_normal((5, 3)).astype(np.float32),
        "scalar": np.array(rng.random()),
        "empty": np.empty((0, 4), np.int16),
        "turned": np.asfortranarray(rng.integers(0, 100, (4, 6))),
        "flags": rng.random(9) > 0.5,
    }


def table_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1000).standard_normal((ROWS, 2, 3))


def part(table: np.ndarray, group: Group) -> Part:
    """This rank's rows of `table`, as a copy."""
    start, stop = (len(table) * rank // group.size for rank in (group.rank, group.rank + 1))
    return Part(table[start:stop].copy(), start, len(table))


def save_by(size: int, folder: Path, seed: int, **options: Any) -> list[Any]:
    async def main(group: Group) -> int:
        saving = checkpoint.save(
            arrays := {**arrays_of(seed), "table": part(table_of(seed), group)}, folder, state=[seed], **options
        )
        for array in arrays.values():
            (array.array if isinstance(array, Part) else array)[...] = 1  # what is saved is what was given
        return await saving

    return run(size, main)


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_any_number_of_ranks_reads_what_others_wrote(writers: int, readers: int, tmp_path: Path) -> None:
    assert save_by(writers, tmp_path / "new", 3) == [0] * writers

    async def main(group: Group) -> None:
        found = await checkpoint.load(tmp_path / "new")
        assert found.state == [3]
        assert found.number == 0
        expected = {**arrays_of(3), "table": table_of(3)}
        assert found.arrays.keys() == expected.keys()
        for name, array in expected.items():
            assert found.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(found.arrays[name], array)
        into = {name: np.zeros_like(array) for name, array in arrays_of(0).items()}
        rows = part(np.zeros_like(table_of(0)), group)
        found = await checkpoint.load(tmp_path / "new", {**into, "table": rows})
        assert found.arrays["weights"] is into["weights"]
        for name, array in arrays_of(3).items():
            np.testing.assert_array_equal(into[name], array)
        np.testing.assert_array_equal(rows.array, table_of(3)[rows.start : rows.start + len(rows.array)])

    run(readers, main)


def test_each_byte_of_what_is_alike_is_written_once(tmp_path: Path) -> None:
    save_by(4, tmp_path, 3)
    place = files.place_of(tmp_path, 0)
    sizes = [(place / f"rank-{rank}.bin").stat().st_size for rank in range(4)]
    assert sum(sizes) == sum(array.nbytes for array in [*arrays_of(3).values(), table_of(3)])
    assert max(sizes) - min(sizes) <= table_of(3)[0].nbytes + 1


def test_the_newest_are_kept(tmp_path: Path) -> None:
    def load(number: int | None) -> Any:
        async def main(group: Group) -> Any:
            return (await checkpoint.load(tmp_path, number=number)).state

        return run(1, main)[0]

    assert [save_by(2, tmp_path, seed, keep=2)[0] for seed in range(4)] == [0, 1, 2, 3]
    assert save_by(2, tmp_path, 9, keep=2, number=20) == [20, 20]
    assert files.checkpoints_in(tmp_path) == [3, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-00000003", "saved-00000020"]
    assert [load(number) for number in (None, 3, 20)] == [[9], [3], [9]]
    with pytest.raises(CheckpointError, match=r"has no checkpoint 1, but \[3, 20\]"):
        load(1)
    with pytest.raises(CheckpointError, match="is there already"):
        save_by(1, tmp_path, 1, number=20)


def test_nothing_saved(tmp_path: Path) -> None:
    async def main(group: Group) -> None:
        assert await checkpoint.load(tmp_path / "none") is None

    run(2, main)


def test_what_killed_writers_left_is_nothing_and_goes(tmp_path: Path) -> None:
    save_by(2, tmp_path, 1)
    left = files.begin(tmp_path, 1)
    (left / "rank-0.bin").write_bytes(b"x")
    save_by(2, tmp_path, 2)
    assert files.checkpoints_in(tmp_path) == [0, 1]
    assert not left.exists()


@pytest.mark.parametrize("reader", [0, 1])
def test_damage_is_named(reader: int, tmp_path: Path) -> None:
    save_by(2, tmp_path, 1)
    path = files.place_of(tmp_path, 0) / f"rank-{reader}.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    async def main(group: Group) -> None:
        with pytest.raises(
            CheckpointError, match=rf"rank 0 of the group: .*rank-{reader}.bin is damaged: bytes \d+ to"
        ):
            await checkpoint.load(tmp_path)

    run(2, main)
    path.write_bytes(data[:-1])
    run(2, main)


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    save_by(2, tmp_path, 1)
    expected = [
        ({}, "holds .*, and what is to be filled is"),
        ({"weights": np.zeros((5, 4), np.float32)}, r"'weights' is float32\[5, 3\].* filled is float32\[5, 4\]"),
        ({"weights": np.zeros((5, 3))}, r"'weights' is float32.* filled is float64"),
        ({"table": Part(np.zeros((2, 2, 3)), 6, ROWS)}, "is no part of an array of 7 rows"),
        ({"table": Part(np.zeros((2, 2, 3)), 1, 9)}, r"'table' is float64\[7, 2, 3\], and .*\[9, 2, 3\]"),
    ]

    async def main(group: Group) -> None:
        for changed, said in expected:
            into = {**arrays_of(0), "table": table_of(0), **changed} if changed else {"x": np.zeros(1)}
            with pytest.raises(CheckpointError, match=said):
                await checkpoint.load(tmp_path, into)

    run(2, main)


def test_ranks_that_do_not_agree_save_nothing(tmp_path: Path) -> None:
    async def main(group: Group) -> None:
        with pytest.raises(CheckpointError, match="rank 1 of the group saves other arrays than its rank 0"):
            await checkpoint.save({f"x{group.rank}": np.zeros(3)}, tmp_path)
        for start, said in [
            (2, "rows 3 to 5 of 'x' are in no rank's part"),
            (-2, "rows 1 to 3 of 'x' are in the parts"),
        ]:
            rows = Part(np.zeros((3, 2)), (3 + start) * group.rank, 10)
            with pytest.raises(CheckpointError, match=said):
                await checkpoint.save({"x": rows}, tmp_path)
        with pytest.raises(CheckpointError, match="the last 64 bytes of 'x' are in no rank's part"):
            await checkpoint.save({"x": Part(np.zeros((3, 2)), 3 * group.rank, 10)}, tmp_path)
        with pytest.raises(CheckpointError, match="TypeError: Object of type set is not JSON serializable"):
            await checkpoint.save({"x": np.zeros(3)}, tmp_path, state={1})
        await checkpoint.save({"x": np.zeros(3)}, tmp_path)

    run(2, main)
    assert files.checkpoints_in(tmp_path) == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["saved-00000000"]


def test_a_rank_that_cannot_write_is_named_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_by(2, tmp_path, 1)
    write = files.write_pieces

    def full(path: Path, pieces: Any) -> Any:
        if path.name == "rank-1.bin":
            raise OSError(28, "No space left on device", str(path))
        return write(path, pieces)

    monkeypatch.setattr(files, "write_pieces", full)

    async def main(group: Group) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1 of the group: OSError: \[Errno 28\] No space left"):
            await checkpoint.save(arrays_of(2), tmp_path)

    run(3, main)
    assert [path.name for path in tmp_path.iterdir()] == ["saved-00000000"]


async def load_when_saved(folder: Path) -> Any:
    for _ in range(1000):
        try:
            return await checkpoint.load(folder)
        except RuntimeError:
            await asyncio.sleep(0.01)
    raise AssertionError("it is being saved for ever")


def test_cancelling_ends_only_the_waiting(tmp_path: Path) -> None:
    async def main(group: Group) -> None:
        saving = checkpoint.save(arrays_of(1), tmp_path)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="is being saved"):
            checkpoint.save(arrays_of(1), tmp_path)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        with pytest.raises(RuntimeError, match="is being saved"):
            await checkpoint.load(tmp_path)
        assert (await load_when_saved(tmp_path)).number == 0
        assert await checkpoint.save(arrays_of(2), tmp_path) == 1

    run(2, main)


def test_an_index_of_another_version(tmp_path: Path) -> None:
    save_by(1, tmp_path, 1)
    index = files.place_of(tmp_path, 0) / "index.json"
    said = json.loads(index.read_text())
    for text, expected in [
        (json.dumps({**said, "version": 9}), "has version 9, and this asyncdist reads version 1"),
        ("{", "is no index of a checkpoint"),
        ("{}", "is no index of a checkpoint"),
    ]:
        index.write_text(text)

        async def main(group: Group, expected: str = expected) -> None:
            with pytest.raises(CheckpointError, match=expected):
                await checkpoint.load(tmp_path)

        run(1, main)


def test_what_is_refused_at_the_call(tmp_path: Path) -> None:
    async def main(group: Group) -> None:
        for arrays, kind, said in [
            ({1: np.zeros(1)}, TypeError, "names of arrays must be strings"),
            ({"x": "y"}, TypeError, "'x' must be a numpy array"),
            ({"x": Part(np.zeros(1), 1, 1)}, ValueError, "is no part of an array of 1 rows"),
            ({"x": Part(np.zeros(()), 0, 1)}, ValueError, "is no part"),
        ]:
            with pytest.raises(kind, match=said):
                checkpoint.save(arrays, tmp_path)
        with pytest.raises(ValueError, match="keep must be at least 1"):
            checkpoint.save({}, tmp_path, keep=0)

    run(1, main)


@pytest.mark.parametrize("pinned_bytes", [10, 1 << 20])
def test_arrays_of_gpus_are_saved_as_they_are_at_the_call_and_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned_bytes: int
) -> None:
    monkeypatch.setattr(host_copies, "PINNED_BYTES", pinned_bytes)
    expected, table = np.arange(15, dtype=np.float32).reshape(5, 3), table_of(1)

    async def save(rank: GpuRank) -> None:
        own = part(table, rank.group)
        arrays = {"weights": rank.zeros((5, 3)), "table": Part(rank.array(own.array), own.start, own.rows)}
        with rank.cuda.runtime.use(rank.stream()):
            arrays["weights"].set(expected)  # queued, and not waited for
            saving = checkpoint.save(arrays, tmp_path, group=rank.group)
            arrays["weights"].set(0)
        await saving

    async def load(rank: GpuRank) -> None:
        rows = slice(1, 4)
        into = {"weights": rank.zeros((5, 3)), "table": Part(rank.array(np.zeros_like(table[rows])), 1, ROWS)}
        found = await checkpoint.load(tmp_path, into, group=rank.group)
        assert found is not None
        assert found.arrays["weights"] is into["weights"]
        assert (into["weights"].get() == expected).all()
        assert (into["table"].array.get() == table[rows]).all()

    run_gpu(2, save)
    run_gpu(3, load)


def test_strided_arrays_of_gpus_are_refused_at_the_call(tmp_path: Path) -> None:
    async def main(rank: GpuRank) -> None:
        with pytest.raises(ValueError, match="'weights' is not C-contiguous"):
            checkpoint.save({"weights": rank.zeros((4, 4))[:, :2]}, tmp_path, group=rank.group)

    run_gpu(1, main)
