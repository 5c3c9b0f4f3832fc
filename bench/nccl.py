"""``python -m bench.nccl``: GPU arrays, beside cupy's bare call, torch.distributed and cupyx on the same device.

One rank shows what awaiting costs; two ranks on one device compare the paths. NCCL with several devices is
`bench.all_reduce`'s business once there is a machine with several. Each part can be measured alone, as does
`bench.gpu_proof`: a library that hangs or crashes then costs one part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from bench.gpu import Gpu, NoGpuError, open_gpu
from bench.gpu_sections import LIMIT_VARIABLE
from bench.nccl_alone import NEIGHBORS, measure_beside, measure_stall
from bench.nccl_document import nccl_table, versions
from bench.nccl_figures import IPC_BYTES, TORCH_BYTES, Figures, Note, notes_to
from bench.nccl_ranks import SHARING, measure_ranks

__all__ = ["PARTS", "main"]

SIZES: Final = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, TORCH_BYTES, IPC_BYTES)
SMOKE_SIZES: Final = (4, 1 << 12)
SAMPLES: Final = 1000
SMOKE_SAMPLES: Final = 5
PATH_SAMPLES: Final = 30
LIMIT_S: Final = 70.0
"""Of a part. Libraries may hang on a shared device; a benchmark may not."""
STOP_S: Final = 10.0
"""How much sooner than the part itself its ranks are stopped, so that it can still say what they have measured."""

PATHS: Final[dict[str, dict[str, str]]] = {
    "ipc": {"ASYNCDIST_CUDA_PATH": "ipc"},
    "staged": {"ASYNCDIST_CUDA_PATH": "staged"},
    **{f"nccl ({name})": {"ASYNCDIST_CUDA_PATH": "nccl", **environ} for name, environ in SHARING.items()},
}

TOGETHER: Final = {f"nccl beside torch ({name})": name for name in SHARING}

PARTS: Final = (*NEIGHBORS, "stall", "copy", *PATHS, *TOGETHER)
"""Parts by name: one rank beside a neighbor, the event loop, a copy within the device, two ranks on each path, and two
on NCCL's beside torch."""

NEEDED: Final = ("bare", "ipc", "staged")
"""What must work wherever there is a device; the others are neighbors, and ways that NCCL may refuse."""


@click.command()
@click.option("--smoke", is_flag=True, help="Only see that it runs.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only these; all by default.")
@click.option("--figures", "file", type=click.Path(path_type=Path), help="Append what is measured, as JSON lines.")
@click.option("--limit-s", default=LIMIT_S, envvar=LIMIT_VARIABLE, help="Seconds for the ranks of one part.")
def main(smoke: bool, parts: tuple[str, ...], file: Path | None, limit_s: float) -> None:
    """Measure GPU arrays on this machine's first device."""
    figures = Figures()
    write = notes_to(file) if file is not None else None

    def note(kind: str, **fields: Any) -> None:
        figures.take({"kind": kind, **fields})
        if write is not None:
            write(kind, **fields)

    for part in parts or PARTS:
        try:
            _measure(part, smoke, max(limit_s - STOP_S, STOP_S), note)
        except NoGpuError as error:
            click.echo(f"no figures: {error}", err=True)
            sys.exit(1)
    for neighbor, by_size in figures.beside.items():
        for name in ("asyncdist", neighbor):
            table = nccl_table({nbytes: by_name[name] for nbytes, by_name in by_size.items()}, 1)
            click.echo(
                f"# {name}, one rank, taking turns with {'asyncdist' if name == neighbor else neighbor}\n{table}\n"
            )
    for name, seconds in figures.paths.items():
        click.echo(f"# path {name}, 2 ranks on one device\n{nccl_table(seconds, 2)}\n")
    for name, why in {**figures.missing, **figures.problems}.items():
        click.echo(f"# {name}: {why}")
    sys.exit(any(name in NEEDED for name in (*figures.missing, *figures.problems)))


def _measure(part: str, smoke: bool, limit_s: float, note: Note) -> None:
    sizes, samples = (SMOKE_SIZES, SMOKE_SAMPLES) if smoke else (SIZES, SAMPLES)
    path_samples = 2 if smoke else PATH_SAMPLES
    if part in PATHS:
        seconds, problem = measure_ranks(2, sizes, path_samples, PATHS[part], limit_s)
        for nbytes, taken in seconds.items():
            note("path", name=part, nbytes=nbytes, seconds=taken["asyncdist"])
        if problem:
            note("problem", name=part, why=problem)
        return
    if part in TOGETHER:
        way = TOGETHER[part]
        compared = [nbytes for nbytes in sizes if nbytes <= TORCH_BYTES]
        seconds, problem = measure_ranks(2, compared, path_samples, PATHS[f"nccl ({way})"], limit_s, torch=True)
        for nbytes, taken in seconds.items():
            note("together", name=way, nbytes=nbytes, seconds=taken)
        if problem:
            note("problem", name=part, why=problem)
        return
    with open_gpu(0) as gpu:
        note("about", values=versions(gpu))
        single: dict[str, Callable[[Gpu], None]] = {
            "stall": lambda gpu: measure_stall(gpu, samples, note),
            "copy": lambda gpu: note("copy", bytes_per_s=gpu.copy_bandwidth(sizes[-1], path_samples)),
        }
        if part in single:
            single[part](gpu)
        else:
            measure_beside(gpu, part, sizes, samples, note)


if __name__ == "__main__":
    main()
