"""`asyncdist run`: torchrun's options, without torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from asyncdist.launch.config import (
    DEFAULT_EXPELLED_AFTER_S,
    DEFAULT_GRACE_S,
    DEFAULT_JOIN_TIMEOUT_S,
    DEFAULT_LAST_CALL_S,
    DEFAULT_LOST_AFTER_S,
    DEFAULT_PORT,
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    ENDING,
    Endpoint,
    LaunchConfig,
    RdzvTimes,
    interface_with,
    parse_endpoint,
    parse_metrics_port,
    parse_nnodes,
    parse_nproc,
    parse_outage,
    parse_rdzv_conf,
    parse_signals,
    worker_command,
)
from asyncdist.launch.logs import LogSpec, parse_local_ranks, parse_needles, parse_streams
from asyncdist.launch.scheduler import find_place

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_HINTS: Final = {
    "--logs-specs": "it names a plugin of torch's; --log-dir, --redirects and --tee say where output goes",
    "--event-log-handler": "it names a plugin of torch's; what happens to the job is said on stderr",
    "--numa-binding": "bind in the script, by LOCAL_RANK, or start the workers with --no-python numactl",
}


class _TorchrunCommand(click.Command):
    """A command that says what to do instead of an option that only torchrun has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name == "-n":  # of -np as well
                raise click.UsageError("mpiexec's -n is --nproc-per-node here.", ctx) from None
            hint = _HINTS.get(error.option_name.replace("_", "-"))
            if hint is None:
                raise
            raise click.UsageError(f"asyncdist run has no {error.option_name}, as torchrun has: {hint}.", ctx) from None


def _parsed(*names: str, parse: Callable[[str], object], **more: Any) -> Option:
    """An option whose text `parse` reads; one that was not given stays None."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return click.option(*names, callback=callback, **more)


def _seconds(name: str, default: float, help: str, **more: Any) -> Option:
    more |= {"default": default, "show_default": True, "metavar": "SECONDS"}
    return click.option(name, type=click.FloatRange(0), help=help, **more)


def _unused(name: str, **more: Any) -> Option:
    """A hidden option that torchrun's users write out of habit: it is parsed and checked, and no more."""
    said = "Taken, as torchrun does, and unused."
    return click.option(name, hidden=True, expose_value=False, callback=lambda *_: None, help=said, **more)


