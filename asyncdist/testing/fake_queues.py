"""Streams and events of the fake CUDA: queues of work, and the thread that runs it.

In mode "inline" work runs as soon as all earlier work has run, in the thread that ran the earlier work: nothing depends
on time, and virtual time works. In mode "threads" one thread runs all streams, and work takes real time. In mode
"manual" nothing runs until the test calls `step` or `run_all`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

from asyncdist.cuda.interface import Event, Stream
from asyncdist.errors import DistBackendError

Mode: TypeAlias = Literal["inline", "threads", "manual"]
Span: TypeAlias = tuple[int, int]
"""Pointer and length in bytes."""

SYNCHRONIZE_LIMIT_S: Final = 60.0
"""A real synchronize waits for ever. A test that waits this long has failed."""

POLL_S: Final = 0.0005
"""How often a thread looks for work of other processes, which cannot wake this process."""


class Step:
    """One piece of work in a queue. One thread at a time calls `ready` and `run`."""

    polled = False
    """Whether the scheduler has to look when the step becomes ready, as nothing says so."""

    def __init__(self, spans: Sequence[Span] = (), body: Callable[[], None] | None = None) -> None:
        self.spans = spans
        self._body = body

    def ready(self) -> bool:
        """Whether the step may run now. Called under the scheduler's lock, at the head of the step's queue."""
        return True

    def run(self) -> None:
        """Do the work, without the lock."""
        if self._body is not None:
            self._body()


class Queue:
    """The work of one stream, in order."""

    def __init__(self, handle: int, device: int) -> None:
        self.handle = handle
        self.device = device
        self.steps: deque[Step] = deque()
        self.running: Step | None = None
        self.closed = False

    @property
    def idle(self) -> bool:
        """Whether all queued work has run."""
        return not self.steps and self.running is None

    def pending(self) -> list[Step]:
        """The steps that have not run."""
        return [*([self.running] if self.running is not None else []), *self.steps]


class Scheduler:
    """All queues of one fake runtime. The first failure of a step is kept; every later call raises it."""

    def __init__(self, mode: Mode) -> None:
        if mode not in ("inline", "threads", "manual"):
            raise ValueError(f"mode must be 'inline', 'threads' or 'manual', not {mode!r}")
        self.mode = mode
        self.changed = threading.Condition(threading.Lock())
        self.queues: list[Queue] = []
        self.failure = ""
        self.news = 0  # counts what may have made other steps ready
        self._closed = False
        self._worker: threading.Thread | None = None

    def add(self, queue: Queue) -> None:
        with self.changed:
            self.queues.append(queue)

    def submit(self, queue: Queue, step: Step) -> None:
        self.check()
        if queue.closed:
            raise DistBackendError("invalid resource handle: the stream was closed")
        with self.changed:
            if self._closed:
                raise DistBackendError("the fake runtime was closed")
            queue.steps.append(step)
            if self.mode == "threads" and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="fake CUDA", daemon=True)
                self._worker.start()
        self.stir()

    def stir(self) -> None:
        """Run the steps that may have become ready, or wake the thread that runs them."""
        with self.changed:
            if self.mode == "inline":
                self._run_ready(None)
            self.changed.notify_all()

    def step(self) -> bool:
        """Run one step that is ready; False if there is none. For mode "manual"."""
        with self.changed:
            ran = self._run_ready(1)
            self.changed.notify_all()
        return ran

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition`, which depends on steps that run."""
        deadline = time.monotonic() + SYNCHRONIZE_LIMIT_S
        with self.changed:
            while not condition() and not self.failure and not self._closed:
                if self.mode == "inline":
                    self._run_ready(None)  # something of another process may be ready by now
                    if condition():
                        break
                if not self.changed.wait(POLL_S if self._polled() else 0.1) and time.monotonic() > deadline:
                    raise DistBackendError(f"{what} waited {SYNCHRONIZE_LIMIT_S:g} s for work that does not end")
        self.check()

    def in_use(self, span: Span) -> bool:
        """Whether queued work touches any of these bytes. Under the lock."""
        first, last = span[0], span[0] + span[1]
        return any(
            pointer < last and first < pointer + nbytes
            for queue in self.queues
            for step in queue.pending()
            for pointer, nbytes in step.spans
        )

    def check(self) -> None:
        """Raise the failure of earlier work, if there is one."""
        if self.failure:
            raise DistBackendError(self.failure)

    def close(self) -> None:
        """Drop what is queued and end the thread."""
        with self.changed:
            self._closed = True
            for queue in self.queues:
                queue.steps.clear()
            self.changed.notify_all()
        worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(SYNCHRONIZE_LIMIT_S)

    def _work(self) -> None:
        with self.changed:
            while not self._closed:
                if not self._run_ready(None):
                    self.changed.wait(POLL_S if self._polled() else None)

    def _polled(self) -> bool:
        return any(queue.steps and queue.steps[0].polled for queue in self.queues)

    def _run_ready(self, limit: int | None) -> bool:
        """Run ready steps at the heads of queues, at most `limit`. A step runs without the lock."""
        ran = 0
        seen = -1
        while seen != self.news and ran != limit:
            seen = self.news
            for queue in list(self.queues):
                if queue.running is None and queue.steps and ran != limit and self._ready(queue):
                    self._run(queue)
                    self.news += 1
                    ran += 1
        self.queues = [queue for queue in self.queues if not (queue.closed and queue.idle)]
        return bool(ran)

    def _ready(self, queue: Queue) -> bool:
        try:
            return queue.steps[0].ready()
        except Exception as error:
            self._fail(error)
            queue.steps.clear()
            return False

    def _fail(self, error: Exception) -> None:
        """Keep the first failure: a real device fails asynchronously too."""
        self.failure = self.failure or f"an earlier operation failed: {error}"
        self.changed.notify_all()

    def _run(self, queue: Queue) -> None:
        step = queue.running = queue.steps.popleft()
        failure: Exception | None = None
        self.changed.release()
        try:
            step.run()
        except Exception as error:
            failure = error
        finally:
            self.changed.acquire()
            queue.running = None
            self.changed.notify_all()
        if failure is not None:
            self._fail(failure)


