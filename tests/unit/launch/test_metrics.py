"""What a launcher tells Prometheus of its ranks: sums, and numbers of each."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncdist.errors import LaunchError
from asyncdist.inspect.counts import SECONDS
from asyncdist.launch import metrics as module
from asyncdist.launch.config import parse_metrics_port
from asyncdist.launch.metrics import METRICS, PREFIX, NodeMetrics, serve_metrics

Found = dict[tuple[str, tuple[str, ...]], float]
ANY = parse_metrics_port("0")


def said(rank: int, times: int, **more: Any) -> dict[str, Any]:
    """The document of a rank that has done `times` all_reduces of a millisecond and waits for another."""
    within = [0] * (len(SECONDS) + 1)
    within[2] = times
    operation = {"operation": "all_reduce", "size": "1KiB", "seconds": times / 1000, "within": within}
    counts = {
        "operations": [operation | {"bytes": 100 * times, "failed": 1}],
        "peers": [{"rank": 1 - rank, "sent": 10 * rank, "received": 7}],
        "waited_for": [{"rank": 1, "times": times}],
        "lost": [3],
    }
    entries = [{"issued": 90.0}, {"issued": 95.0}, {"issued": 10.0, "ended": 20.0}]
    return {"rank": rank, "time": 100.0, "loop_late": 0.25, "entries": entries, "counts": counts} | more


async def scrape(address: str) -> Found:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return {
        (sample.name.removeprefix(PREFIX), tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def test_sums_and_numbers_of_each_rank_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.0)
    answers = [said(0, 2), said(1, 3), said(7, 50)]

    async def ask() -> list[dict[str, Any]]:
        return answers

    metrics = NodeMetrics(ask)
    async with serve_metrics(metrics, ANY) as address:
        assert {value for (name, _), value in (await scrape(address)).items()} == {0.0}
        metrics.begin(range(3))
        found = await scrape(address)
        assert found["operation_seconds_count", ("all_reduce", "1KiB")] == 5
        assert found["operation_seconds_sum", ("all_reduce", "1KiB")] == pytest.approx(0.005)
        assert found["operation_seconds_bucket", ("0.00025", "all_reduce", "1KiB")] == 0
        assert found["operation_seconds_bucket", ("0.001", "all_reduce", "1KiB")] == 5
        assert found["operation_bytes_total", ("all_reduce", "1KiB")] == 500
        assert found["operations_failed_total", ("all_reduce", "1KiB")] == 2
        assert found["waited_for_total", ("1",)] == 5
        assert found["message_bytes_total", ("sent", "0")] == 10
        assert found["message_bytes_total", ("received", "1")] == 7
        assert found["ranks_lost", ()] == 1
        assert [found["rank_answers", (str(rank),)] for rank in range(3)] == [1, 1, 0]
        assert found["rank_operations_total", ("1",)] == 3
        assert found["rank_operation_seconds_total", ("1",)] == pytest.approx(0.003)
        assert found["rank_oldest_operation_seconds", ("0",)] == 10
        assert found["rank_loop_late_seconds", ("0",)] == 0.25
        assert {name for name, _ in found} >= {
            metric.name + {"counter": "_total", "histogram": "_count"}.get(metric.kind, "") for metric in METRICS
        }
        answers[:] = [said(0, 4, counts=None)]
        later = await scrape(address)
        assert later["operation_seconds_count", ("all_reduce", "1KiB")] == 5, "a counter went back"
        assert later["rank_answers", ("1",)] == 0
        assert ("rank_oldest_operation_seconds", ("1",)) not in later
        metrics.begin(range(3))
        assert ("waited_for_total", ("1",)) not in await scrape(address)


async def test_readers_do_not_keep_the_ranks_busy() -> None:
    asked = []

    async def ask() -> list[dict[str, Any]]:
        asked.append(1)
        await asyncio.sleep(0.01)
        return [said(0, 2)]

    metrics = NodeMetrics(ask)
    metrics.begin(range(1))
    async with serve_metrics(metrics, ANY) as address:
        for found in await asyncio.gather(*(scrape(address) for _ in range(8))):
            assert found["rank_answers", ("0",)] == 1
    assert len(asked) == 1


ODD = [[1], {"operations": [{}]}, {"operations": 1}, {"operations": [{"operation": [], "size": 1}]}]


@pytest.mark.parametrize("counts", [*ODD, *({name: 7} for name in ("peers", "waited_for", "lost")), {"size": "\ud800"}])
async def test_a_rank_that_says_nonsense_does_not_end_the_numbers_of_others(counts: Any) -> None:
    odd = said(1, 2)
    match counts:
        case {"size": size}:
            odd["counts"]["operations"][0]["size"] = size
        case {}:
            odd["counts"] |= counts
        case _:
            odd["counts"] = counts

    async def ask() -> list[dict[str, Any]]:
        return [said(0, 2), odd]

    metrics = NodeMetrics(ask)
    metrics.begin(range(2))
    async with serve_metrics(metrics, ANY) as address:
        found = await scrape(address)
    assert (found["rank_operations_total", ("0",)], found["rank_answers", ("1",)]) == (2, 1)


async def test_what_is_missing_and_what_is_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[dict[str, Any]]:
        return []

    async with serve_metrics(NodeMetrics(ask), ANY) as address:
        with pytest.raises(OSError, match="cannot serve HTTP on"):
            async with serve_metrics(NodeMetrics(ask), parse_metrics_port(address)):
                pass
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(LaunchError, match="pip install"):
        async with serve_metrics(NodeMetrics(ask), ANY):
            pass


@pytest.mark.parametrize(
    ("text", "where"), [("9400", "127.0.0.1:9400"), ("0", "127.0.0.1:0"), ("[::]:9400", "[::]:9400")]
)
def test_a_port_alone_is_one_of_loopback(text: str, where: str) -> None:
    assert str(parse_metrics_port(text)) == where


@pytest.mark.parametrize("text", ["", "70000", "host", "host:x", ":9400", "::1", "²"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a port|neither a port nor"):
        parse_metrics_port(text)
