"""Failures: which worker failed first, how each node's workers ended, and what follows for the job. No I/O.

The worker that fails first is not always the first to end: the others hear of its failure within microseconds, and may
be gone while it still unwinds. Their last words give them away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal, Self

_EXCEPTION_LINE: Final = re.compile(rb"[ |+]*([\w.]+(?:Error|Exception|Interrupt|Exit))(?::|$)")
_CONSEQUENCES: Final = (b"asyncdist.errors.PeerLostError", b"asyncdist.errors.GroupAbortedError")


@dataclass(frozen=True, slots=True)
class Record:
    """What launchers write for each other, as JSON."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What another node wrote."""
        fields = json.loads(text)
        if fields.get("failure") is not None:
            fields["failure"] = Failure(**fields["failure"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Failure(Record):
    """The first failure of an attempt, as every node reports it. `rank` is -1 for a lost node.

    `files` are what there is to read about it on `host`.
    """

    node: int
    rank: int
    host: str
    pid: int
    exitcode: int
    description: str
    files: str = ""


def is_consequence(last_lines: Iterable[bytes]) -> bool:
    """Whether a worker's last lines end with an exception that says that another worker failed."""
    exceptions = [match for line in last_lines if (match := _EXCEPTION_LINE.match(line))]
    return bool(exceptions) and exceptions[-1][1] in _CONSEQUENCES


@dataclass(frozen=True, slots=True)
class End(Record):
    """How a node's workers ended.

    `completed`: all of them ended with 0, none because it was told to. `left`: a signal to the launcher ended them, and
    the node goes. `failure`: the worker that failed before anybody stopped it; `consequence`, if its last words were
    that another one had failed.
    """

    completed: bool = False
    left: bool = False
    failure: Failure | None = None
    consequence: bool = False


@dataclass(frozen=True, slots=True)
class Conclusion(Record):
    """What follows: the job is "done", or "over" because of `failure`, or all nodes meet "again".

    `counted` says whether that is one of the restarts that --max-restarts allows.
    """

    kind: Literal["done", "over", "again"]
    counted: bool = False
    failure: Failure | None = None


def conclude(ends: Mapping[int, End], gone: Collection[int], restarts: int, max_restarts: int) -> Conclusion:
    """Draw the conclusion of a round from the `ends` of its nodes and from the nodes that are `gone` without one.

    A node that is lost takes the workers of others with it, whatever their last words are: nothing that fails in such a
    round counts as a failure of the script's. Without a loss, a failure that has a cause of its own comes before those
    that say that another one failed, and a lower node before a higher one.
    """
    if not gone and all(end.completed for end in ends.values()):
        return Conclusion("done")
    if gone or any(end.left for end in ends.values()):
        return Conclusion("again")
    failed = sorted((end.consequence, node) for node, end in ends.items() if end.failure is not None)
    if not failed:
        return Conclusion("again")  # a node came, for which all were stopped
    failure = ends[failed[0][1]].failure
    if restarts < max_restarts:
        return Conclusion("again", True, failure)
    return Conclusion("over", False, failure)
