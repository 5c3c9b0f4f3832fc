"""A server of aiohttp that answers with the newest weights of weights_trainer.py.

    python examples/weights_aiohttp.py --store 127.0.0.1:29500 --port 8080
    curl "http://127.0.0.1:8080/predict?x=3"; curl http://127.0.0.1:8080/ready

Needs aiohttp (`pip install asyncdist[server]`). A load balancer asks /ready: the server is there before it has weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

import asyncdist as dist
from asyncdist import weights

MODEL: web.AppKey[dict[str, Any]] = web.AppKey("model", dict)
SUBSCRIPTION = web.AppKey("subscription", weights.Subscription)


async def take_versions(subscription: weights.Subscription) -> None:
    """Take every version; the model's arrays change by themselves when one is committed."""
    async for version in subscription:
        print(f"version {version.number}", flush=True)


def make_app(host: str, port: int) -> web.Application:
    """The application; the store listens at `host` and `port`."""
    app = web.Application()
    app[MODEL] = {}

    async def subscribed(app: web.Application) -> AsyncIterator[None]:
        async with (
            dist.TCPStore(host, port) as store,
            weights.subscribe("example", into=app[MODEL], store=store) as subscription,
        ):
            app[SUBSCRIPTION] = subscription
            task = asyncio.create_task(take_versions(subscription))
            yield
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def predict(request: web.Request) -> web.Response:
        model, version = request.app[MODEL], request.app[SUBSCRIPTION].version
        if version is None:
            raise web.HTTPServiceUnavailable(text="no weights yet")
        scale, offset = model["scale"], model["offset"]  # both of one version: there is no await between
        y = float(scale[0]) * float(request.query["x"]) + float(offset[0])
        return web.json_response({"y": y, "version": version})

    async def ready(request: web.Request) -> web.Response:
        version = request.app[SUBSCRIPTION].version
        return web.json_response({"version": version}, status=503 if version is None else 200)

    app.cleanup_ctx.append(subscribed)
    app.add_routes([web.get("/predict", predict), web.get("/ready", ready)])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server of aiohttp that answers with the newest weights.")
    parser.add_argument("--store", default="127.0.0.1:29500", help="where asyncdist-server listens")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    store_host, _, store_port = options.store.rpartition(":")
    web.run_app(make_app(store_host, int(store_port)), port=options.port)
