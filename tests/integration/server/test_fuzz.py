"""A short run of the fuzzer at both doors; `make soak` sends a million frames to each. See docs/fuzzing.md."""

from __future__ import annotations

import asyncio

import fuzz_connections
import fuzz_doors
import pytest
from fuzz_doors import MAX_GROWTH_BYTES, Daemon, Fuzzed, Fuzzer, TorchFuzzer, fuzz
from fuzz_frames import NativeFrames, TorchFrames

from asyncdist_server.serving.threaded import new_event_loop
from asyncdist_server.wire.messages import decode_hello

FRAMES = 3000


def run(door: str, frames: int = FRAMES) -> Fuzzed:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(fuzz(door, frames, seed=7))


@pytest.mark.parametrize("door", ["native", "torch"])
def test_the_daemon_takes_whatever_comes_and_serves_others(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_doors, "ROUND_FRAMES", FRAMES // 3)
    result = run(door)
    assert result.frames >= FRAMES
    assert result.ended > FRAMES / 20  # frames are bad enough
    assert result.healthy.answers >= 10
    assert result.growth_bytes < MAX_GROWTH_BYTES


@pytest.mark.parametrize("signal_name", ["kill", "terminate"])
def test_a_daemon_that_ends_is_a_failure(signal_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail."""

    async def end_it(fuzzer: Fuzzer) -> None:
        getattr(fuzzer.daemon.process, signal_name)()
        await fuzzer.daemon.process.wait()

    monkeypatch.setattr(TorchFuzzer, "clean_up", end_it)
    with pytest.raises((AssertionError, OSError, EOFError)):
        run("torch", 200)


def test_a_wrong_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spoil(fuzzer: Fuzzer) -> None:
        """Write into the healthy clients' job."""
        daemon: Daemon = fuzzer.daemon
        where = {"token": fuzz_doors.TOKEN, "namespace": "healthy"}
        async with fuzz_doors.TCPStore("127.0.0.1", daemon.port, **where) as store:
            while True:  # until it is noticed, which ends this
                await store.add("count", 1)

    monkeypatch.setattr(TorchFuzzer, "clean_up", spoil)
    with pytest.raises(AssertionError):
        run("torch", 200)


def test_a_seed_makes_the_same_frames() -> None:
    for source in (NativeFrames, TorchFrames):
        one, same, other = (source(seed) for seed in (1, 1, 2))
        frames = [one.frame() for _ in range(300)]
        assert frames == [same.frame() for _ in range(300)]
        assert frames != [other.frame() for _ in range(300)]
        assert len(set(frames)) > 200


@pytest.mark.parametrize("problem", ["breaks its own protocol", "refuses a client that does no wrong"])
def test_a_daemon_that_is_wrong_itself_is_a_failure(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "protocol" in problem:
        monkeypatch.setattr(fuzz_connections, "decode_replies", decode_hello)  # which no reply is
    else:
        monkeypatch.setattr(fuzz_connections.NativeDoor, "token", "another token than the daemon's")
    with pytest.raises(AssertionError, match=problem):
        run("native", 200)
