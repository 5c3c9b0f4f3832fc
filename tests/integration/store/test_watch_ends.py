"""How a watch ends: whoever asks it again is told again, and keeps nothing of who asked before."""

from __future__ import annotations

import gc
import weakref

import pytest

from asyncdist.errors import ClosedError
from asyncdist.store import PrefixStore, TCPStore, Watch
from asyncdist_server.serving.threaded import ThreadedServer


class Held:
    """Something in a frame."""


async def test_an_end_that_is_asked_for_again_keeps_no_frame(server: ThreadedServer, namespace: str) -> None:
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
        view = PrefixStore("p", store)
        closed, view_closed = store.watch("k"), view.watch("k")
        await closed.close()
        await view.close()

        async def ask(watch: Watch, expected: type[Exception]) -> tuple[int, weakref.ref[Held]]:
            held = Held()
            with pytest.raises(expected) as caught:
                await anext(watch)
            depth = len(caught.traceback)
            del caught
            return depth, weakref.ref(held)

        for watch, expected in ((closed, StopAsyncIteration), (view_closed, ClosedError)):
            asked = [await ask(watch, expected) for _ in range(3)]
            gc.collect()
            assert len({depth for depth, _ in asked}) == 1
            assert all(held() is None for _, held in asked)
