"""Lines, prefixes, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.launch import streams
from asyncdist.launch.streams import MAX_LINE_BYTES, TAIL_LINES, LinePrefixer, StreamPump
from asyncdist.launch.writers import OutputWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_whole_lines_get_the_prefix() -> None:
    lines = LinePrefixer(b"[rank 3] ")
    assert lines.feed(b"one\ntwo\n\nthr") == b"[rank 3] one\n[rank 3] two\n[rank 3] \n"
    assert lines.has_partial
    assert lines.feed(b"ee\n") == b"[rank 3] three\n"
    assert not lines.has_partial
    assert lines.flush() == b""


def test_a_partial_line_is_finished_when_flushed() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"loading...") == b""
    assert lines.flush() == b"> loading...\n"


def test_bytes_are_not_text() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"\x00\xff\xfe\x85\n\xe2\x80\n") == b"> \x00\xff\xfe\x85\n> \xe2\x80\n"


def test_carriage_returns_keep_a_progress_bar_on_its_line() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"10%\r20%\r") == b"> 10%\r"
    assert lines.feed(b"30%\r") == b"> 20%\r"
    assert lines.feed(b"\n") == b"> 30%\r\n"
    assert lines.feed(b"dos\r\nline\r\n") == b"> dos\r\n> line\r\n"
    assert lines.feed(b"end\r") == b""
    assert lines.flush() == b"> end\r"


def test_a_line_at_the_limit_is_whole_and_one_past_it_is_cut() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"x" * MAX_LINE_BYTES) == b""
    assert lines.feed(b"\n") == b"> " + b"x" * MAX_LINE_BYTES + b"\n"
    assert lines.feed(b"x" * (MAX_LINE_BYTES + 1)) == b"> " + b"x" * MAX_LINE_BYTES + b"\n"
    assert lines.flush() == b"> x\n"


def test_the_tail_is_bounded_both_ways() -> None:
    lines = LinePrefixer(b"> ")
    lines.feed(b"".join(b"%d\r\n" % number for number in range(TAIL_LINES + 1)))
    assert list(lines.tail) == [b"%d" % number for number in range(1, TAIL_LINES + 1)]
    lines.feed(b"y" * 10_000 + b"\n")
    assert lines.tail[-1] == b"y" * 4096


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\xff", b"b" * 9]), max_size=30), st.data())
def test_where_the_stream_is_cut_does_not_matter(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    one, many = LinePrefixer(b"> "), LinePrefixer(b"> ")
    expected = one.feed(whole) + one.flush()
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(many.feed(part) for part in parts) + many.flush() == expected
    assert expected.replace(b"> ", b"").rstrip(b"\n") == whole.rstrip(b"\n")
    assert one.tail == many.tail


async def test_writer_writes_in_order_and_leaves_no_thread(pipe: tuple[int, int]) -> None:
    writer = OutputWriter(pipe[1])
    for number in range(100):
        writer.write(b"%d " % number)
    assert await writer.close(60)
    assert os.read(pipe[0], 4096) == b"".join(b"%d " % number for number in range(100))
    assert not writer._thread.is_alive()


async def test_a_reader_that_stops_fills_the_writer_and_blocks_nobody(pipe: tuple[int, int]) -> None:
    writer = OutputWriter(pipe[1], high_water_bytes=100_000)
    drained = asyncio.Event()
    writer.write(b"x" * 200_000)
    assert writer.is_full
    writer.when_drained(drained.set)
    await asyncio.sleep(0)
    assert not drained.is_set()
    assert not await writer.close(0)
    total = 0
    while total < 200_000:
        total += len(await asyncio.to_thread(os.read, pipe[0], 65536))
    async with asyncio.timeout(60):
        await drained.wait()
        assert await writer.close()


async def test_when_drained_calls_at_once_if_there_is_room(pipe: tuple[int, int]) -> None:
    writer = OutputWriter(pipe[1])
    drained = asyncio.Event()
    writer.when_drained(drained.set)
    async with asyncio.timeout(60):
        await drained.wait()
    assert await writer.close(60)


async def test_output_nobody_reads_any_more_is_discarded(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = OutputWriter(pipe[1])
    writer.write(b"gone")
    writer.write(b"gone")
    assert await writer.close(60)
    assert isinstance(writer.error, BrokenPipeError)


async def test_pump_to_the_end_of_file(pipe: tuple[int, int]) -> None:
    worker_read, worker_write = os.pipe()
    writer = OutputWriter(pipe[1])
    pump = StreamPump(worker_read, b"[rank 0] ", writer)
    os.write(worker_write, b"one\ntwo")
    os.close(worker_write)
    await pump.drain(60)
    await writer.close(60)
    assert os.read(pipe[0], 4096) == b"[rank 0] one\n[rank 0] two\n"
    assert pump.tail == [b"one", b"two"]


async def test_partial_lines_are_shown_after_a_while(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PARTIAL_LINE_S", 0.01)
    worker_read, worker_write = os.pipe()
    writer = OutputWriter(pipe[1])
    pump = StreamPump(worker_read, b"> ", writer)
    os.write(worker_write, b"name? ")
    assert await asyncio.to_thread(os.read, pipe[0], 4096) == b"> name? \n"
    pump.close()
    os.close(worker_write)
    await writer.close(60)


async def test_drain_gives_up_on_a_pipe_that_a_descendant_holds_open(pipe: tuple[int, int]) -> None:
    worker_read, worker_write = os.pipe()
    writer = OutputWriter(pipe[1])
    pump = StreamPump(worker_read, b"> ", writer)
    async with asyncio.timeout(60):
        await pump.drain(0.01)
    pump.close()
    pump.close()
    os.close(worker_write)
    await writer.close(60)


async def test_pump_stops_reading_while_the_writer_is_full(pipe: tuple[int, int]) -> None:
    worker_read, worker_write = os.pipe()
    os.set_blocking(worker_write, False)
    writer = OutputWriter(pipe[1], high_water_bytes=1)
    pump = StreamPump(worker_read, b"", writer)
    written = 0
    async with asyncio.timeout(60):
        while written < 10_000_000:  # more than all buffers on the way: it must come to a stop
            try:
                written += os.write(worker_write, b"x" * 4095 + b"\n")
            except BlockingIOError:
                if pump._paused:
                    break
                await asyncio.sleep(0)
    assert written < 1_000_000
    os.close(worker_write)
    total = 0
    while total < written:
        total += len(await asyncio.to_thread(os.read, pipe[0], 1 << 20))
    async with asyncio.timeout(60):
        await pump.drain(1)
    await writer.close(60)
    assert total == written
