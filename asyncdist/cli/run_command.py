"""`asyncdist run`: torchrun's options, without torch."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from asyncdist.cli.run_options import TorchrunCommand, output_options, parsed_by, to_log_spec, unused_options
from asyncdist.launch.config import (
    DEFAULT_GRACE_S,
    DEFAULT_JOIN_TIMEOUT_S,
    DEFAULT_PORT,
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    Endpoint,
    LaunchConfig,
    RdzvTimes,
    parse_endpoint,
    parse_nnodes,
    parse_nproc,
    parse_outage,
    parse_rdzv_conf,
    worker_command,
)
from asyncdist.launch.signals import ENDING, parse_signals

__all__ = ["run_command"]


def _interface(value: str) -> str | None:
    from asyncdist.launch.config import interface_with

    return interface_with(value) if value else None


@click.command(
    "run",
    cls=TorchrunCommand,
    short_help="Run a script once per rank.",
    context_settings={
        # Everything from the script on is the script's own, whatever it looks like.
        "allow_interspersed_args": False,
        # torchrun's old spelling: --nproc_per_node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
        # As torchrun: --nnodes is PET_NNODES too, which is how Kubernetes operators say it.
        "auto_envvar_prefix": "PET",
    },
)
@click.option(
    "--nproc-per-node",
    callback=parsed_by(parse_nproc),
    metavar="N|auto|cpu|gpu",
    default="1",
    show_default=True,
    help="Workers on this node.",
)
@click.option(
    "--nnodes",
    callback=parsed_by(parse_nnodes),
    metavar="N|MIN:MAX",
    default="1",
    show_default=True,
    help="Number of nodes, with one launcher on each. MIN:MAX makes the job elastic.",
)
@click.option(
    "--node-rank", type=click.IntRange(0), help="Rank of this node; by default the store deals node ranks out."
)
@click.option(
    "--rdzv-endpoint",
    callback=parsed_by(partial(parse_endpoint, least_port=0)),
    metavar="HOST:PORT",
    help="Where the nodes meet; the first of them hosts the store. A single node may give port 0: any free port.",
)
@click.option("--rdzv-id", help="Name of the job, which tells jobs on one store apart.")
@click.option(
    "--rdzv-conf",
    metavar="KEY=VALUE,...",
    help="Times of an elastic job, in seconds: last_call_timeout (30), join_timeout, keep_alive_interval (5). A node "
    "is lost after keep_alive_max_attempt (4) intervals of silence.",
)
@click.option("--master-addr", help="The address of --rdzv-endpoint, as an option of its own.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    help=f"The port of --rdzv-endpoint, as an option of its own (default {DEFAULT_PORT}).",
)
@click.option(
    "--standalone", is_flag=True, help="One node with a store of its own, even if ASYNCDIST_STORE names a daemon."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often all workers may be restarted after one has failed.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Time that the other workers have to end after a failure; then SIGTERM and as long again, then SIGKILL.",
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(0),
    envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],  # torchrun reads both
    default=DEFAULT_SHUTDOWN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Time that workers have to end after a signal to the launcher; then SIGKILL.",
)
@click.option(
    "--join-timeout",
    type=click.FloatRange(0),
    default=DEFAULT_JOIN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the store to answer and for all nodes to join.",
)
@click.option(
    "--store-outage",
    callback=parsed_by(parse_outage),
    envvar=["PET_STORE_OUTAGE", "ASYNCDIST_STORE_OUTAGE"],
    metavar="SECONDS|forever",
    default="forever",
    show_default=True,
    help="How long a job of several nodes goes on while its daemon is away and all nodes are well.",
)
@click.option("--pass-local-rank", is_flag=True, help="Append --local_rank=N to the worker's arguments.")
@click.option("--no-python", is_flag=True, help="Run a program, not a Python script.")
@click.option("-m", "--module", is_flag=True, help="Run a module, as python -m does.")
@click.option("--role", default="default", help="Value of ROLE_NAME in the environment of the workers.")
@click.option(
    "--virtual-local-rank", is_flag=True, help="Show each worker only its own GPU, and set its LOCAL_RANK to 0."
)
@click.option(
    "--local-addr",
    callback=parsed_by(_interface),
    metavar="ADDRESS",
    help="Address of this node; workers use the network interface that has this address.",
)
@click.option(
    "--signals-to-handle",
    callback=parsed_by(parse_signals),
    metavar="NAMES",
    default=",".join(each.name for each in ENDING),
    show_default=True,
    help="Signals that end the job: the launcher passes them on to the workers. SIGUSR1 and SIGUSR2 go to the "
    "workers that handle them.",
)
@output_options
@unused_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT once per rank and see to it that all of them end.

    Each worker reads its place in the job from its environment (RANK, WORLD_SIZE, LOCAL_RANK, ..., as torchrun sets
    them) and the address of the store from ASYNCDIST_STORE. Without a daemon this launcher hosts the store. The exit
    code is that of the worker that failed first (128 + n for signal n). As with torchrun, an environment variable can
    stand for each option: PET_NNODES for --nnodes.
    """
    config = _config(script, args, options)
    sys.exit(_launch(config))


