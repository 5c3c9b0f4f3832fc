"""``python -m bench.nccl``: GPU arrays, beside cupy's bare call, torch.distributed and cupyx on the same device.

One rank shows what awaiting costs; two ranks on one device compare the paths. NCCL with several devices is
`bench.all_reduce`'s business once there is a machine with several.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from bench.gpu import FAKE_VARIABLE, open_gpu
from bench.nccl_alone import measure_alone
from bench.nccl_document import IPC_BYTES, TORCH_BYTES, Figures, document, nccl_table, versions
from bench.nccl_ranks import SHARING, measure_ranks

__all__ = ["main", "refusal_among"]

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu.md"
COMMAND: Final = "make gpu"

SIZES: Final = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, TORCH_BYTES, IPC_BYTES)
SMOKE_SIZES: Final = (4, 1 << 12)
SAMPLES: Final = 1000
SMOKE_SAMPLES: Final = 5
PATH_SAMPLES: Final = 30

PATHS: Final[dict[str, dict[str, str]]] = {
    "ipc": {"ASYNCDIST_CUDA_PATH": "ipc"},
    "staged": {"ASYNCDIST_CUDA_PATH": "staged"},
    **{f"nccl ({name})": {"ASYNCDIST_CUDA_PATH": "nccl", **environ} for name, environ in SHARING.items()},
}


def refusal_among(facts: Sequence[str], path: str) -> str:
    """Why the tests could not use `path`, as they have written it down; empty if they could, or did not try."""
    for way in SHARING:
        for fact in facts:
            before, found, said = fact.partition(f"{way}: ")
            if path == f"nccl ({way})" and found and before.startswith("NCCL") and said != "works":
                return said
    return ""


@click.command()
@click.option("--smoke", is_flag=True, help="Only see that it runs.")
@click.option("--write", is_flag=True, help=f"Write {DOCUMENT.name} into docs/benchmarks.")
@click.option("--facts", type=click.Path(path_type=Path), help="A file with lines to add to the document.")
def main(smoke: bool, write: bool, facts: Path | None) -> None:
    """Measure GPU arrays on this machine's first device."""
    sizes, samples, path_samples = (SMOKE_SIZES, SMOKE_SAMPLES, 2) if smoke else (SIZES, SAMPLES, PATH_SAMPLES)
    try:
        with open_gpu(0) as gpu:
            about = versions(gpu)
            figures = Figures(measure_alone(gpu, sizes, samples))
            figures.copy_bytes_per_s = gpu.copy_bandwidth(sizes[-1], path_samples)
    except RuntimeError as error:
        click.echo(f"no figures: {error}", err=True)
        sys.exit(1)
    if facts is not None and facts.exists():
        figures.facts = tuple(facts.read_text().splitlines())
    for name, environ in PATHS.items():
        problem = refusal_among(figures.facts, name)
        if not problem:  # what a test has seen fail is not waited for again
            seconds, problem = measure_ranks(2, sizes, path_samples, environ)
        if problem:
            figures.problems[name] = problem
        else:
            figures.paths[name] = seconds
            click.echo(f"# path {name}, 2 ranks on one device\n{nccl_table(seconds, 2)}\n")
    text = document(figures, about, COMMAND)
    click.echo(text)
    if write and not os.environ.get(FAKE_VARIABLE):
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
