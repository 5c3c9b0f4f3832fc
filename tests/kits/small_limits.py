"""The transport with tiny limits, so that a few messages reach every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from asyncdist.transport.protocol import (
    flow_control,
    output_queue,
    reader,
    receiver,
    sender,
    unexpected_queue,
    zero_copy,
)

CREDIT = 8192
EAGER = 600
EARLY_PULL = 400
GATHER = 300
OFFERS = 4
EARLY_PULLS = 2
ASKS = 8
FRAGMENT = 700
EXPOSE = 1000

_LIMITS = {
    "CREDIT_BYTES": (CREDIT, (flow_control, unexpected_queue)),
    "RETURN_CREDIT_BYTES": (CREDIT // 4, (flow_control, reader)),
    "URGENT_CREDIT_BYTES": (CREDIT // 2, (output_queue,)),
    "EAGER_BYTES": (EAGER, (sender, receiver, reader)),
    "EARLY_PULL_BYTES": (EARLY_PULL, (sender, receiver)),
    "GATHER_BYTES": (GATHER, (reader,)),
    "FRAGMENT_BYTES": (FRAGMENT, (output_queue, receiver, reader)),
    "MAX_OFFERS": (OFFERS, (sender, unexpected_queue)),
    "MAX_EARLY_PULLS": (EARLY_PULLS, (receiver, sender)),
    "MAX_ASKS": (ASKS, (flow_control,)),
    "MAX_CALL_BYTES": (2048, (output_queue,)),
    "MAX_READ_BYTES": (300, (reader,)),
    "DIRECT_BYTES": (64, (reader,)),
    "JOIN_BYTES": (128, (sender, output_queue)),
    "MAX_BUFFERS": (5, (output_queue,)),
    "ZERO_COPY_BYTES": (EXPOSE, (zero_copy,)),
    "READ_BYTES": (EXPOSE, (zero_copy,)),
    "BULK_BYTES": (EXPOSE, (zero_copy,)),
    "COPY_BYTES": (1024, (zero_copy,)),
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
