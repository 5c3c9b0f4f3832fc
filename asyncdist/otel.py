"""Metrics and spans of a group's operations, for OpenTelemetry: `pip install 'asyncdist[otel]'`.

Only the API is used, so nothing happens before the program sets an SDK up. See docs/operations.md for what there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context, propagate
from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
    get_tracer,
    set_span_in_context,
)

from asyncdist.group.default_group import Group, resolve
from asyncdist.inspect.counts import SECONDS, size_class
from asyncdist.inspect.recorder import ENDED, GROUP, NOTE, PEER, PLACE
from asyncdist.rpc import messages
from asyncdist.work import Work

DURATION: Final = "asyncdist.operation.duration"
IO: Final = "asyncdist.message.io"
WAITED_FOR: Final = "asyncdist.operation.waited_for"

_SENDS: Final = "transmit", "receive"


def instrument(
    group: Group = None, *, meter_provider: MeterProvider | None = None, tracer_provider: TracerProvider | None = None
) -> Callable[[], None]:
    """Measure each operation that this rank issues in `group` from now on, and make a span of it, until it ends.

    A span's parent is the span that was current where the operation was issued. Nothing of it travels to other ranks:
    spans of one collective have the same `asyncdist.operation.id` on all of them. The providers are those of the
    process unless given. Local; an operation takes microseconds longer, and tens of them with an SDK.
    Returns a function that ends it. Raises ValueError where there is no group.
    """
    meter, tracer = get_meter("asyncdist", meter_provider=meter_provider), get_tracer("asyncdist", "", tracer_provider)
    duration = meter.create_histogram(
        DURATION, "s", "From the call to the end.", explicit_bucket_boundaries_advisory=SECONDS
    )
    moved = meter.create_counter(IO, "By", "Arrays and objects of messages that have ended well.")
    waited_for = meter.create_counter(WAITED_FOR, "{operation}", "Collectives that waited for a rank last.")

    def ended(work: Work[Any]) -> None:
        entry, seconds = work.entry, work.duration
        if entry is None or seconds is None:  # the recorder is off, or it stands for several that have spans
            return
        said, well = entry[NOTE], work.is_success()
        labels: dict[str, Any] = {"asyncdist.operation": work.operation, "asyncdist.size": size_class(work.nbytes)}
        if not well:
            labels["error.type"] = str(said).partition(":")[0]
        duration.record(seconds, labels)
        place: dict[str, Any] = {"asyncdist.group": entry[GROUP].name, "asyncdist.bytes": work.nbytes}
        if isinstance(entry[PLACE], tuple):
            tag, sequence = entry[PLACE]
            place |= {"asyncdist.tag": tag, "asyncdist.sequence": sequence}
            place["asyncdist.operation.id"] = f"{entry[GROUP].group_id:016x}/{tag}/{sequence}"
            if well and isinstance(said, int):
                last = place["asyncdist.last_rank"] = entry[GROUP].ranks[said]
                waited_for.add(1, {"asyncdist.operation": work.operation, "asyncdist.rank": last})
        else:
            place |= {"asyncdist.tag": entry[PLACE], "asyncdist.peer": entry[PEER]}
            if well:
                direction = _SENDS["recv" in work.operation]
                moved.add(work.nbytes, {"asyncdist.peer": entry[PEER], "network.io.direction": direction})
        end_ns = time.time_ns() - int((time.monotonic() - entry[ENDED]) * 1e9)
        start_ns = end_ns - int(seconds * 1e9)
        span = tracer.start_span(
            f"asyncdist.{work.operation}", kind=SpanKind.INTERNAL, attributes=labels | place, start_time=start_ns
        )
        if not well:
            span.set_status(Status(StatusCode.ERROR, str(said)))
        span.end(end_ns)

    return resolve(group).add_hook(after=ended)


def instrument_calls(*, tracer_provider: TracerProvider | None = None) -> Callable[[], None]:
    """Make a span of each call of `asyncdist.rpc` that this process issues, the parent of what the callee does for it.

    The trace context travels with the call, so every rank that is called must be of this version; one that calls this
    too has the span as its current one while it serves. Returns a function that ends it.
    """
    messages.tracing = tracing = _Calls(get_tracer("asyncdist", "", tracer_provider))

    def remove() -> None:
        if messages.tracing is tracing:
            messages.tracing = None

    return remove


class _Calls:
    """See `messages.Tracing`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def called(self, name: str, rank: int) -> tuple[dict[str, str], Callable[[Work[Any]], object]]:
        attributes = {"rpc.system": "asyncdist", "rpc.method": name, "asyncdist.peer": rank}
        span: Span = self._tracer.start_span(f"asyncdist.rpc {name}", kind=SpanKind.CLIENT, attributes=attributes)
        carried: dict[str, str] = {}
        propagate.inject(carried, set_span_in_context(span))

        def ended(call: Work[Any]) -> None:
            if not call.is_success():
                span.set_status(Status(StatusCode.ERROR))
            span.end()

        return carried, ended

    @contextmanager
    def served(self, carried: dict[Any, Any]) -> Iterator[None]:
        texts = {name: text for name, text in carried.items() if isinstance(name, str) and isinstance(text, str)}
        token = context.attach(propagate.extract(texts))
        try:
            yield
        finally:
            context.detach(token)
