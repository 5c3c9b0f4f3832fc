"""save and load: what the ranks of a group say to each other about a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from asyncdist.arrays.device import DeviceArray, any_array
from asyncdist.arrays.host import Array, describe, dtype_named
from asyncdist.checkpoint import files
from asyncdist.checkpoint.files import CheckpointError, Piece
from asyncdist.concurrency.integers import as_int
from asyncdist.gpu.host_copies import HostCopies
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.process_group import ProcessGroup

T = TypeVar("T")

TAG: Final = 0x63_68_6B_70
"""Of the collectives of checkpoints, so that those of the program go on meanwhile."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's rows of an array that is divided over the ranks: `array` are rows `start` on, of `rows` in all."""

    array: Any
    start: int
    rows: int


class Loaded(NamedTuple):
    """What `load` has found: the arrays by name, the `state` given to `save`, and the checkpoint's number."""

    arrays: dict[str, Any]
    state: Any
    number: int


def save(
    arrays: Mapping[str, Any],
    folder: str | Path,
    *,
    state: Any = None,
    number: int | None = None,
    keep: int = 2,
    copy: bool = True,
    group: Group = None,
    tag: int = TAG,
) -> asyncio.Task[int]:
    """Save `arrays` (arrays or `Part`s by name) in `folder`, which all ranks of `group` see.

    Every rank calls it, with the same names. Arrays that are alike on all ranks are written once: a share of the bytes
    by each rank. Of a `Part` each rank writes its own rows. `state` is anything that JSON can hold; the first rank's
    is kept. What a rank writes is copied at the call, so training may go on; with `copy=False` what is on the host is
    not, and must not change until the task is done. The checkpoint has `number`, by default one more than the newest,
    which the task returns; older ones than the newest `keep` are removed.

    Await the task: it is done when the checkpoint is on the disk, whole. Cancelling it ends only the waiting. Raises
    CheckpointError on all ranks, naming the rank that could not write or lists other arrays; the older checkpoints
    stay. At the call: TypeError and ValueError for arrays that are none or, on a GPU, strided; RuntimeError while an
    earlier checkpoint of this folder is being saved.
    """
    found = resolve(group)
    if as_int(keep, "keep must be an int") < 1:
        raise ValueError(f"keep must be at least 1, but is {keep}")
    folder = Path(folder)
    key = (found.world, folder.absolute())
    _check_free(key)
    return _shielded(key, _save(found, folder, _contents(arrays, found, copy=copy), tag, state, number, keep))


async def load(
    folder: str | Path,
    into: Mapping[str, Any] | None = None,
    *,
    number: int | None = None,
    group: Group = None,
    tag: int = TAG,
) -> Loaded | None:
    """Load the newest checkpoint in `folder` (or that of `number`), on every rank of `group`; None if there is none.

    `into` are arrays by name, which are filled, or `Part`s, whose rows are; without it all arrays are made, whole.
    `group` may have another size than the one that saved. Raises CheckpointError on all ranks, naming the rank that
    could not read, found other arrays, or other bytes than were written; what is `into` may be filled in part then.
    RuntimeError while a checkpoint of this folder is being saved. Cancelling leaves the other ranks waiting.
    """
    found = resolve(group)
    folder = Path(folder)
    _check_free((found.world, folder.absolute()))
    answer: list[Any] = [None]
    if found.rank == 0:
        answer = [await _attempt(_find, folder, number)]
    await found.broadcast_object_list(answer, 0, tag=tag)
    chosen = _value_of(answer[0], "rank 0 of the group")
    if chosen is None:
        return None
    chosen, index = chosen
    outcomes: list[Any] = [None] * found.size
    arrays: dict[str, Any] = {}
    mine = await _attempt(_read, files.place_of(folder, chosen), index, into, arrays)
    await found.all_gather_object(outcomes, mine, tag=tag)
    for rank, outcome in enumerate(outcomes):
        _value_of(outcome, f"rank {rank} of the group")
    return Loaded(arrays, index["state"], chosen)


