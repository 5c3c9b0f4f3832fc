"""vLLM's weight-transfer interface: workers stage versions of `asyncdist.weights` while they serve, then load them.

    from asyncdist.weights import vllm

    vllm.register()    # in vLLM's processes and in the trainer; the backend is then named "asyncdist"

Written against `vllm.distributed.weight_transfer.base` and `.factory` as of November 2026. A version is in the
memory of every worker's host before the trainer asks workers to load it: requests are held up for the copy to the GPU
only. Both sides are blocking, so what waits for the network runs in the communication thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncdist.arrays.host import Array
from asyncdist.errors import ClosedError
from asyncdist.store import TCPStore
from asyncdist.store.member import default_name
from asyncdist.threads.bridge import complete
from asyncdist.threads.thread import acquire, release
from asyncdist.weights.publisher import Publisher
from asyncdist.weights.subscriber import Subscription, Version

__all__ = ["Engine", "InitInfo", "TrainerEngine", "TrainerInfo", "UpdateInfo", "register"]

T = TypeVar("T")
BACKEND = "asyncdist"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # whatever vLLM says of its types
    """Where workers find the store, and the name of the weights."""

    store_host: str
    store_port: int
    name: str = "policy"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version workers are to load, and how many seconds they may wait for it."""

    version: int
    timeout_s: float = 60.0


@dataclass
class TrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """As `InitInfo`, for the trainer; `timeout_s` is how long a version may take to reach all workers."""

    store_host: str
    store_port: int
    name: str = "policy"
    timeout_s: float = 60.0


class _There:
    """A store, and what uses it, in the communication thread."""

    def __init__(self, host: str, port: int) -> None:
        self._thread = acquire()
        self._closing = contextlib.AsyncExitStack()

        async def connect() -> TCPStore:
            return await self._closing.enter_async_context(TCPStore(host, port))

        try:
            self.store = self.run(connect)
        except BaseException:
            release(self._thread)
            raise

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Wait for the end of what `function` begins there."""
        result: T = complete(self._thread, function, Context())
        return result

    def enter(self, entered: Any) -> None:
        """Enter something there, which is left at the end."""
        self.run(lambda: self._closing.enter_async_context(entered))

    def close(self) -> None:
        """Leave everything."""
        try:
            self.run(self._closing.aclose)
        finally:
            release(self._thread)


class _Versions:
    """The versions of a subscription, one at a time: it is ready at one once `loaded` was called."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._newest: Version | None = None
        self._news = asyncio.Condition()
        self._loaded = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _follow(self) -> None:
        try:
            async for version in self._subscription:
                self._loaded.clear()
                self._newest = version
                async with self._news:
                    self._news.notify_all()
                await self._loaded.wait()
        finally:
            async with self._news:
                self._news.notify_all()

    async def take(self, number: int, timeout_s: float) -> Version:
        """Wait for that version. Raises TimeoutError, and what has ended the subscription."""
        async with asyncio.timeout(timeout_s), self._news:
            while self._newest is None or self._newest.number != number:
                if self._task.done():
                    self._task.result()
                    raise ClosedError("the subscription is closed")
                self._loaded.set()
                await self._news.wait()
            return self._newest

    async def loaded(self) -> None:
        """What was taken is what is served."""
        self._loaded.set()


class Engine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's end."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _there: _There | None = None
    _versions: _Versions

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Subscribe."""
        self.shutdown()
        self._there = there = _There(init_info.store_host, init_info.store_port)

        async def subscribe() -> _Versions:
            return _Versions(Subscription(init_info.name, None, there.store, _label(self)))

        self._versions = there.run(subscribe)
        there.enter(self._versions)
        there.enter(self._versions._subscription)

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the checkpoint's format."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version, which is in this host's memory already."""
        there = self._open()
        version = there.run(lambda: self._versions.take(update_info.version, update_info.timeout_s))
        self.model.load_weights((name, tensor_of(array)) for name, array in version.arrays.items())

    def finish_weight_update(self) -> None:
        """The model is whole: say that this worker is ready at the version."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._open().run(self._versions.loaded)

    def shutdown(self) -> None:
        """Subscribe no more."""
        there, self._there = self._there, None
        if there is not None:
            there.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Not offered: `TrainerEngine` sends."""
        raise NotImplementedError("trainers use asyncdist.weights.vllm.TrainerEngine")

    def _open(self) -> _There:
        if self._there is None:
            raise RuntimeError("init_transfer_engine has not been called")
        return self._there


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end: rank 0 publishes, all ranks iterate over the source."""

    init_info_cls = TrainerInfo
    config_cls = object

    _there: _There | None = None
    _publisher: Publisher
    _info: TrainerInfo

    @classmethod
    def trainer_init(cls, config: Any, init_info: TrainerInfo, *, client: Any, source: Any) -> Self:
        """Take over as the publisher, and have the workers subscribe."""
        self = cls(config, client=client, source=source, is_sender=init_info.is_sender)
        if self.is_sender:
            self._info = init_info
            self._there = _There(init_info.store_host, init_info.store_port)

            async def publish() -> Publisher:
                assert self._there is not None
                return Publisher(init_info.name, self._there.store)

            try:
                self._publisher = self._there.run(publish)
                self._there.enter(self._publisher)
                where = {"store_host": init_info.store_host, "store_port": init_info.store_port}
                client.init_weight_transfer_engine({**where, "name": init_info.name})
            except BaseException:
                self.shutdown()
                raise
        return self

    def send_weights(self) -> None:
        """Commit the source's weights as the next version, and have all workers load it."""
        arrays = {name: tensor.detach().cpu() for name, tensor in self.source}
        if self._there is None:
            return
        version = (self._publisher.version or 0) + 1
        self._there.run(lambda: self._publisher.commit(version, arrays, timeout=self._info.timeout_s))
        self.client.start_weight_update()
        self.client.update_weights({"version": version, "timeout_s": self._info.timeout_s})
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Publish no more."""
        there, self._there = self._there, None
        if there is not None:
            there.close()


def register() -> None:
    """Make both known to vLLM as the backend "asyncdist". ValueError if there is one of that name."""
    WeightTransferEngineFactory.register_engine(BACKEND, Engine)
    WeightTransferTrainerFactory.register_engine(BACKEND, TrainerEngine)


def tensor_of(array: Array) -> Any:
    """The array as a torch tensor over the same memory, which must not be written."""
    import torch

    bits = {1: np.uint8, 2: np.int16}.get(array.dtype.itemsize) if array.dtype.kind == "V" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is read-only, and only read
        if bits is None:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))


def _label(engine: Any) -> str:
    rank = getattr(getattr(engine, "parallel_config", None), "rank", 0)
    return f"{default_name()}:{rank}"
