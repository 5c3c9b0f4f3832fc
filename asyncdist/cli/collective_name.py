"""A collective as people name it: by the name used here, or by one from torch or MPI for the same thing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import click

from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.plan.problem import PRIVATE_COLLECTIVES

__all__ = ["CollectiveName"]

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