class _Contents(NamedTuple):
    """What a rank writes, and what all arrays are."""

    arrays: dict[str, tuple[str, list[int]]]
    """dtype and shape of each, whole."""
    pieces: list[tuple[str, int, memoryview]]


def _contents(arrays: Mapping[str, Any], group: ProcessGroup, *, copy: bool) -> _Contents:
    described: dict[str, tuple[str, list[int]]] = {}
    pieces: list[tuple[str, int, memoryview]] = []
    alike: list[tuple[str, Array]] = []
    parts: list[tuple[str, int, Any, int, int]] = []  # and which of its bytes
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"names of arrays must be strings, not {name!r}")
        array = any_array(value.array if isinstance(value, Part) else value, repr(name))
        shape = list(array.shape)
        if isinstance(value, Part):
            start, rows = _checked_part(value, array, name)
            shape[0] = rows
            parts.append((name, start * _row_bytes(array), array, 0, array.nbytes))
        else:
            alike.append((name, array))
        described[name] = (str(array.dtype), shape)
    total = sum(array.nbytes for _, array in alike)
    first, last = total * group.rank // group.size, total * (group.rank + 1) // group.size
    begun = 0
    for name, array in alike:
        start, stop = max(first - begun, 0), min(last - begun, array.nbytes)
        if start < stop:
            parts.append((name, start, array, start, stop))
        begun += array.nbytes
    with HostCopies() as copies:
        for name, place, array, start, stop in parts:
            if type(array) is DeviceArray:
                octets = copies.to_host(array, repr(name), start, stop).data
            else:
                octets = _octets(array)[start:stop]
            pieces.append((name, place, memoryview(bytes(octets)) if copy and type(array) is np.ndarray else octets))
    return _Contents(described, pieces)


async def _save(
    group: ProcessGroup, folder: Path, contents: _Contents, tag: int, state: Any, number: int | None, keep: int
) -> int:
    begun: list[Any] = [None]
    reports: list[Any] | None = None
    if group.rank == 0:
        reports = [None] * group.size
        begun = [await _attempt(_begin, folder, number)]
    await group.broadcast_object_list(begun, 0, tag=tag)
    number, unfinished = _value_of(begun[0], "rank 0 of the group")
    path = Path(unfinished) / f"rank-{group.rank}.bin"
    report = [await _attempt(_write, path, contents.pieces), contents.arrays]
    await group.gather_object(report, reports, 0, tag=tag)
    ended: list[Any] = [None]
    if reports is not None:
        ended = [await _attempt(_end, reports, Path(unfinished), folder, number, state, keep)]
    await group.broadcast_object_list(ended, 0, tag=tag)
    _value_of(ended[0], "")
    return int(number)


def _begin(folder: Path, number: int | None) -> tuple[int, str]:
    if number is None:
        number = max(files.checkpoints_in(folder), default=-1) + 1
    return number, str(files.begin(folder, number))


def _end(reports: list[Any], unfinished: Path, folder: Path, number: int, state: Any, keep: int) -> None:
    """On the first rank: all have written, or could not."""
    try:
        all_arrays = reports[0][1]
        pieces: list[Piece] = []
        for rank, (written, arrays) in enumerate(reports):
            pieces += [Piece(*piece) for piece in _value_of(written, f"rank {rank} of the group")]
            if arrays != all_arrays:
                raise CheckpointError(f"rank {rank} of the group saves other arrays than its rank 0: {arrays}")
        for name, (dtype, shape) in all_arrays.items():
            _check_covered(name, dtype, shape, [piece for piece in pieces if piece.name == name])
        files.commit(unfinished, folder, number, {"state": state, "arrays": all_arrays, "pieces": pieces})
    except BaseException:
        files.discard(unfinished)
        raise
    files.remove_old(folder, keep)


def _write(path: Path, pieces: list[tuple[str, int, memoryview]]) -> list[Any]:
    return [tuple(piece) for piece in files.write_pieces(path, pieces)]  # as objects can be sent