class FakeStream(Stream):
    """A stream. Closing one that we own gives its queue up once the queue is empty."""

    def __init__(self, scheduler: Scheduler, queue: Queue, *, owned: bool) -> None:
        self._scheduler = scheduler
        self.queue = queue
        self._owned = owned
        self.handle = queue.handle
        self.device = queue.device

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, FakeEvent):
            raise TypeError(f"expected an event of the fake runtime, got {event!r}")
        event.check_open()
        self._scheduler.submit(self.queue, _Waiting(event))

    def synchronize(self) -> None:
        self._scheduler.wait(lambda: self.queue.idle, "synchronizing a stream")

    def close(self) -> None:
        if self._owned:
            self.queue.closed = True


class FakeEvent(Event):
    """An event: the work on a stream at the last record. A wait that has begun is for the record at its begin."""

    def __init__(self, scheduler: Scheduler, device: int) -> None:
        self._scheduler = scheduler
        self.device = device
        self.handle = id(self)
        self.recording = _Recording()
        self.recording.run()  # one that was never recorded is done
        self._closed = False

    def record(self, stream: Stream) -> None:
        self.check_open()
        if not isinstance(stream, FakeStream):
            raise TypeError(f"expected a stream of the fake runtime, got {stream!r}")
        if stream.device != self.device:
            raise DistBackendError(
                f"invalid resource handle: an event of device {self.device}, a stream of device {stream.device}"
            )
        self.recording = _Recording()
        self._scheduler.submit(stream.queue, self.recording)

    def done(self) -> bool:
        self.check_open()
        self._scheduler.check()
        return self.recording.happened

    def synchronize(self) -> None:
        self.check_open()
        recording = self.recording
        self._scheduler.wait(lambda: recording.happened, "synchronizing an event")

    def check_open(self) -> None:
        if self._closed:
            raise DistBackendError("invalid resource handle: the event was closed")

    def close(self) -> None:
        """See Event. Waits that have begun go on."""
        self._closed = True


class _Recording(Step):
    happened = False

    def run(self) -> None:
        self.happened = True


class _Waiting(Step):
    def __init__(self, event: FakeEvent) -> None:
        super().__init__()
        self._recording = event.recording

    def ready(self) -> bool:
        return self._recording.happened


class Gate(Step):
    """Work that ends when the test calls `open`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._opened = False

    def ready(self) -> bool:
        return self._opened

    def open(self) -> None:
        """Let the stream go on."""
        self._opened = True
        self._scheduler.stir()


class Delay(Step):
    """Work that takes time."""

    polled = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._end: float | None = None

    def ready(self) -> bool:
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return now >= self._end
