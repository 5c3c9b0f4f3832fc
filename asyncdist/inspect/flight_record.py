"""Dumps in the format of torch's Flight Recorder, for torch's own analyzer (`torch.distributed.flight_recorder`).

It compares the collectives of all ranks by process group and number, and says which rank lacks one, or has another one.
It knows no tags: collectives of a tag other than 0 are in a process group `name/tag`. It takes a message for an
operation of all ranks, so messages are left out, and so are collectives that it refuses to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

VERSION: Final = "2.10"
"""Of torch's format, as torch 2.13 writes it."""

_NAMES: Final = {
    "all_gather_into_tensor": "_all_gather_base",
    "all_gather_single": "_all_gather_base",
    "monitored_barrier": "barrier",
    "reduce_scatter_tensor": "_reduce_scatter_base",
}
_KNOWN: Final = frozenset(
    {"all_gather", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce"}
    | {"reduce_scatter", "scatter", *_NAMES}
)
_BLOCKS: Final = {"all_gather": (False, True), "gather": (False, True), "reduce_scatter": (True, False)}
"""Whether input and output hold a block for each rank; of all others neither does."""


def flight_records(documents: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """What each rank is to have in its file, which `pickle` writes, from the dumps of all ranks.

    Each begins where all that were dumped have something of the process group: the rings may reach back differently.
    """
    entries = {document["rank"]: _collectives(document) for document in documents}
    first: dict[tuple[str, int], int] = {}
    for each in entries.values():
        begun: dict[tuple[str, int], int] = {}
        for entry in each:
            begun.setdefault((entry["group_id"], entry["tag"]), entry["sequence"])
        for group, sequence in begun.items():
            first[group] = max(first.get(group, 0), sequence)
    found = {}
    for document in documents:
        kept = [one for one in entries[document["rank"]] if one["sequence"] >= first[one["group_id"], one["tag"]]]
        ranks = {group["id"]: group["ranks"] for group in document["groups"]}
        groups = {_group_of(one): {"desc": one["group"], "ranks": str(ranks[one["group_id"]])} for one in kept}
        written = [_entry(number, one, len(ranks[one["group_id"]])) for number, one in enumerate(kept)]
        found[document["rank"]] = {"version": VERSION, "pg_config": groups, "entries": written}
    return found


def _collectives(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in document["entries"] if one["kind"] == "collective" and one["operation"] in _KNOWN]


def _group_of(entry: Mapping[str, Any]) -> str:
    return str(entry["group_id"]) + (f"/{entry['tag']}" if entry["tag"] else "")


def _entry(number: int, entry: Mapping[str, Any], size: int) -> dict[str, Any]:
    counts = entry["counts"]
    elements = counts if isinstance(counts, int) else sum(counts)
    even = isinstance(counts, int)
    sizes = [[elements * (size if whole and even else 1)] for whole in _BLOCKS.get(entry["collective"], (False, False))]
    filename, _, line = entry.get("site", "").rpartition(":")
    frames = [{"name": entry.get("function", ""), "filename": filename, "line": int(line)}] if line else []
    ended = entry.get("ended")
    state = "completed" if ended is not None and "error" not in entry else "started"
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (_group_of(entry), entry["group"]),
        "collective_seq_id": entry["sequence"] + 1,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "profiling_name": f"gloo:{_NAMES.get(entry['operation'], entry['operation'])}",
        "input_sizes": [sizes[0]],
        "output_sizes": [sizes[1]],
        "input_dtypes": [entry["dtype"]],
        "output_dtypes": [entry["dtype"]],
        "state": state,
        "time_created_ns": int(entry["issued"] * 1e9),
        "time_discovered_started_ns": int(entry["issued"] * 1e9),
        "time_discovered_completed_ns": None if ended is None else int(ended * 1e9),
        "retired": state == "completed",
        "timeout_ms": 0,
        "frames": frames,
    }