def _launch(config: LaunchConfig) -> int:
    from asyncdist.errors import DistError
    from asyncdist.launch.agent import run

    try:
        return asyncio.run(run(config))
    except (DistError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _config(script: str, args: tuple[str, ...], options: dict[str, Any]) -> LaunchConfig:
    """Turn options and environment into a checked LaunchConfig; raises click's errors."""
    from asyncdist.concurrency.trace import misspelt
    from asyncdist.store.credentials import load_tls
    from asyncdist_server.wire.auth import load_token

    environ = os.environ
    for variable, meant in misspelt(environ).items():
        said = f"environment variable {variable} is not known and has no effect: did you mean {meant}?"
        click.echo(f"asyncdist run: {said}", err=True)
    standalone: bool = options["standalone"]
    least, most = options["nnodes"]
    if standalone and (most > 1 or options["rdzv_endpoint"] or options["master_addr"]):
        raise click.UsageError(
            "--standalone means one node with a store of its own: it excludes --nnodes above 1, "
            "--rdzv-endpoint and --master-addr"
        )
    try:
        times = parse_rdzv_conf(options["rdzv_conf"] or "") if least < most else RdzvTimes()
        for key in times.unused:
            click.echo(f"asyncdist run: --rdzv-conf {key} has no meaning here and is not used", err=True)
        store_text = "" if standalone else environ.get("ASYNCDIST_STORE", "")
        return LaunchConfig(
            command=worker_command(script, args, module=options["module"], no_python=options["no_python"]),
            nproc_per_node=options["nproc_per_node"],
            nnodes=most,
            min_nodes=None if least == most else least,
            node_rank=options["node_rank"],
            endpoint=_endpoint(options),
            store=parse_endpoint(store_text) if store_text else None,
            job_id=options["rdzv_id"],
            token=load_token(environ),
            tls=load_tls(environ),
            max_restarts=options["max_restarts"],
            grace_s=options["grace"],
            shutdown_timeout_s=options["shutdown_timeout"],
            join_timeout_s=times.join_s or options["join_timeout"],
            last_call_s=times.last_call_s,
            lost_after_s=times.lost_after_s,
            store_outage_s=options["store_outage"],
            pass_local_rank=options["pass_local_rank"],
            role=options["role"],
            logs=to_log_spec(options),
            ending_signals=options["signals_to_handle"],
            virtual_local_rank=options["virtual_local_rank"],
            interface=options["local_addr"],
        )
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{Path(error.filename or '.')}: {error.strerror}") from error


def _endpoint(options: dict[str, Any]) -> Endpoint | None:
    """--rdzv-endpoint, or --master-addr and --master-port."""
    endpoint: Endpoint | None = options["rdzv_endpoint"]
    address, port = options["master_addr"], options["master_port"]
    if endpoint is not None:
        if address or port:
            raise click.UsageError("--rdzv-endpoint and --master-addr/--master-port say the same thing: give one")
        if endpoint.port:
            return endpoint
        if options["nnodes"][1] > 1:
            raise click.UsageError(f"several nodes cannot meet at {endpoint}: 0 is not a port that all know")
        return None
    if address:
        return Endpoint(address.strip("[]"), port or DEFAULT_PORT)
    if port and not options["standalone"]:
        return Endpoint("127.0.0.1", port)
    return None
