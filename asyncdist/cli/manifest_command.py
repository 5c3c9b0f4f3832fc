"""`asyncdist manifest`: files to be read, changed and given to `kubectl apply -f -`, or to Slurm's `sbatch`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any, Final

import click

from asyncdist.cli import SuggestingGroup
from asyncdist.launch.config import DEFAULT_PORT, DEFAULT_SHUTDOWN_TIMEOUT_S

__all__ = ["manifest_group"]

MAX_NAME_CHARACTERS: Final = 40
"""Of an object's name: pods add some 20 to it, and a label of a host name has 63."""

_STOP_MARGIN_S: Final = 10
"""Pods get so much longer to stop than the launcher gives its workers."""

_FOLDER: Final = Path(__file__).parent / "manifests"


def _print(template: str, **values: object) -> None:
    text = (_FOLDER / template).read_text()
    click.echo(Template(text).substitute({name: str(value) for name, value in values.items()}), nl=False)


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # YAML reads it alike


def _name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", value) is None or len(value) > MAX_NAME_CHARACTERS:
        text = f"{value!r} is not a name of at most {MAX_NAME_CHARACTERS} of a-z, 0-9 and -, from a letter on"
        raise click.BadParameter(text, ctx, param)
    return value


def _quantity(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if re.fullmatch(r"[1-9]\d*([kMGTPE]i?)?", value) is None:
        raise click.BadParameter(f"{value!r} is not a size of Kubernetes: write 1Gi", ctx, param)
    return value


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.argument("args", nargs=-1, required=True, metavar="SCRIPT [ARGS]...", type=click.UNPROCESSED),
        click.option("--store", help="HOST:PORT of a standing daemon; else the first launcher hosts the store."),
        click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="Restarts allowed."),
        click.option(
            "--nproc-per-node", default="1", show_default=True, help="Workers of each launcher: a number, auto or gpu."
        ),
        click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="Number of pods or hosts."),
        click.option("--name", callback=_name, required=True, help="Name of the job."),
    ):
        command = option(command)
    return command


_image = click.option("--image", required=True, help="Container image with asyncdist and the script.")


@click.group("manifest", cls=SuggestingGroup, short_help="Print files for Kubernetes and Slurm.")
def manifest_group() -> None:
    """Print YAML for Kubernetes, a durable store and jobs whose pods need no option, or a file for Slurm's sbatch."""


@manifest_group.command("store")
@click.option("--name", callback=_name, default="asyncdist-store", show_default=True, help="Name of the service.")
@click.option("--image", required=True, help="Container image with asyncdist and its extra `server`.")
@click.option("--storage", callback=_quantity, default="1Gi", show_default=True, help="Size of the volume.")
def store_command(name: str, image: str, storage: str) -> None:
    """Print a StatefulSet of one durable store daemon with a volume, and its Service."""
    _print("store.yaml", name=name, image=_quoted(image), storage=storage, port=DEFAULT_PORT)


@manifest_group.command("job", context_settings={"allow_interspersed_args": False})
@_job_options
@_image
def job_command(**options: Any) -> None:
    """Print an Indexed Job, one launcher in each pod, and the Service that names the pods."""
    _print_job("job.yaml", **options)


@manifest_group.command("jobset", context_settings={"allow_interspersed_args": False})
@_job_options
@_image
def jobset_command(**options: Any) -> None:
    """Print a JobSet, one launcher in each pod. JobSet names the pods, and restarts all when one is lost."""
    _print_job("jobset.yaml", **options)


@manifest_group.command("sbatch", context_settings={"allow_interspersed_args": False})
@_job_options
@click.option("--tasks-per-node", type=click.IntRange(1), default=1, show_default=True, help="Launchers on each host.")
def sbatch_command(args: tuple[str, ...], **options: Any) -> None:
    """Print a file for sbatch, in which srun starts the launchers."""
    store = options.pop("store")
    options["nproc_per_node"] = shlex.quote(options["nproc_per_node"])
    exported = f"export ASYNCDIST_STORE={shlex.quote(store)}\n" if store else ""
    _print("sbatch.sh", **options, store=exported, command=shlex.join(args))


def _print_job(template: str, args: tuple[str, ...], **options: Any) -> None:
    texts = {name: _quoted(options[name] or "") for name in ("image", "nproc_per_node", "store")}
    stop_s = round(DEFAULT_SHUTDOWN_TIMEOUT_S) + _STOP_MARGIN_S
    _print(template, **(options | texts), command=_quoted(["asyncdist", "run", *args]), stop_s=stop_s)
