"""Subject objects: collectives of Python objects that hold an array (`bench.object_calls`), with gloo and Open MPI."""

from __future__ import annotations

from collections.abc import Sequence

from bench.candidates import GLOO, MPI, TRANSPORTS
from bench.cases import LARGE_BYTES, Case, format_bytes
from bench.model import Profile, Subject
from bench.object_calls import OPERATIONS

SIZES = (64, 64 << 10, 4 << 20)


def cases(profile: Profile) -> Sequence[Case]:
    """Return a cell for each operation and size within the profile's limit."""
    return [
        Case(
            operation, nbytes, *profile.samples(large=nbytes > LARGE_BYTES), title=f"{operation} {format_bytes(nbytes)}"
        )
        for operation in OPERATIONS
        for nbytes in SIZES
        if nbytes <= profile.large_bytes
    ]


SUBJECT = Subject("objects", "Collectives of objects", (2, 4), cases, (*TRANSPORTS.values(), GLOO, MPI), budgeted=True)