def _find(folder: Path, number: int | None) -> Any:
    numbers = files.checkpoints_in(folder)
    if number is None and not numbers:
        return None
    chosen = numbers[-1] if number is None else number
    if chosen not in numbers:
        raise CheckpointError(f"{folder} has no checkpoint {chosen}, but {numbers}")
    index = files.read_index(folder, chosen)
    return chosen, index | {"pieces": [tuple(piece) for piece in index["pieces"]]}


def _read(place: Path, index: dict[str, Any], into: Mapping[str, Any] | None, arrays: dict[str, Any]) -> None:
    saved: dict[str, tuple[str, list[int]]] = index["arrays"]
    if into is not None and into.keys() != saved.keys():
        raise CheckpointError(f"{place} holds {sorted(saved)}, and what is to be filled is {sorted(into)}")
    with HostCopies() as copies:
        for name, (dtype_name, shape) in saved.items():
            dtype = dtype_named(dtype_name)
            if dtype is None:
                raise CheckpointError(f"{place}: {name!r} is {dtype_name}, which needs ml_dtypes here")
            value = arrays[name] = np.empty(shape, dtype) if into is None else into[name]
            start, array = 0, any_array(value.array if isinstance(value, Part) else value, repr(name))
            given = list(array.shape)
            if isinstance(value, Part):
                start, given[0] = _checked_part(value, array, name)
            if array.dtype != dtype or given != list(shape):
                raise CheckpointError(
                    f"{place}: {name!r} is {describe(dtype, tuple(shape))}, and what is to be filled is "
                    f"{describe(array.dtype, tuple(given))}"
                )
            pieces = [Piece(*piece) for piece in index["pieces"] if piece[0] == name]
            in_place = type(array) is np.ndarray and array.flags.c_contiguous
            room = array if in_place else np.empty(array.shape, array.dtype)
            files.read_range(place, pieces, start * _row_bytes(array), _octets(room))
            if type(array) is DeviceArray:
                copies.to_device(array, repr(name), np.frombuffer(_octets(room), np.uint8))
            elif not in_place:
                array[...] = room


def _checked_part(part: Part, array: Array, name: str) -> tuple[int, int]:
    start, rows = as_int(part.start, "start must be an int"), as_int(part.rows, "rows must be an int")
    if not array.ndim or not 0 <= start <= start + len(array) <= rows:
        raise ValueError(f"{name!r}: {array.shape} from row {start} on is no part of an array of {rows} rows")
    return start, rows


def _check_covered(name: str, dtype: str, shape: list[int], pieces: list[Piece]) -> None:
    """Raise CheckpointError unless every byte of the array is in one piece."""
    known = dtype_named(dtype)
    assert known is not None
    nbytes = int(np.prod(shape, dtype=np.int64)) * known.itemsize
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.nbytes)):
        if piece.start != end:
            what = "are in no rank's part" if piece.start > end else "are in the parts of two ranks"
            row = max(nbytes // max(shape[0], 1), 1)
            low, high = sorted((end, piece.start))
            raise CheckpointError(f"rows {low // row} to {high // row} of {name!r} {what}")
        end += piece.nbytes
    if end != nbytes:
        raise CheckpointError(f"the last {nbytes - end} bytes of {name!r} are in no rank's part")


def _row_bytes(array: Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize


def _octets(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# An outcome travels as [value] or as the text of what went wrong.


async def _attempt(function: Any, *arguments: Any) -> list[Any] | str:
    """What `function` returns, called in a thread, or what went wrong."""
    try:
        return [await asyncio.to_thread(function, *arguments)]
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _value_of(outcome: list[Any] | str, who: str) -> Any:
    if isinstance(outcome, str):
        raise CheckpointError(f"{who}: {outcome}" if who else outcome)
    return outcome[0]


_saving: dict[Any, asyncio.Task[Any]] = {}


def _check_free(key: Any) -> None:
    if key in _saving:
        raise RuntimeError(f"a checkpoint in {key[-1]} is being saved: await the task of that save() first")


def _shielded(key: Any, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that may be cancelled while `work` goes on."""
    task = _saving[key] = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda _task: _saving.pop(key))

    async def waiting() -> T:
        return await asyncio.shield(task)

    return asyncio.get_running_loop().create_task(waiting())
