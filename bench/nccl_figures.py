"""What is measured on a GPU, as records that are written down one by one, so that a crash loses none of those before.

A record is a JSON object with a `kind`:

| kind | says |
| --- | --- |
| `about` | `values`: on what it ran |
| `beside` | seconds of one rank's all_reduce of `nbytes`, by library, which took turns; `name` is the neighbor |
| `missing` | `why` there is nothing of neighbor `name` |
| `stall` | lateness of the loop while awaiting, and `idle_s` while nothing was under way |
| `copy` | `bytes_per_s` of a copy within the device |
| `path` | `seconds` of two ranks' all_reduce of `nbytes` on path `name` |
| `together` | as `beside`, of two ranks through NCCL; `name` is the way to let it take them |
| `problem` | `why` path `name` has no figures, or not all |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench.gpu_sections import Outcome

__all__ = ["IPC_BYTES", "TORCH_BYTES", "Figures", "Note", "notes_to"]

TORCH_BYTES: Final = 64 << 20
"""The size that is compared with torch."""

IPC_BYTES: Final = 256 << 20
"""The size at which the paths of ranks on one device are compared."""

Note: TypeAlias = Callable[..., None]
"""`note(kind, **fields)` writes a record down."""


@dataclass
class Figures:
    """All records together."""

    about: dict[str, str] = field(default_factory=dict)
    beside: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    stall_s: float | None = None
    idle_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    paths: dict[str, dict[int, float]] = field(default_factory=dict)
    together: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "about":
            self.about.update(record["values"])
        elif kind == "beside":
            self.beside.setdefault(record["name"], {})[record["nbytes"]] = dict(record["seconds"])
        elif kind == "missing":
            self.missing[record["name"]] = record["why"]
        elif kind == "stall":
            self.stall_s, self.idle_s = record["seconds"], record["idle_s"]
        elif kind == "copy":
            self.copy_bytes_per_s = record["bytes_per_s"]
        elif kind == "path":
            self.paths.setdefault(record["name"], {})[record["nbytes"]] = record["seconds"]
        elif kind == "together":
            self.together.setdefault(record["name"], {})[record["nbytes"]] = dict(record["seconds"])
        elif kind == "problem":
            self.problems[record["name"]] = record["why"]
        else:
            raise ValueError(f"no such record: {kind}")

    @classmethod
    def read(cls, file: Path) -> Figures:
        """Those written so far; a record cut off in the middle, by a crash, is left out."""
        figures = cls()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            figures.take(record)
        return figures


def notes_to(file: Path) -> Note:
    """Write records into `file`, behind those that are there."""

    def note(kind: str, **fields: Any) -> None:
        with file.open("a") as opened:  # closed each time: whatever happens next, it is there
            opened.write(json.dumps({"kind": kind, **fields}) + "\n")

    return note
