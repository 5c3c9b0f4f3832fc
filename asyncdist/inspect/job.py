"""The ranks of one job as documents (`dumps.document`): read from dumps, or made while the job runs.

What a file holds is hostile: what is no dump is skipped with a reason, and entries not as they must be are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from asyncdist.inspect.dumps import FORMAT, VERSION

Document: TypeAlias = Mapping[str, Any]

MAX_DUMP_BYTES: Final = 64 << 20
"""A ring of 2,000 operations and 1,000 stacks take some MB."""
MAX_RANKS: Final = 1 << 16
"""A number that a file makes up must not take up the memory: more ranks have not been seen."""
MAX_ENTRIES: Final = 1 << 15
"""Of a document, the last ones: what is found in them takes longer than they are."""
MAX_NUMBER: Final = 1 << 63
"""What is not below it, as infinity, is no time, no size and no rank."""
AFTERMATH_S: Final = 60.0
"""What a process writes so soon after another dump shows what came of the failure, and no more what led to it."""

STATES: Final = {
    "absent": "it has not joined",
    "joining": "it waits for other ranks to join",
    "leaving": "it closes its group",
    "left": "it has closed its group",
    "stopped": "its process is stopped, by SIGSTOP or a debugger",
    "gone": "its process has ended",
    "silent": "it does not answer",
    "refused": "it refuses to answer",
    "undumped": "it has left no dump",
}
"""Of a rank that says nothing. Such a document has `rank`, `state`, perhaps `why`, and no entries."""

_NUMBER: Final = (int, float)
_PLACE: Final = {**dict.fromkeys(("site?", "function?", "call?", "waits?"), str), "tasks?": [str]}
_PARTS: Final[Mapping[str, tuple[type, Any]]] = {
    "groups": (list, {"id": str, "name": str, "ranks": [int]}),
    "stopped": (list, int),
    **dict.fromkeys(("threads", "tasks"), (dict, [str])),
    **dict.fromkeys(("places", "awaits"), (dict, _PLACE)),
}
"""Of what a document has many, empty where it says nothing: what is not of that shape is left out."""
_NETWORK: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("host_id?", "transport?", "ports?", "error?"), str),
    "bytes_per_s?": _NUMBER,
    "listens?": [{"ip": str, "port": int}],
    "interfaces?": [{"name": str, "ip": str}],
    "peers?": [
        {
            **dict.fromkeys(("rank", "sent", "received"), int),
            **dict.fromkeys(("why", "state", "over", "last_error"), str),
            "dials": [{"to": str, "rtt_s?": _NUMBER, "error?": str}],
        }
    ],
}
"""Of `world.network`."""
_SAID: Final[Mapping[str, Any]] = {
    "host": str,
    "reason": str,
    "pid": int,
    "loop_late": _NUMBER,
    "loop_cpu": _NUMBER,
    "clock": {"host": str, "compared": [{"rank": int, "ahead_s": _NUMBER, "bound_s": _NUMBER}]},
    "network": _NETWORK,
}
"""What it may say of its process, left out likewise."""
_ENTRY: Final[Mapping[str, Any]] = {
    "operation": str,
    "issued": _NUMBER,
    "ended?": _NUMBER,
    **dict.fromkeys(("site?", "function?", "task?", "error?", "awaited_at?", "transport?"), str),
    **dict.fromkeys(("root?", "last?", "bytes?", "peer?"), int),
    "waiting_for?": [int],
    "waiters?": [str],
}
_OF_GROUP: Final = {**_ENTRY, "group": str, "group_id": str}
_ENTRIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "collective": {**_OF_GROUP, "tag": int, "sequence": int, "collective": str},
    "message": {**_OF_GROUP, "tag": int, "peer": int},
    "store": {**_ENTRY, "keys": [str]},
    "event": _OF_GROUP,
}
"""Shapes of entries by their kind; `?` marks what may be missing."""


class Job:
    """The documents of all ranks, by global rank; that of a rank which says nothing has its `state`.

    `unread` says which files of a folder were no dumps, and why.
    """

    def __init__(self, documents: Iterable[Document], size: int = 0, unread: Sequence[str] = ()) -> None:
        found = {document["rank"]: document for document in documents}
        sizes = (document.get("world_size", 0) for document in found.values())
        self.size = max(size, *sizes, *(rank + 1 for rank in found), 0)
        self.documents: dict[int, Document] = {
            rank: found.get(rank) or {"rank": rank, "state": "undumped"} for rank in range(self.size)
        }
        self.missing = {rank: document["state"] for rank, document in self.documents.items() if "state" in document}
        """The state of each rank that says nothing, as a rule one of `STATES`."""
        self.unread = tuple(unread)

    def why_missing(self, rank: int) -> str:
        """Why a rank says nothing."""
        document = self.documents[rank]
        return STATES.get(document["state"]) or str(document.get("why") or document["state"])

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The dumps in a folder. Of a rank that has written several, the first of its last failure.

        Raises ValueError if there are none, OSError if the folder cannot be read.
        """
        dumps: dict[int, list[Document]] = {}
        unread = []
        for path in sorted(folder.iterdir()):
            if re.fullmatch(r"rank_\d+(\.\d+)?\.json", path.name):
                try:
                    document = read_dump(path)
                    dumps.setdefault(document["rank"], []).append(document)
                except (ValueError, OSError) as error:
                    unread.append(f"{path.name}: {error}")
        if not dumps:
            why = f": {unread[0]}" if unread else ""
            raise ValueError(f"{folder} has no dump that can be read (rank_0.json and so on){why}")
        return cls(map(_of_last_failure, dumps.values()), unread=unread)


