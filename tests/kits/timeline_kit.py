"""A timeline, read back with Perfetto's own messages."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


class Timeline:
    """What a trace shows, checked as Perfetto reads it: slices of a track nest, and every track is told."""

    def __init__(self, data: bytes) -> None:
        parsed = Trace.FromString(data)
        self.tracks: dict[int, Any] = {}
        self.slices: list[dict[str, Any]] = []
        self.instants: list[dict[str, Any]] = []
        self.counters: dict[int, list[int]] = defaultdict(list)
        self.flows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By number, the times and tracks of its ends."""
        open_: dict[int, list[dict[str, Any]]] = defaultdict(list)
        last: dict[int, int] = defaultdict(int)
        for packet in parsed.packet:
            if packet.HasField("track_descriptor"):
                told = packet.track_descriptor
                assert told.uuid not in self.tracks
                assert not told.parent_uuid or told.parent_uuid in self.tracks
                self.tracks[told.uuid] = told
                continue
            event = packet.track_event
            track = event.track_uuid
            assert track in self.tracks
            assert packet.timestamp >= last[track], "a track's events are in order"
            last[track] = packet.timestamp
            found = {
                "name": event.name,
                "at": packet.timestamp,
                "rank": self.path(track)[0],
                "track": self.path(track)[-1],
            }
            for one in event.debug_annotations:
                found[one.name] = one.int_value if one.HasField("int_value") else one.string_value
            for flow in (*event.flow_ids, *event.terminating_flow_ids):
                self.flows[flow].append((packet.timestamp, found["rank"]))
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                assert not open_[track], "operations that overlap are on tracks of their own"
                open_[track].append(found)
                self.slices.append(found)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                open_[track].pop()["end"] = packet.timestamp
            elif event.type == TrackEvent.TYPE_COUNTER:
                assert self.tracks[track].counter.unit == 3
                self.counters[found["rank"]].append(event.counter_value)
            else:
                self.instants.append(found)

    def path(self, track: int) -> list[Any]:
        told = self.tracks[track]
        if told.parent_uuid:
            return [*self.path(told.parent_uuid), told.name]
        return [int(told.name.split()[1])]
