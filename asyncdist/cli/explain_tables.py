"""What `asyncdist explain` prints: candidates for one size, what is chosen by size, and the costs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from rich.table import Table

from asyncdist.cli.sizes import show_bytes, show_seconds
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.selection.prediction import Prediction
from asyncdist.plan.selection.selector import SCRATCH_MAX_BYTES

__all__ = ["Explained", "bus_factor", "candidate_table", "described", "memory_note", "single_copy_note", "size_table"]

LEAST_RATE: Final = 1e-3
"""Below this many GB/s it is latency that counts, and digits say nothing."""


class Explained(NamedTuple):
    """The candidates of one size, the best first, and the one that would be used."""

    nbytes: int
    found: list[Prediction]
    chosen: Prediction


def bus_factor(collective: str, world: int) -> float:
    """Return busbw / algbw, as NVIDIA's nccl-tests define them."""
    if world == 1 or collective in ("broadcast", "reduce", "barrier", "scan", "exscan"):
        return 1.0
    share = (world - 1) / world
    return 2 * share if collective == "all_reduce" else share


def candidate_table(collective: str, world: int, one: Explained) -> Table:
    """Every algorithm for one size."""
    table = Table()
    table.add_column("algorithm", no_wrap=True, min_width=24)
    for title in ("predicted", "algbw GB/s", "busbw GB/s", "steps", "sent per rank", "chunk", "temporary"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in one.found:
        marked = each is one.chosen
        table.add_row(
            f"{each.algorithm} <- chosen" if marked else each.algorithm,
            show_seconds(each.seconds),
            *_rates(collective, world, one.nbytes, each),
            str(each.rounds),
            show_bytes(each.sent_bytes),
            show_bytes(each.chunk_bytes) if each.chunk_bytes < one.nbytes else "-",
            show_bytes(each.scratch_bytes),
            style="bold" if marked else None,
        )
    return table


def size_table(collective: str, world: int, every: Sequence[Explained]) -> Table:
    """What is chosen for each size, and how much longer the next best takes."""
    table = Table()
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("chosen", no_wrap=True)
    for title in ("predicted", "algbw GB/s", "busbw GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("next best", no_wrap=True)
    table.add_column("takes", justify="right", no_wrap=True)
    for one in every:
        others = [each for each in one.found if each is not one.chosen]
        second = min(others, key=attrgetter("seconds"), default=None)
        table.add_row(
            show_bytes(one.nbytes),
            one.chosen.algorithm,
            show_seconds(one.chosen.seconds),
            *_rates(collective, world, one.nbytes, one.chosen),
            second.algorithm if second else "-",
            f"{second.seconds / one.chosen.seconds:.2f}x" if second else "-",
        )
    return table


def memory_note(collective: str, one: Explained) -> str | None:
    """Say why a faster one was not chosen, if its memory is the reason."""
    faster = [each for each in one.found if each.seconds < one.chosen.seconds]
    greedy = [each for each in faster if each.scratch_bytes > SCRATCH_MAX_BYTES]
    if not greedy:
        return None
    best = min(greedy, key=attrgetter("seconds"))
    return (
        f"{best.algorithm} is not chosen since it needs {show_bytes(best.scratch_bytes)} of temporary memory, and no "
        f"more than {show_bytes(SCRATCH_MAX_BYTES)} is taken unasked; ASYNCDIST_ALGO={collective}:{best.algorithm} asks"
    )


def single_copy_note(one: Explained) -> str | None:
    """Say which algorithms copy nothing into shared memory."""
    names = ", ".join(each.algorithm for each in one.found if each.single_copy)
    return f"{names}: what a rank puts out is read where it lies, if the system lets ranks do so" if names else None


def described(constants: Constants, world: int, ranks: int, *, shared: bool) -> list[str]:
    """Lines that say what messages, hosts and memory cost, as far as that counts for hosts of `ranks` ranks."""
    inside = (
        f"message {show_seconds(constants.alpha_s)}, of which {show_seconds(constants.overhead_s)} of processor time "
        f"at each end; {1e-9 / constants.beta_s:.3g} GB/s; reduction {1e-9 / constants.gamma_s:.3g} GB/s"
    )
    if constants.copy_s:
        inside += f"; copies at each end {1e-9 / constants.copy_s:.3g} GB/s"
    lines = [inside]
    if constants.cores:
        turns = constants.begun_s(ranks)
        crowded = f", which ranks share: {show_seconds(turns)} until all have begun" if turns else ""
        lines.append(f"{constants.cores} cores per host{crowded}")
    between = constants.between
    if between is not None and ranks < world:
        lines.append(f"between hosts {show_seconds(between.alpha_s)}, {1e-9 / between.beta_s:.3g} GB/s per host")
    if shared:
        memory = constants.shared
        lines.append(
            f"shared memory {show_seconds(memory.begin_s)} to begin, {show_seconds(memory.wake_s)} to wake up, "
            f"{show_seconds(memory.step_s)} per step, copies {1e-9 / memory.copy_s:.3g} GB/s, "
            f"reduction {1e-9 / memory.reduce_s:.3g} GB/s, single copy {1e-9 / memory.read_s:.3g} GB/s"
        )
    return lines


def _rates(collective: str, world: int, nbytes: int, one: Prediction) -> tuple[str, str]:
    if not nbytes or not one.seconds:
        return "-", "-"
    rate = nbytes / one.seconds / 1e9
    return _rate(rate), _rate(rate * bus_factor(collective, world))


def _rate(gigabytes: float) -> str:
    return f"{gigabytes:.3g}" if gigabytes >= LEAST_RATE else f"<{LEAST_RATE:g}"
