"""The store daemon of asyncdist: rendezvous, keys, counters and queues over one port.

    asyncdist-server --host 127.0.0.1 --port 29500         # a process of its own
    server = serve_in_thread(port=0)                        # in this process, on its own thread and loop
    async with serve(ServerConfig(port=0)) as server: ...   # on the running loop

Importing the package starts nothing and loads nothing; the names below are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdist_server.engine.engine import StoreEngine
    from asyncdist_server.serving.config import ConfigError, ServerConfig
    from asyncdist_server.serving.daemon import StoreServer, serve
    from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread
    from asyncdist_server.wire.messages import Limits

__all__ = [
    "ConfigError",
    "Limits",
    "ServerConfig",
    "StoreEngine",
    "StoreServer",
    "ThreadedServer",
    "serve",
    "serve_in_thread",
]

_HOMES = {
    "ConfigError": "serving.config",
    "Limits": "wire.messages",
    "ServerConfig": "serving.config",
    "StoreEngine": "engine.engine",
    "StoreServer": "serving.daemon",
    "ThreadedServer": "serving.threaded",
    "serve": "serving.daemon",
    "serve_in_thread": "serving.threaded",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562)."""
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