@click.command(
    "run",
    cls=_TorchrunCommand,
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
@_parsed(
    "--nproc-per-node",
    parse=parse_nproc,
    metavar="N|auto|cpu|gpu",
    help="Workers on this node.",
    default="1",
    show_default=True,
)
@_parsed(
    "--nnodes",
    parse=parse_nnodes,
    metavar="N|MIN:MAX",
    help="Number of nodes, with one launcher on each. MIN:MAX makes the job elastic.",
    default="1",
    show_default=True,
)
@click.option(
    "--node-rank", type=click.IntRange(0), help="Rank of this node; by default the store deals node ranks out."
)
@_parsed(
    "--rdzv-endpoint",
    parse=partial(parse_endpoint, least_port=0),
    metavar="HOST:PORT",
    help="Where the nodes meet; the first of them hosts the store. HOST may be several addresses of it, with commas. A "
    "single node may give port 0: any free port.",
)
@click.option("--rdzv-id", help="Name of the job, which tells jobs on one store apart.")
@click.option(
    "--rdzv-conf",
    metavar="KEY=VALUE,...",
    help="Times of several nodes, in seconds: join_timeout, keep_alive_interval, last_call_timeout (30) of an elastic "
    "job. A node is lost after keep_alive_max_attempt intervals of silence, by default after 3 s, or 20 s while an "
    "elastic job's nodes meet.",
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
@_seconds(
    "--grace",
    DEFAULT_GRACE_S,
    "Time that the other workers have to end after a failure; then SIGTERM and as long again, then SIGKILL.",
)
@_seconds(
    "--shutdown-timeout",
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    "Time that workers have to end after a signal to the launcher; then SIGKILL.",
    envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],  # torchrun reads both
)
@_seconds(
    "--join-timeout", DEFAULT_JOIN_TIMEOUT_S, "How long to wait for the store to answer and for all nodes to join."
)
@_parsed(
    "--store-outage",
    parse=parse_outage,
    metavar="SECONDS|forever",
    help="How long a job of several nodes goes on while its daemon is away and all nodes are well.",
    envvar=["PET_STORE_OUTAGE", "ASYNCDIST_STORE_OUTAGE"],
    default="forever",
    show_default=True,
)
@click.option(
    "--pass-local-rank/--use-env",
    default=False,
    help="Pass --local_rank=N to the script, before its own arguments, or only set LOCAL_RANK (the default).",
)
@click.option("--no-python", is_flag=True, help="Run a program, not a Python script.")
@click.option("-m", "--module", is_flag=True, help="Run a module, as python -m does.")
@click.option("--role", default="default", help="Value of ROLE_NAME in the environment of the workers.")
@click.option(
    "--virtual-local-rank", is_flag=True, help="Show each worker only its own GPU, and set its LOCAL_RANK to 0."
)
@_parsed(
    "--local-addr",
    parse=lambda address: interface_with(address) if address else None,
    metavar="ADDRESS",
    help="Address of this node; workers use the network interface that has this address.",
)
@_parsed(
    "--signals-to-handle",
    parse=parse_signals,
    metavar="NAMES",
    help="Signals that end the job: the launcher passes them on to the workers. SIGUSR1 and SIGUSR2 go to the "
    "workers that handle them.",
    default=",".join(each.name for each in ENDING),
    show_default=True,
)
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Directory of the logs: a folder for each run, in it one for each attempt, in that one for each local rank.",
)
@click.option(
    "--dump-dir",
    metavar="DIR",
    type=click.Path(file_okay=False, resolve_path=True),
    help="Directory where a rank writes what it has done of late before it is ended, or its group fails.",
    envvar=["PET_DUMP_DIR", "ASYNCDIST_DUMP_DIR"],
)
@_parsed(
    "--metrics-port",
    parse=parse_metrics_port,
    metavar="[HOST:]PORT",
    help="Serve what the ranks of this node do, for Prometheus, at /metrics of this port; 0 is any free one.",
)
@_parsed(
    "-r",
    "--redirects",
    parse=parse_streams,
    metavar="STREAMS",
    help="Streams that go to files only: 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2.",
    default="0",
)
@_parsed(
    "-t",
    "--tee",
    parse=parse_streams,
    metavar="STREAMS",
    help="Streams that go to files and to the terminal, written as for --redirects.",
    default="0",
)
@_parsed(
    "--local-ranks-filter",
    parse=parse_local_ranks,
    metavar="RANKS",
    help="Local ranks whose output may go to the terminal, as in 0,2. By default all.",
    default="",
)
@_parsed(
    "--duplicate-stdout-filters",
    parse=parse_needles,
    metavar="TEXTS",
    help="Texts (a,b): lines of teed stdout that contain one of them are also collected in one file.",
    default="",
)
@_parsed(
    "--duplicate-stderr-filters", parse=parse_needles, metavar="TEXTS", help="The same for teed stderr.", default=""
)
@_unused("--rdzv-backend", type=click.Choice(["static", "c10d"]))
@_unused("--monitor-interval", type=float)
@_unused("--start-method")
@_unused("--run-path", is_flag=True)
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.Path())
def run_command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT once per rank and see to it that all of them end.

    Each worker reads its place in the job from its environment (RANK, WORLD_SIZE, LOCAL_RANK, ..., as torchrun sets
    them) and the address of the store from ASYNCDIST_STORE. Without a daemon this launcher hosts the store. The exit
    code is that of the worker that failed first (128 + n for signal n). As with torchrun, an environment variable can
    stand for each option: PET_NNODES for --nnodes. What srun, mpirun or a Kubernetes Job says of the nodes needs no
    option.
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
        _say(f"environment variable {variable} is not known and has no effect: did you mean {meant}?")
    standalone: bool = options["standalone"]
    if standalone and (options["nnodes"][1] > 1 or options["rdzv_endpoint"] or options["master_addr"]):
        raise click.UsageError(
            "--standalone means one node with a store of its own: it excludes --nnodes above 1, "
            "--rdzv-endpoint and --master-addr"
        )
    try:
        if not standalone:
            _take_scheduled_place(options, environ)
        least, most = options["nnodes"]
        times = parse_rdzv_conf(options["rdzv_conf"] or "") if most > 1 else RdzvTimes()
        for key in times.unused:
            _say(f"--rdzv-conf {key} has no meaning here and is not used")
        store_text = "" if standalone else environ.get("ASYNCDIST_STORE", "")
        command = worker_command(script, args, module=options["module"], no_python=options["no_python"])
        return LaunchConfig(
            command=command,
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
            last_call_s=times.last_call_s or DEFAULT_LAST_CALL_S,
            lost_after_s=times.keep_alive_s or DEFAULT_LOST_AFTER_S,
            expelled_after_s=times.keep_alive_s or DEFAULT_EXPELLED_AFTER_S,
            store_outage_s=options["store_outage"],
            local_rank_at=len(command) - len(args) if options["pass_local_rank"] else None,
            role=options["role"],
            logs=LogSpec(
                log_dir=options["log_dir"] or None,
                redirects=options["redirects"],
                tee=options["tee"],
                shown_ranks=options["local_ranks_filter"],
                stdout_needles=options["duplicate_stdout_filters"],
                stderr_needles=options["duplicate_stderr_filters"],
            ),
            dump_dir=options["dump_dir"] or None,
            metrics=options["metrics_port"],
            ending_signals=options["signals_to_handle"],
            virtual_local_rank=options["virtual_local_rank"],
            first_local_rank=options.get("first_local_rank", 0),
            local_world_size=options.get("local_world_size"),
            interface=options["local_addr"],
        )
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{Path(error.filename or '.')}: {error.strerror}") from error


