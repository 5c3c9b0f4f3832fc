"""The fake GPU's memory: what is freed is noticed when it is used, as long as it is remembered."""

from __future__ import annotations

import pytest

from asyncdist.errors import DistBackendError
from asyncdist.testing import fake_memory
from asyncdist.testing.fake_memory import POISON, MemoryMap


def kept(memory: MemoryMap, pointers: list[int]) -> int:
    """How many of these freed blocks are still known."""
    count = 0
    for pointer in pointers:
        try:
            memory.view(pointer, 1)
        except DistBackendError:
            count += 1
    return count


@pytest.mark.parametrize(("blocks", "remembered"), [(8, 8), (9, 8)])
def test_so_many_freed_blocks_are_remembered(blocks: int, remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_memory, "FREED_BLOCKS", 8)
    memory = MemoryMap(None)
    made = [memory.allocate(100, 0) for _ in range(blocks)]
    for block in made:
        memory.free(block)
    assert kept(memory, [block.pointer for block in made]) == remembered


@pytest.mark.parametrize(("nbytes", "remembered"), [(1000, 4), (1001, 3)])
def test_and_so_many_bytes(nbytes: int, remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_memory, "FREED_BYTES", 4000)
    memory = MemoryMap(None)
    made = [memory.allocate(nbytes, 0) for _ in range(4)]
    for block in made:
        memory.free(block)
    assert kept(memory, [block.pointer for block in made]) == remembered


def test_the_last_freed_block_is_remembered_however_large() -> None:
    memory = MemoryMap(None)
    block = memory.allocate(fake_memory.FREED_BYTES + 1, 0)
    block.octets[:] = 1
    memory.free(block)
    with pytest.raises(DistBackendError, match="was freed"):
        memory.view(block.pointer, 1)
    assert block.octets[0] == POISON == block.octets[fake_memory.POISON_BYTES - 1]
    assert block.octets[fake_memory.POISON_BYTES] == 1
