"""How long whoever awaits an operation looks at the GPU, and when looking is left off."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from asyncdist.concurrency.spin import MAX_SKIPPED, PATIENCE, TURN_S
from asyncdist.gpu.cuda_events import EventSpinner

LIMIT_US = 2000.0


class Gpu:
    """A `Completions` whose `work` ends with look number `ends`; 0 is never."""

    def __init__(self) -> None:
        self.loop = None
        self.work: Any = SimpleNamespace(_done=False)
        self.looks = 0
        self.ends = 0

    def look(self) -> None:
        self.looks += 1
        if self.looks == self.ends:
            self.work._done = True


class Messages:
    """A `Spinner` whose glance number `ends` ends the work."""

    def __init__(self, ends: int) -> None:
        self.glances = 0
        self.ends = ends

    def glance(self, work: Any) -> None:
        self.glances += 1
        if self.glances == self.ends:
            work._done = True


def spinner_of(gpu: Gpu, messages: Messages | None = None) -> EventSpinner:
    completions: Any = gpu
    spinner: Any = messages
    return EventSpinner(completions, LIMIT_US, spinner)


def test_it_looks_until_the_operation_has_ended() -> None:
    gpu = Gpu()
    gpu.ends = 3
    assert spinner_of(gpu).look(gpu.work)
    assert gpu.looks == 3


def test_it_looks_for_messages_too_where_those_move_operations_on() -> None:
    gpu, messages = Gpu(), Messages(4)
    assert spinner_of(gpu, messages).look(gpu.work)
    assert messages.glances == 4
    assert gpu.looks == 5


def test_it_gives_up_after_a_while() -> None:
    gpu = Gpu()
    start_s = time.perf_counter()
    assert not spinner_of(gpu).look(gpu.work)
    assert time.perf_counter() - start_s >= LIMIT_US * 1e-6
    assert gpu.looks > 1


def test_it_looks_less_often_in_vain_and_again_when_that_has_helped() -> None:
    gpu = Gpu()
    spinner = spinner_of(gpu)
    looked = 0
    for _ in range(4 * MAX_SKIPPED):
        before = gpu.looks
        spinner.look(gpu.work)
        looked += gpu.looks > before
    assert PATIENCE <= looked <= PATIENCE + 8
    gpu.work._done = True
    while not spinner.look(gpu.work):
        pass
    before = gpu.looks
    assert spinner.look(gpu.work)
    assert gpu.looks > before


def test_other_threads_do_not_look() -> None:
    gpu = Gpu()
    spinner = spinner_of(gpu)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(spinner.look(gpu.work)))
    thread.start()
    thread.join()
    assert found == [False]
    assert not gpu.looks


def test_the_loop_gets_a_turn_once_a_millisecond() -> None:
    spinner = spinner_of(Gpu())
    assert spinner.turn_due()
    assert not spinner.turn_due()
    time.sleep(TURN_S)
    assert spinner.turn_due()