def read_dump(path: Path) -> Document:
    """One dump. Raises ValueError for what is none, and OSError."""
    if path.stat().st_size > MAX_DUMP_BYTES:
        raise ValueError(f"more than {MAX_DUMP_BYTES >> 20} MiB")
    try:
        return checked(json.loads(path.read_bytes()))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def checked(document: object) -> Document:
    """A document as others have made it, less the entries that are not as they must be. Raises ValueError."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError("no dump of asyncdist")
    if document.get("version") != VERSION:
        raise ValueError(f"a dump of version {document.get('version')!r:.40}; this is for version {VERSION}")
    for name in ("rank", "world_size"):
        number = document.setdefault(name, 0)
        if type(number) is not int or not 0 <= number <= MAX_RANKS:
            raise ValueError(f"{name} is {number!r:.40}")
    if not is_a(document.get("time"), _NUMBER):
        raise ValueError("it has no time")
    entries = document.setdefault("entries", [])
    if not isinstance(entries, list):
        raise ValueError("entries is no list")
    document["entries"] = list(filter(_is_entry, entries[-MAX_ENTRIES:]))
    for name, (kind, shape) in _PARTS.items():
        if not isinstance(document.setdefault(name, kind()), kind):
            raise ValueError(f"{name} is no {kind.__name__}")
        if kind is list:
            document[name] = [one for one in document[name] if _fits(one, shape)]
        else:
            document[name] = {key: one for key, one in document[name].items() if _fits(one, shape)}
    for name, shape in _SAID.items():
        if not _fits(document, {f"{name}?": shape}):
            del document[name]
    document.get("network", {}).pop("speeds", None)  # whoever asks writes them there
    return document


def _fits(value: object, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            _fits(value[bare], kind) if (bare := name.rstrip("?")) in value else bare != name
            for name, kind in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(one, shape[0]) for one in value)
    return is_a(value, shape)


def is_send(message: Document) -> bool:
    """Whether a message is one that its rank sends."""
    return "send" in message["operation"]


def is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    """Whether a value is of that kind, and, if it is a number, one to calculate with."""
    return isinstance(value, kind) and (not isinstance(value, int | float) or abs(value) < MAX_NUMBER)


def _is_entry(entry: object) -> bool:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    return isinstance(kind, str) and kind in _ENTRIES and _fits(entry, _ENTRIES[kind])


def _of_last_failure(documents: Sequence[Document]) -> Document:
    """The first dump of the last failure, of what one rank has written."""
    ordered = sorted(documents, key=lambda document: document["time"])
    chosen = ordered.pop()
    while ordered and ordered[-1].get("pid") == chosen.get("pid"):
        before = ordered.pop()
        if chosen["time"] - before["time"] > AFTERMATH_S:
            break
        chosen = before
    return chosen
