"""A server of FastAPI that answers with the newest weights of weights_trainer.py.

    STORE=127.0.0.1:29500 uvicorn --app-dir examples weights_fastapi:app --port 8080
    curl "http://127.0.0.1:8080/predict?x=3"; curl http://127.0.0.1:8080/ready

Needs fastapi and uvicorn (`pip install asyncdist[fastapi]`). Processes of a host share the memory of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException

import asyncdist as dist
from asyncdist import weights


async def take_versions(subscription: weights.Subscription) -> None:
    """Take every version; the model's arrays change by themselves when one is committed."""
    async for version in subscription:
        print(f"version {version.number}", flush=True)


def make_app(host: str, port: int) -> FastAPI:
    """The application; the store listens at `host` and `port`."""
    model: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def subscribed(app: FastAPI) -> AsyncIterator[None]:
        async with (
            dist.TCPStore(host, port) as store,
            weights.subscribe("example", into=model, store=store) as subscription,
        ):
            app.state.subscription = subscription
            task = asyncio.create_task(take_versions(subscription))
            yield
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    app = FastAPI(lifespan=subscribed)

    def version_served() -> int:
        version: int | None = app.state.subscription.version
        if version is None:
            raise HTTPException(503, "no weights yet")
        return version

    async def predict(x: float) -> dict[str, float]:
        version = version_served()
        scale, offset = model["scale"], model["offset"]  # both of one version: there is no await between
        return {"y": float(scale[0]) * x + float(offset[0]), "version": version}

    async def ready() -> dict[str, int]:
        return {"version": version_served()}

    app.add_api_route("/predict", predict)
    app.add_api_route("/ready", ready)
    return app


_host, _, _port = os.environ.get("STORE", "127.0.0.1:29500").rpartition(":")
app = make_app(_host, int(_port))
