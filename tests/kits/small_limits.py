"""The transport with tiny limits, so that a few messages reach every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from asyncdist.transport.protocol import (
    asking,
    credit,
    inbound,
    loans,
    offers,
    outbound,
    output,
    parking,
    pulls,
    reader,
)

CREDIT = 8192
EAGER = 600
EARLY_PULL = 400
GATHER = 300
OFFERS = 4
EARLY_PULLS = 2
ASKS = 8
FRAGMENT = 700
LEND = 1000

_LIMITS = {
    "CREDIT_BYTES": (CREDIT, (credit, parking)),
    "RETURN_CREDIT_BYTES": (CREDIT // 4, (credit, reader)),
    "URGENT_CREDIT_BYTES": (CREDIT // 2, (output,)),
    "EAGER_BYTES": (EAGER, (outbound, inbound, reader)),
    "EARLY_PULL_BYTES": (EARLY_PULL, (outbound, inbound, offers)),
    "GATHER_BYTES": (GATHER, (reader,)),
    "FRAGMENT_BYTES": (FRAGMENT, (output, pulls, reader)),
    "MAX_OFFERS": (OFFERS, (outbound, parking)),
    "MAX_EARLY_PULLS": (EARLY_PULLS, (pulls, offers)),
    "MAX_ASKS": (ASKS, (credit, asking)),
    "MAX_CALL_BYTES": (2048, (output,)),
    "MAX_READ_BYTES": (300, (reader,)),
    "DIRECT_BYTES": (64, (reader,)),
    "JOIN_BYTES": (128, (outbound, output)),
    "MAX_BUFFERS": (5, (output,)),
    "LEND_BYTES": (LEND, (loans,)),
    "READ_BYTES": (LEND, (loans,)),
    "COPY_BYTES": (1024, (loans,)),
}


@contextmanager
def small_limits() -> Iterator[None]:
    """Within, connections made obey the limits above."""
    patches = [
        mock.patch.object(module, name, value) for name, (value, modules) in _LIMITS.items() for module in modules
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
