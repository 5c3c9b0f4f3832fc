"""The servers among the examples, while a trainer commits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asyncdist import TCPStore, weights
from asyncdist_server import serve_in_thread

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, module)  # where annotations are looked up
    specification.loader.exec_module(module)
    return module


def model(version: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"scale": np.full(1000, version, np.float32), "offset": np.full(1, version, np.float32)}


async def asked(get: Any, port: int) -> None:
    """Commit two versions, and ask the server behind `get`, which returns a status and what JSON says."""
    assert (await get("/ready"))[0] == (await get("/predict?x=3"))[0] == 503
    async with TCPStore("127.0.0.1", port) as store, weights.publish("example", store=store) as publisher:
        for version in (1, 2):
            await publisher.commit(version, model(version))
            await weights.wait_ready("example", version, store=store, timeout=20)
            assert await get("/ready") == (200, {"version": version})
            assert await get("/predict?x=3") == (200, {"y": 4.0 * version, "version": version})
    assert await get("/ready") == (200, {"version": 2})


async def test_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    test_utils = pytest.importorskip("aiohttp.test_utils")
    with serve_in_thread() as server:
        app = example("weights_aiohttp", monkeypatch).make_app("127.0.0.1", server.port)
        async with test_utils.TestClient(test_utils.TestServer(app)) as client:

            async def get(path: str) -> tuple[int, Any]:
                async with client.get(path) as answer:
                    return answer.status, await answer.json() if answer.content_type == "application/json" else None

            await asked(get, server.port)


async def test_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    with serve_in_thread() as server:
        app = example("weights_fastapi", monkeypatch).make_app("127.0.0.1", server.port)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client,
        ):

            async def get(path: str) -> tuple[int, Any]:
                answer = await client.get(path)
                return answer.status_code, answer.json()

            await asked(get, server.port)
