"""What `asyncdist explain` and `asyncdist simulate` take: collectives by any of their names, and constants."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.plan.cost.constants import BUILT_IN, Constants
from asyncdist.plan.problem import PRIVATE_COLLECTIVES
from asyncdist.world.tuning_file import read_file, stored_constants

__all__ = ["CollectiveName", "named_constants", "transport_here"]

OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "allreduce": "all_reduce",
        "bcast": "broadcast",
        "allgather": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "all_gather_array": "all_gather",
        "reducescatter": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_block": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
        "alltoall": "all_to_all",
        "all_to_all_single": "all_to_all",
    }
)


class CollectiveName(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """One of `known`, or another name for it; says what is meant where it can."""

    name = "collective"

    def __init__(self, known: Sequence[str]) -> None:
        self._known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name used here."""
        word = str(value).strip().lower().replace("-", "_").replace(".", "_").removeprefix("mpi_")
        word = OTHER_NAMES.get(word, word)
        if word in self._known:
            return word
        if word in PRIVATE_COLLECTIVES:
            first = algorithms(word)[0]
            text = (
                f"{word} is not chosen by time, since no rank knows all lengths: it is shared with a lane, else {first}"
            )
            self.fail(text, param, ctx)
        close = difflib.get_close_matches(word, [*self._known, *OTHER_NAMES], 1)
        meant = f"; did you mean {OTHER_NAMES.get(close[0], close[0])}?" if close else ""
        self.fail(f"there is no collective {value!r}{meant or '.'} There are: {', '.join(self._known)}", param, ctx)


def transport_here() -> str:
    """Return the transport that the environment names, auto if it names none."""
    return os.environ.get("ASYNCDIST_TRANSPORT", "").strip().lower() or "auto"


def named_constants(source: str, transport: str) -> Constants:
    """Return a built-in set, or those for `transport` of a file of `asyncdist tune`. Raises ValueError and OSError."""
    if source in BUILT_IN:
        return BUILT_IN[source]
    if not Path(source).exists():
        raise ValueError(f"constants {source!r} are no file and no built-in set; those are {', '.join(BUILT_IN)}")
    constants = stored_constants(Path(source), transport)
    if constants is None:
        known = ", ".join(read_file(Path(source))["transports"])
        raise ValueError(f"{source} has no constants for transport {transport!r}; it has: {known}")
    return constants