def _take_scheduled_place(options: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Say of the nodes what no option says, as the scheduler does that has started this launcher."""
    source = click.get_current_context().get_parameter_source
    nnodes_given = source("nnodes") is not ParameterSource.DEFAULT
    if not nnodes_given and source("node_rank") is ParameterSource.ENVIRONMENT:
        raise ValueError(f"PET_NODE_RANK is {options['node_rank']}, but of how many nodes? set PET_NNODES")
    place = None if environ.get("RANK") else find_place(environ)
    if place is None:
        nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
        if nodes != "1" and not nnodes_given:
            _say(f"one of the {nodes} nodes of this Slurm job is used: srun starts a launcher on each")
        return
    said = f"{place.by} has started this launcher as number {place.rank}"
    if not nnodes_given:
        if place.size is None:
            hint = "give --nnodes, or PET_NNODES, or --standalone for a job of this node alone"
            raise ValueError(f"{said}, but of how many? {hint}")
        options["nnodes"] = place.size, place.size
    least, most = options["nnodes"]
    if least == most == place.size and place.local_rank is not None and place.local_size is not None:
        nproc = options["nproc_per_node"]
        options["first_local_rank"], options["local_world_size"] = place.local_rank * nproc, place.local_size * nproc
    if most == 1 or options["rdzv_endpoint"] or options["master_addr"]:
        return
    if options["node_rank"] is None and least == most and place.size in (None, most):
        options["node_rank"] = place.rank
    options["rdzv_id"] = options["rdzv_id"] or place.job or None
    if not environ.get("ASYNCDIST_STORE"):
        if place.host is None:
            raise ValueError(f"{said}, but where do they meet? give --master-addr, or PET_MASTER_ADDR, of number 0")
        options["master_addr"], options["master_port"] = place.host, options["master_port"] or place.port
    _say(f"{said} of {most}" + ("" if (place.local_size or 1) == 1 else f", {place.local_size} of them on this host"))


def _say(text: str) -> None:
    click.echo(f"asyncdist run: {text}", err=True)


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
