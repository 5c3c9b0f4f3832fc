"""Operations as OpenTelemetry has them: what is measured, and whose child a span is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist import rpc
from asyncdist.rpc import messages
from asyncdist.testing import run_world

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from asyncdist.inspect.counts import SECONDS, size_class
from asyncdist.inspect.recorder import NOTE
from asyncdist.otel import DURATION, IO, WAITED_FOR, instrument, instrument_calls


class Telemetry:
    """What a rank has told."""

    def __init__(self) -> None:
        self._reader, self._spans = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters, self.tracers = MeterProvider([self._reader]), TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        data = self._reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics if data is not None else []
        return [(dict(p.attributes), p) for metric in metrics if metric.name == name for p in metric.data.data_points]

    def spans(self) -> list[Any]:
        return list(self._spans.get_finished_spans())


def test_operations_are_measured_and_are_children_of_the_callers_span() -> None:
    async def main(group: Group) -> Telemetry:
        told = Telemetry()
        remove = instrument(meter_provider=told.meters, tracer_provider=told.tracers)
        with told.tracers.get_tracer("program").start_as_current_span("step"):
            work = dist.all_reduce(np.ones(1000, np.float32), tag=3)
            if group.rank == 0:
                await group.send(np.ones(4), 1)
            else:
                await group.recv(np.empty(4), 0)
        await work
        await group.barrier()
        remove()
        await group.barrier()
        return told

    ranks = run_world(2, main)
    names = ("asyncdist.all_reduce", "asyncdist.barrier")
    ids = [
        {one.name: one.attributes["asyncdist.operation.id"] for one in each.spans() if one.name in names}
        for each in ranks
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0].values())) == 2
    for rank, told in enumerate(ranks):
        labels = {labels["asyncdist.operation"]: (labels, point) for labels, point in told.points(DURATION)}
        assert labels.keys() == {"all_reduce", "barrier", "recv" if rank else "send"}
        assert labels["all_reduce"][0]["asyncdist.size"] == "64KiB"
        assert labels["barrier"][1].count == 1
        assert labels["barrier"][1].explicit_bounds == SECONDS
        ((where, moved),) = told.points(IO)
        assert where == {"asyncdist.peer": 1 - rank, "network.io.direction": "receive" if rank else "transmit"}
        assert moved.value == 32
        spans = {span.name: span for span in told.spans()}
        step, reduced = spans["step"], spans["asyncdist.all_reduce"]
        for child in reduced, spans["asyncdist.recv" if rank else "asyncdist.send"]:
            assert child.parent.span_id == step.context.span_id
        assert spans["asyncdist.barrier"].parent is None
        assert (
            reduced.attributes.items() >= {"asyncdist.tag": 3, "asyncdist.sequence": 0, "asyncdist.bytes": 4000}.items()
        )
        assert reduced.start_time <= reduced.end_time
        assert step.start_time <= reduced.start_time


def test_a_failure_is_told_and_still_for_the_program_to_notice() -> None:
    async def main(group: Group) -> Telemetry:
        told = Telemetry()
        instrument(group, meter_provider=told.meters, tracer_provider=told.tracers)
        with pytest.raises(dist.CollectiveTimeoutError):
            await group.recv(np.empty(4), 1 - group.rank, timeout=1)
        return told

    for told in run_world(2, main):
        ((labels, _),) = told.points(DURATION)
        assert labels["error.type"] == "CollectiveTimeoutError"
        assert not told.points(IO)
        (span,) = told.spans()
        assert span.status.status_code is StatusCode.ERROR
        assert "within 1 s" in span.status.description


def test_who_came_last_is_counted() -> None:
    async def main(group: Group) -> Telemetry:
        told = Telemetry()

        def note(work: Any) -> None:  # as shared memory does
            work.entry[NOTE] = 1

        group.add_hook(after=note)
        instrument(group, meter_provider=told.meters, tracer_provider=told.tracers)
        await group.all_reduce(np.ones(1))
        await group.barrier()
        return told

    for told in run_world(2, main):
        assert {(labels["asyncdist.operation"], labels["asyncdist.rank"]) for labels, _ in told.points(WAITED_FOR)} == {
            ("all_reduce", 1),
            ("barrier", 1),
        }


@rpc.register
async def spanned() -> int:
    await asyncio.sleep(1)
    return get_current_span().get_span_context().span_id


@rpc.register
async def spanned_items() -> AsyncIterator[int]:
    yield await spanned()


def test_a_call_is_the_parent_of_what_its_callee_does() -> None:
    told = Telemetry()

    async def main(group: Group) -> None:
        async with rpc.serve():
            if group.rank:
                return
            assert await rpc.call(1, "spanned") == 0
            remove = instrument_calls(tracer_provider=told.tracers)
            with told.tracers.get_tracer("program").start_as_current_span("step") as step:
                there = [await rpc.call(1, "spanned"), *[item async for item in rpc.stream(1, "spanned_items")]]
                with pytest.raises(dist.RemoteError):
                    await rpc.call(1, "absent")
            await asyncio.sleep(0)
            calls = {span.name: span for span in told.spans()}
            assert there == [calls[f"asyncdist.rpc {name}"].context.span_id for name in ("spanned", "spanned_items")]
            assert {span.parent.span_id for span in calls.values() if span.parent} == {step.get_span_context().span_id}
            failed = calls["asyncdist.rpc absent"]
            assert failed.status.status_code is StatusCode.ERROR
            assert dict(failed.attributes)["asyncdist.peer"] == 1
            assert get_current_span().get_span_context().span_id == 0
            remove()
            assert await rpc.call(1, "spanned") == 0

    run_world(2, main)


@pytest.mark.parametrize("carried", [{}, {"traceparent": "nonsense"}, {"traceparent": 7, 8: None}])
def test_a_trace_context_that_is_none_does_no_harm(monkeypatch: pytest.MonkeyPatch, carried: dict[Any, Any]) -> None:
    remove = instrument_calls()
    monkeypatch.setattr(messages.tracing, "called", lambda name, rank: (carried, lambda work: None))

    async def main(group: Group) -> int:
        async with rpc.serve():
            found: int = await rpc.call(1, "spanned")
            return found

    assert run_world(2, main) == [0, 0]
    remove()


@pytest.mark.parametrize(
    ("nbytes", "name"), [(0, "1KiB"), (1024, "1KiB"), (1025, "64KiB"), (1 << 28, "256MiB"), (1 << 40, "more")]
)
def test_a_size_is_of_the_class_that_it_does_not_exceed(nbytes: int, name: str) -> None:
    assert size_class(nbytes) == name
