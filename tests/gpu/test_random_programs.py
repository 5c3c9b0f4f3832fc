"""Random collectives on GPU arrays, several in flight, of several ranks on one device: every element is looked at."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from gpu_kit import FAKE, on_gpu, run_on_gpu, succeeded

pytestmark = on_gpu

SECONDS = float(os.environ.get("ASYNCDIST_GPU_PROGRAM_S", "3" if FAKE else "10"))
"""How long each program goes on."""

PROGRAM = """
import random

SECONDS, MOST_BYTES, TAGS = {seconds}, {most_bytes}, {tags}
DTYPES = [np.dtype(name) for name in "bool int8 uint8 int32 int64 float16 float32 float64 complex64".split()]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.AVG]
KINDS = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]


def values(count, dtype, *key):
    # Small whole numbers, which every dtype and every order of additions has exactly.
    found = (np.arange(count) * (key[0] % 5 + 1) + 3 * key[1]) % 4 + 1
    return (found % 2 if dtype == np.bool_ else found).astype(dtype)


def reduced(op, arrays):
    functions = {{ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}}
    total = arrays[0]
    for array in arrays[1:]:
        total = functions.get(op, np.add)(total, array)
    return (total / len(arrays)).astype(total.dtype) if op is ReduceOp.AVG else total


class Operation:
    def __init__(self, random, gpu, group, number):
        rank, size = group.rank, group.size
        self.kind, self.dtype, self.op = random.choice(KINDS), random.choice(DTYPES), random.choice(OPS)
        if self.dtype.kind == "c" and self.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            self.op = ReduceOp.SUM
        if self.dtype.kind == "b" and self.op is ReduceOp.AVG:
            self.op = ReduceOp.MAX
        if self.dtype.kind in "iu" and self.op is ReduceOp.AVG:
            self.op = ReduceOp.MIN
        root, tag = random.randrange(size), random.choice(TAGS)
        most = MOST_BYTES // self.dtype.itemsize // size
        count = random.choice([0, 1, random.randrange(100), int(most ** random.random())])
        several = self.kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
        mine = [values(count * size if several else count, self.dtype, number, other) for other in range(size)]
        parts = [array.reshape(size, -1) if several else None for array in mine]
        x = self.result = gpu.array(mine[rank])
        self.number, self.gives = number, True
        if self.kind == "all_reduce":
            self.expected = reduced(self.op, mine)
            self.work = dist.all_reduce(x, self.op, tag=tag)
        elif self.kind == "broadcast":
            self.expected = mine[root]
            self.work = dist.broadcast(x, root, tag=tag)
        elif self.kind == "reduce":
            self.expected = reduced(self.op, mine) if rank == root else mine[rank]
            self.work = dist.reduce(x, root, self.op, tag=tag)
        elif self.kind == "all_gather":
            self.expected = np.concatenate([part[0] for part in parts])
            self.result = gpu.array(np.zeros(count * size, self.dtype))
            self.work = dist.all_gather_into_tensor(self.result, gpu.array(parts[rank][0]), tag=tag)
        elif self.kind == "reduce_scatter":
            self.expected = reduced(self.op, [part[rank] for part in parts])
            self.result = gpu.array(np.zeros(count, self.dtype))
            self.work = dist.reduce_scatter_tensor(self.result, x, self.op, tag=tag)
        elif self.kind == "all_to_all":
            self.expected = np.concatenate([part[rank] for part in parts])
            self.result = gpu.array(np.zeros(count * size, self.dtype))
            self.work = dist.all_to_all_single(self.result, x, tag=tag)
        elif self.kind == "gather":
            blocks = [gpu.array(np.zeros(count, self.dtype)) for _ in range(size)] if rank == root else None
            self.expected = [part[0] for part in parts] if rank == root else []
            self.result = blocks or []
            self.work = dist.gather(gpu.array(parts[rank][0]), blocks, root, tag=tag)
        else:
            self.result = gpu.array(np.zeros(count, self.dtype))
            self.expected = parts[root][rank]
            blocks = [gpu.array(part) for part in parts[root]] if rank == root else None
            self.work = dist.scatter(self.result, blocks, root, tag=tag)

    def check(self):
        found, expected = self.result, self.expected
        if not isinstance(expected, list):
            found, expected = [found], [expected]
        for one, other in zip(found, expected, strict=True):
            got = one.get()
            assert got.dtype == other.dtype and np.array_equal(got, other), (
                f"#{{self.number}} {{self.kind}} {{self.op}} {{self.dtype}} of {{other.size}}: "
                f"{{np.flatnonzero(got != other)[:5]}}"
            )


async def main():
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=60) as group:
            chosen = random.Random({seed})
            number, end_s = 0, time.monotonic() + SECONDS
            flag = np.ones(1)
            while flag[0]:
                operations = []
                for _ in range(chosen.randrange(1, 7)):
                    operations.append(Operation(chosen, gpu, group, number))
                    number += 1
                    if not chosen.randrange(4):
                        await operations[-1].work
                chosen.shuffle(operations)
                for operation in operations:
                    await operation.work
                    operation.check()
                flag[0] = time.monotonic() < end_s
                await dist.broadcast(flag, 0)
            print(f"{{number}} operations", repr(group))
dist.run(main())
"""


@pytest.mark.parametrize("size", [2, 3])
def test_random_collectives(size: int, path_environment: dict[str, str], tmp_path: Path) -> None:
    if size > 2 and path_environment["ASYNCDIST_CUDA_PATH"] == "nccl" and not FAKE:
        pytest.skip("three ranks of NCCL on one device take turns of milliseconds each, for every operation")
    # Communicators of several tags at once are more than NCCL promises on a device that ranks share.
    tags = [0] if path_environment["ASYNCDIST_CUDA_PATH"] == "nccl" else [0, 0, 0, 1, 2]
    code = PROGRAM.format(seconds=SECONDS, most_bytes=(1 << 16) if FAKE else (96 << 20), tags=tags, seed=size)
    ranks = succeeded(run_on_gpu(code, size, tmp_path, path_environment, limit_s=SECONDS + 40))
    said = re.search(r"^(\d+) operations", ranks[0].stdout, re.MULTILINE)  # NCCL says its version there, too
    assert said is not None
    print(said[0])
    assert int(said[1]) >= 10
